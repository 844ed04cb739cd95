"""Mamba-2 mixers (Bamba, Granite 4): runs that start from their parent's state.

Parity of the two passes rests on what `gated_delta` says, and on the time step: softplus and
clamp in float32.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.models.bamba.modeling_bamba import (
    BambaAttention,
    BambaForCausalLM,
    BambaMixer,
)
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridAttention,
    GraniteMoeHybridForCausalLM,
    GraniteMoeHybridMambaLayer,
)

from octopus_trl.errors import ConfigError
from octopus_trl.kernels import select
from octopus_trl.models.backbone import Backbone, RecurrentSizes
from octopus_trl.models.context import by_level, own_outputs


class _Mamba2Pass:
    """Runs convolution and recurrence level by level inside a pass of ours."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        octopus: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Mix tokens along their own thread; a mount never enters here.

        A splice steps through a sibling's rows from the reader's state, between runs of its own.

        Args:
            hidden_states: [1, T, d] rows of the pass.
        """
        if octopus is None:
            return super().forward(  # type: ignore[misc]
                hidden_states, cache=cache, attention_mask=attention_mask, **kwargs
            )
        gate, mixed, dt = self.in_proj(hidden_states)[0].split(
            [self.intermediate_size, self.conv_dim, self.num_heads], dim=-1
        )
        dt = F.softplus(dt.float() + self.dt_bias.float()).clamp(*self.time_step_limit)
        weight = self.conv1d.weight.squeeze(1)
        carry = octopus.carry(self.layer_idx, mixed.dtype)
        outs: list[Tensor] = []
        for index, (level, (x, step)) in enumerate(
            by_level(octopus.levels, mixed, dt, steps=octopus.steps)
        ):
            tail, state = carry.load(index)
            x, tail = self._conv(x, weight, tail, level)
            y, state = self._scan(x, step, state, level)
            carry.store(index, tail, state)
            outs.append(y)
        core = own_outputs(outs, octopus.steps)
        normed = self.norm(core.flatten(1), gate)
        return self.out_proj(normed.to(hidden_states.dtype))[None]

    def _conv(
        self: Any, x: Tensor, weight: Tensor, tail: Tensor, level: Any
    ) -> tuple[Tensor, Tensor]:
        """Convolve the rows of one level; x is [T', C]."""
        bias = self.conv1d.bias
        if level.single:
            step = select("causal_conv_step", x.device)
            return step(x, weight=weight, bias=bias, tail=tail)
        conv = select("causal_conv", x.device)
        return conv(x, weight=weight, bias=bias, tail=tail, cu_seqlens=level.cu_seqlens)

    def _scan(
        self: Any, mixed: Tensor, dt: Tensor, state: Tensor, level: Any
    ) -> tuple[Tensor, Tensor]:
        """Run the recurrence over the rows of one level; `mixed` is the convolved [T', C]."""
        rows, width = mixed.shape[0], self.n_groups * self.ssm_state_size
        x, keys, queries = mixed.split([self.intermediate_size, width, width], dim=-1)
        shared = {
            "dt": dt,
            "rate": -self.A_log.float().exp(),
            "keys": keys.reshape(rows, self.n_groups, -1),
            "queries": queries.reshape(rows, self.n_groups, -1),
            "skip": self.D,
        }
        x = x.reshape(rows, self.num_heads, self.head_dim)
        if level.single:
            return select("ssd_step", x.device)(x, **shared, state=state)
        scan = select("ssd", x.device)
        return scan(x, **shared, initial_state=state, cu_seqlens=level.cu_seqlens)


class OctopusBambaMixer(_Mamba2Pass, BambaMixer):
    """Bamba's mixer inside a pass of ours."""


class OctopusGraniteMixer(_Mamba2Pass, GraniteMoeHybridMambaLayer):
    """Granite's mixer inside a pass of ours."""


def mamba2_sizes(config: Any) -> RecurrentSizes:
    """Read the state [H, P, S] and the tail [C, W - 1] of a Mamba-2 config.

    Raises:
        ConfigError: the convolution's activation is not SiLU.
    """
    if config.hidden_act != "silu":
        raise ConfigError(
            f"hidden_act={config.hidden_act!r}: the convolution here applies silu, no other"
        )
    inner = int(config.mamba_expand * config.hidden_size)
    channels = inner + 2 * config.mamba_n_groups * config.mamba_d_state
    return RecurrentSizes(
        (config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state),
        (channels, config.mamba_d_conv - 1),
    )


def _scaled_head(causal_lm: Any) -> Any:
    """Granite divides its logits by a constant of the config."""
    head, scale = causal_lm.lm_head, causal_lm.config.logits_scaling
    return lambda rows: head(rows) / scale


BAMBA = Backbone(
    causal_lm=BambaForCausalLM,
    attention=BambaAttention,
    mixers={BambaMixer: OctopusBambaMixer},
    recurrent_sizes=mamba2_sizes,
)
GRANITE = Backbone(
    causal_lm=GraniteMoeHybridForCausalLM,
    attention=GraniteMoeHybridAttention,
    mixers={GraniteMoeHybridMambaLayer: OctopusGraniteMixer},
    recurrent_sizes=mamba2_sizes,
    head=_scaled_head,
)
