"""One pass over rows of tokens with few, fused operations: the generation path of a GPU.

Computes what the prepared model's own forward computes on a `PagedContext`, from the same
parameters, for rows that are tokens of many chains: one new token each (decode), or runs of
consecutive tokens (prefill). Nothing here asks the device for a value, so that a pass over static
buffers can be captured as a CUDA graph. Operations come from `kernels.select`: on a CPU they are
the references, and the same code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5RMSNorm

from octopus_trl.errors import ConfigError
from octopus_trl.kernels import select
from octopus_trl.kernels._chunks import keep_chunk_indices
from octopus_trl.models.paged import PagedMemory
from octopus_trl.models.patch import spec_of, unwrap
from octopus_trl.models.projections import Projections, plain_linear
from octopus_trl.shapes import Hidden

OPERATIONS = (
    "rms_norm",
    "gated_rms_norm",
    "swiglu",
    "gated_linear",
    "sigmoid_gate",
    "rotate_and_write",
    "rotary_tables",
    "dag_decode_attention",
    "gated_delta_pool_step",
    "delta_gates",
    "causal_conv",
    "gated_delta_rule",
)
POSITIONS = 1 << 15  # rows of the first rotary tables; they double when a position lies further


@dataclass(slots=True)
class TokenRows:
    """Rows of one pass.

    Attributes:
        tokens, positions: [R] integers; a padding row has token 0 at position 0.
        write_slots: [R] where each row's keys and values go, -1 for nowhere.
        work, tree_work: what each row sees, in layers of the mount set and in the others.
        read_states, write_states: [R], or [runs], state slot read first, and written; 0 is the zero
            state, and a run that writes to it writes nothing.
        cu_seqlens: [runs + 1] int64 for a prefill of whole runs, where rows past the last run are
            padding; None where each row is a run.
        chunks: [N, 2] int64, `kernels._chunks.chunk_table` of it, an object of its own in every
            pass as `cu_seqlens` is; None lets recurrent layers ask the device.
    """

    tokens: Tensor
    positions: Tensor
    write_slots: Tensor
    work: Any
    tree_work: Any
    read_states: Tensor
    write_states: Tensor
    cu_seqlens: Tensor | None = None
    chunks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm over the hidden or head width."""

    weight: Tensor
    eps: float
    zero_centered: bool


@dataclass(slots=True)
class _Block:
    """One decoder layer."""

    index: int
    kind: str
    before_mixer: _Norm
    before_mlp: _Norm
    project_in: Projections
    project_out: Projections
    gate_up: Projections
    down: Projections
    mixer: Any
    q_norm: _Norm | None = None
    k_norm: _Norm | None = None


class FusedModel:
    """The fused pass of a prepared model over an engine's memory.

    Args:
        merge: run LoRA adapters merged, in a copy of the weights that `release` frees.
        share: see `Projections`.
    Attributes:
        tables: cosines and sines over positions; `cover` makes others.
    Raises:
        ConfigError: a module is of a kind that the pass does not know; the message names it.
    """

    def __init__(
        self, model: nn.Module, memory: PagedMemory, *, merge: bool = False, share: bool = True
    ) -> None:
        self._model, self.memory, self.spec = model, memory, spec_of(model)
        self._merge, self._share = merge, share
        self._ops: dict[str, Callable[..., Any]] = {
            name: select(name, memory.device) for name in OPERATIONS
        }
        self.tables: tuple[Tensor, Tensor] | None = None
        self._sources: list[tuple[dict[str, Any], str, Any]] = []
        self._structure: list[Any] = []
        self._last: list[Any] = []
        self._blocks: list[_Block] = []
        self._build()

    def __call__(self, rows: TokenRows) -> Hidden:
        """Run the pass; [R, d], last hidden states after the final norm."""
        with torch.autocast(self.memory.device.type, enabled=False):
            return self._run(rows)

    def _run(self, rows: TokenRows) -> Hidden:
        if rows.cu_seqlens is not None and rows.chunks is not None:
            keep_chunk_indices(rows.cu_seqlens, rows.chunks)
        norm = self._ops["rms_norm"]
        stream: Tensor | None = None
        x = F.embedding(rows.tokens, self._embedding)
        for block in self._blocks:
            y, stream = self._norm(norm, x, block.before_mixer, stream)
            mix = self._attention if block.kind == "attention" else self._delta
            y, stream = self._norm(norm, mix(block, y, rows), block.before_mlp, stream)
            x = block.down(self._gated(block.gate_up, y))
        y, _ = self._norm(norm, x, self._last_norm, stream)
        return y

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the head; [R, vocab] in the model's dtype."""
        with torch.autocast(self.memory.device.type, enabled=False):
            return self._head(hidden)

    def signature(self) -> tuple[int, ...]:
        """Addresses that a captured pass reads; the capture is void when one changes."""
        memory = self.memory
        pools = [*memory.keys.values(), *memory.values.values()]
        pools += [*memory.tails.values(), *memory.states.values()]
        addresses = [tensor.data_ptr() for tensor in [*pools, *(self.tables or ())]]
        for projections in self._projections():
            addresses += projections.signature()
        return (*addresses, *(weight.data_ptr() for weight in (self._embedding, *self._beside)))

    def cover(self, position: int) -> None:
        """Make the rotary tables reach a position."""
        size = 0 if self.tables is None else len(self.tables[0])
        if position < size:
            return
        while size <= position:
            size = max(2 * size, POSITIONS)
        rotary = unwrap(self._model).model.rotary_emb
        self.tables = self._ops["rotary_tables"](
            size,
            inv_freq=rotary.inv_freq.to(self.memory.device),
            scaling=float(rotary.attention_scaling),
            dtype=self._embedding.dtype,
        )

    def refresh(self, *, force: bool = False) -> bool:
        """See what changed in the weights: adapters that were trained, added, merged or switched
        off, weights that were moved. A captured pass stays valid while `signature` is the same.

        Args:
            force: copy adapters and merged weights again even where no change shows.
        Returns:
            Whether anything was looked at again.
        """
        seen = self._look()
        if not force and seen == self._last:
            return False
        moved = not all(projections.holds() for projections in self._projections())
        if moved or self._structure != self._take_apart():
            self._build()
        for projections in self._projections():
            projections.refresh(force=force)
        self._last = self._look()
        return True

    def release(self) -> None:
        """Free copies that `refresh` makes again."""
        for projections in self._projections():
            projections.release()

    def undo(self) -> None:
        """Give every parameter its own storage again, bit for bit; the pass may not run after."""
        for projections in self._projections():
            projections.undo()

    def _projections(self) -> list[Projections]:
        inner = [
            projections
            for block in self._blocks
            for projections in (block.project_in, block.project_out, block.gate_up, block.down)
        ]
        return [*inner, self._head]

    def _build(self) -> None:
        causal_lm = unwrap(self._model)
        if not isinstance(causal_lm, (Qwen3_5ForCausalLM, Qwen3ForCausalLM)):
            raise ConfigError(f"{type(causal_lm).__name__} has no fused pass")
        self._sources = []
        inner = causal_lm.model
        embedding = inner.embed_tokens
        if type(embedding) is not nn.Embedding:
            raise ConfigError(f"embed_tokens is a {type(embedding).__name__}, not a plain one")
        if inner.rotary_emb.rope_type not in ("default", "linear", "yarn", "llama3"):
            raise ConfigError(f"rope_type={inner.rotary_emb.rope_type!r} depends on the length")
        self._embedding = embedding.weight
        self._head = self._group(causal_lm, ["lm_head"])
        self._last_norm = _norm_of(inner.norm)
        self._blocks = [self._block(index, layer) for index, layer in enumerate(inner.layers)]
        groups = self._projections()
        self._weights = [weight for group in groups for weight in group.weights()]
        self._copied = [tensor for group in groups for tensor in group.copied()]
        grouped = {id(p) for _, _, module in self._sources for p in module.parameters()}
        self._beside = [p for p in causal_lm.parameters() if id(p) not in grouped]
        self._structure, self._last = self._take_apart(), self._look()

    def _look(self) -> list[Any]:
        """Tell cheaply which layers and adapters are in force, where they lie, and their age."""
        return [
            [(id(parts[name]), _in_force(module)) for parts, name, module in self._sources],
            [weight.data_ptr() for weight in (*self._weights, *self._beside)],
            sum(tensor._version for tensor in self._copied),
        ]

    def _take_apart(self) -> list[Any]:
        """Tell which layers and adapters are in force, by identity."""
        found = []
        for parts, name, _ in self._sources:
            linear, adapters = plain_linear(parts[name], name)
            found.append((id(linear), [(id(a.a), id(a.b), a.scale) for a in adapters]))
        return found

    def _block(self, index: int, layer: Any) -> _Block:
        kind = self.spec.layer_kinds[index]
        if layer.mlp.act_fn.__class__.__name__ not in ("SiLU", "SiLUActivation"):
            raise ConfigError(f"layer {index}: the MLP's activation is not SiLU")
        if kind == "attention":
            mixer, inputs, output = layer.self_attn, ["q_proj", "k_proj", "v_proj"], "o_proj"
        else:
            mixer, output = layer.linear_attn, "out_proj"
            inputs = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
        return _Block(
            index,
            kind,
            _norm_of(layer.input_layernorm),
            _norm_of(layer.post_attention_layernorm),
            self._group(mixer, inputs),
            self._group(mixer, [output]),
            self._group(layer.mlp, ["gate_proj", "up_proj"]),
            self._group(layer.mlp, ["down_proj"]),
            mixer,
            _norm_of(mixer.q_norm) if kind == "attention" else None,
            _norm_of(mixer.k_norm) if kind == "attention" else None,
        )

    def _group(self, module: Any, names: Sequence[str]) -> Projections:
        self._sources += [(module._modules, name, getattr(module, name)) for name in names]
        layers = [(name, getattr(module, name)) for name in names]
        return Projections(layers, share=self._share, merge=self._merge)

    @staticmethod
    def _norm(
        norm: Callable[..., tuple[Tensor, Tensor]], x: Tensor, of: _Norm, stream: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Add to the residual stream and normalise."""
        return norm(
            x, weight=of.weight, eps=of.eps, zero_centered=of.zero_centered, residual=stream
        )

    def _gated(self, gate_up: Projections, x: Tensor) -> Tensor:
        """Multiply by gate and up, and gate; one operation where no adapter comes between."""
        weight = gate_up.plain
        if weight is None:
            return self._ops["swiglu"](gate_up(x))
        return self._ops["gated_linear"](x, weight=weight)

    def _attention(self, block: _Block, x: Tensor, rows: TokenRows) -> Tensor:
        layer, q_norm, k_norm = block.index, block.q_norm, block.k_norm
        assert q_norm is not None and k_norm is not None and self.tables is not None  # noqa: PT018
        keys, values = self.memory.keys[layer], self.memory.values[layer]
        qkv = block.project_in(x)
        heads = self.spec.num_heads * self.spec.head_dim
        gated = block.project_in.widths[0] == 2 * heads
        q, gate = self._ops["rotate_and_write"](
            qkv,
            q_weight=q_norm.weight,
            k_weight=k_norm.weight,
            eps=q_norm.eps,
            zero_centered=q_norm.zero_centered,
            gated=gated,
            cos=self.tables[0],
            sin=self.tables[1],
            positions=rows.positions,
            keys=keys,
            values=values,
            slots=rows.write_slots,
        )
        work = rows.work if layer in self.spec.mount_layers else rows.tree_work
        out = self._ops["dag_decode_attention"](
            q, keys=keys, values=values, work=work, scale=block.mixer.scaling
        )
        out = self._ops["sigmoid_gate"](out, gate=gate) if gated else out.flatten(1)
        return block.project_out(out)

    def _delta(self, block: _Block, x: Tensor, rows: TokenRows) -> Tensor:
        mixer, layer = block.mixer, block.index
        tails, states = self.memory.tails[layer], self.memory.states[layer]
        mixed, z, b, a = block.project_in(x).split(block.project_in.widths, dim=-1)
        weight, bias = mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias
        if rows.cu_seqlens is None:
            out = self._ops["gated_delta_pool_step"](
                mixed,
                a=a,
                b=b,
                conv_weight=weight,
                conv_bias=bias,
                A_log=mixer.A_log,
                dt_bias=mixer.dt_bias,
                tails=tails,
                states=states,
                read=rows.read_states,
                write=rows.write_states,
                num_key_heads=mixer.num_k_heads,
                z=z,
                norm_weight=mixer.norm.weight,
                norm_eps=mixer.norm.variance_epsilon,
            )
            return block.project_out(out)
        conv, tail = self._ops["causal_conv"](
            mixed,
            weight=weight,
            bias=bias,
            tail=tails.index_select(0, rows.read_states),
            cu_seqlens=rows.cu_seqlens,
        )
        q, k, v = conv.split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=-1)
        g, beta = self._ops["delta_gates"](a, b=b, A_log=mixer.A_log, dt_bias=mixer.dt_bias)
        out, state = self._ops["gated_delta_rule"](
            q.unflatten(-1, (mixer.num_k_heads, -1)).contiguous(),
            k=k.unflatten(-1, (mixer.num_k_heads, -1)).contiguous(),
            v=v.unflatten(-1, (mixer.num_v_heads, -1)).contiguous(),
            g=g,
            beta=beta,
            initial_state=states.index_select(0, rows.read_states),
            cu_seqlens=rows.cu_seqlens,
        )
        tails.index_copy_(0, rows.write_states, tail.to(tails.dtype))
        states.index_copy_(0, rows.write_states, state)
        out = self._ops["gated_rms_norm"](
            out, z=z, weight=mixer.norm.weight, eps=mixer.norm.variance_epsilon
        )
        return block.project_out(out)


def _norm_of(module: Any) -> _Norm:
    if type(module) is Qwen3_5RMSNorm:
        return _Norm(module.weight, module.eps, True)
    if type(module) is Qwen3RMSNorm:
        return _Norm(module.weight, module.variance_epsilon, False)
    raise ConfigError(f"a norm is a {type(module).__name__}, not one of Qwen3 or Qwen3.5")


def _in_force(module: Any) -> Any:
    """Tell which adapters of a projection are in force, by name."""
    if type(module) is nn.Linear:
        return None
    if hasattr(module, "lora_A"):
        return module.disable_adapters, module.merged, tuple(module.active_adapters)
    return getattr(module, "active_adapter", None)
