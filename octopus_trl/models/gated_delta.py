"""Gated DeltaNet mixer: runs that start from their parent's state, in a packed or a paged pass.

Parity of the two passes rests on: recurrent states in float32 on both sides; convolution tails in
the model's dtype, holding inputs before the activation; gates computed per row with the formulas
of transformers (softplus and exp in float32); an initial state always given (zeros for a root), so
that a fresh and a continued run take the same code.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from octopus_trl.kernels import select
from octopus_trl.models.context import by_level, own_outputs


class GatedDeltaPass:
    """Runs convolution and delta rule level by level inside a pass of ours."""

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
        # `squeeze`, because the gradient of an index is a copy into zeros.
        mixed = self.in_proj_qkv(hidden_states).squeeze(0)
        z = self.in_proj_z(hidden_states).reshape(-1, self.head_v_dim)
        beta = self.in_proj_b(hidden_states).squeeze(0).sigmoid()
        a = self.in_proj_a(hidden_states).squeeze(0)
        g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        weight = self.conv1d.weight.squeeze(1)

        carry = octopus.carry(self.layer_idx, mixed.dtype)
        outs: list[Tensor] = []
        parts = by_level(octopus.levels, mixed, g, beta, steps=octopus.steps)
        for index, (level, (x, decay, strength)) in enumerate(parts):
            tail, state = carry.load(index)
            x, tail = self._conv(x, weight, tail, level)
            out, state = self._delta(x, decay, strength, state, level)
            carry.store(index, tail, state)
            outs.append(out)
        core = own_outputs(outs, octopus.steps)
        core = self.norm(core.reshape(-1, self.head_v_dim), z)
        return self.out_proj(core.reshape(1, hidden_states.shape[1], -1))

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

    def _delta(
        self: Any, x: Tensor, g: Tensor, beta: Tensor, state: Tensor, level: Any
    ) -> tuple[Tensor, Tensor]:
        """Run the delta rule over the rows of one level; x is the convolved [T', C], g and beta
        [T', HV].
        """
        rows = x.shape[0]
        q, k, v = x.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        q = q.reshape(rows, self.num_k_heads, self.head_k_dim)
        k = k.reshape(rows, self.num_k_heads, self.head_k_dim)
        v = v.reshape(rows, self.num_v_heads, self.head_v_dim)
        if level.single:
            step = select("gated_delta_step", x.device)
            return step(q, k=k, v=v, g=g, beta=beta, state=state)
        rule = select("gated_delta_rule", x.device)
        return rule(q, k=k, v=v, g=g, beta=beta, initial_state=state, cu_seqlens=level.cu_seqlens)


class OctopusGatedDeltaNet(GatedDeltaPass, Qwen3_5GatedDeltaNet):
    """Qwen3.5's mixer inside a pass of ours."""
