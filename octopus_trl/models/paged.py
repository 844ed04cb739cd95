"""The paged pass: rows that read keys, values and states from pools and write their own.

Two shapes of pass. A prefill pass feeds consecutive tokens of one chain; its rows see some slots
and each other causally. A decode pass feeds one token to each of many chains, at a fixed width, so
that on a CPU in float32 no row's result depends on which rows run beside it: every operation is
either per row, or of a shape that the width alone decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import ModelOutput

from octopus_trl.errors import ConfigError
from octopus_trl.kernels import select
from octopus_trl.models.context import LevelRows, Steps
from octopus_trl.models.spec import ModelSpec
from octopus_trl.shapes import ConvTail, Hidden, Keys, Queries, RecurrentState, Values


class PagedMemory:
    """The tensors behind an engine's pools.

    Attributes:
        keys, values: for each attention layer, [pages, page_size, kv_heads, head_dim].
        tails: for each recurrent layer, [slots + 1, C, W - 1] in the model's dtype.
        states: for each recurrent layer, [slots + 1, HV, K, V] float32 (float64 for a float64
            model); slot 0 of both stays zero.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        page_size: int,
        num_pages: int,
        num_states: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self._page_shape = (num_pages, page_size, spec.num_kv_heads, spec.head_dim)
        self._num_slots = num_states + 1
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.tails: dict[int, Tensor] = {}
        self.states: dict[int, Tensor] = {}

    @property
    def num_slots(self) -> int:
        """Tokens that the pages hold."""
        return self._page_shape[0] * self._page_shape[1]

    @property
    def allocated(self) -> bool:
        """Whether the tensors exist."""
        return bool(self.keys or self.states)

    def allocate(self) -> None:
        """Take the memory; nothing but slot 0 of the states is written, so that on a CPU a page
        costs nothing before its first use.
        """

        def empty(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        for layer in self.spec.attention_layers:
            self.keys[layer] = empty(*self._page_shape)
            self.values[layer] = empty(*self._page_shape)
        for layer in self.spec.recurrent_layers:
            self.tails[layer] = empty(self._num_slots, *self.spec.tail_shape)
            self.states[layer] = empty(
                self._num_slots, *self.spec.state_shape, dtype=state_dtype(self.dtype)
            )
            self.tails[layer][0].zero_()
            self.states[layer][0].zero_()

    def release(self) -> None:
        """Give the memory back."""
        for tensors in (self.keys, self.values, self.tails, self.states):
            tensors.clear()


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of recurrent states for a model dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def bytes_per_page(spec: ModelSpec, page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all attention layers."""
    elements = page_size * spec.num_kv_heads * spec.head_dim
    return 2 * len(spec.attention_layers) * elements * dtype.itemsize


def bytes_per_state(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of one state slot over all recurrent layers."""

    def elements(shape: Sequence[int]) -> int:
        return int(torch.Size(shape).numel())

    tail = elements(spec.tail_shape) * dtype.itemsize
    state = elements(spec.state_shape) * state_dtype(dtype).itemsize
    return len(spec.recurrent_layers) * (tail + state)


@dataclass(frozen=True, slots=True)
class SeenSlots:
    """Slots that rows read, apart from the pass's own rows.

    Attributes:
        rows: [L] int64 each; one for all rows of a prefill pass, one a row of a decode pass.
    """

    rows: tuple[Tensor, ...]


@dataclass(slots=True)
class PagedContext:
    """Context of one paged pass (see `Context`).

    Attributes:
        tokens, positions: [T] int64; a decode pass may hold more rows than cursors, the rest is
            padding that reads the zero state and writes nothing.
        seen, tree_seen: slots read by layers in the mount set, and by the other attention layers.
        write_slots: [n] int64 slots of the first n rows; None when the rows are in the pool
            already (a replay).
        read_states: [R] int64, state slot that each run starts from.
        write_states: [n] int64, state slot that takes the end of each of the first n runs.
        decode: rows are runs of one token, and `seen` includes each row itself.
        twice: a second run steps through the same rows, from another state; what it gives is
            dropped but for its end (a splice).
    """

    memory: PagedMemory
    tokens: Tensor
    positions: Tensor
    seen: SeenSlots
    tree_seen: SeenSlots
    write_slots: Tensor | None
    read_states: Tensor
    write_states: Tensor
    decode: bool
    twice: bool = False
    steps: Steps | None = field(init=False)
    levels: list[LevelRows] = field(init=False)
    _masks: dict[int, Tensor] = field(default_factory=dict)
    _write: Callable[..., None] = field(init=False)
    _gather: Callable[..., Tensor] = field(init=False)

    def __post_init__(self) -> None:
        rows, device = len(self.tokens), self.tokens.device
        step, num = 1 if self.decode else rows, rows * (1 + self.twice)
        bounds = torch.arange(0, num + 1, step, dtype=torch.int64, device=device)
        self.levels = [LevelRows(0, num, bounds, self.decode or rows == 1)]
        self.steps = None
        if self.twice:
            own = torch.arange(rows, device=device)
            self.steps = Steps(own.repeat(2), own)
        self._write, self._gather = select("write_slots", device), select("gather_slots", device)

    @property
    def input_ids(self) -> Tensor:
        """[1, T] int64."""
        return self.tokens[None]

    @property
    def position_ids(self) -> Tensor:
        """[1, T] int64."""
        return self.positions[None]

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scale: float) -> Queries:
        """Write the rows' keys and values, then attend to what they see."""
        memory = self.memory
        keys, values = memory.keys[layer], memory.values[layer]
        k, v = k.to(memory.dtype), v.to(memory.dtype)
        if self.write_slots is not None:
            rows = len(self.write_slots)
            self._write(keys, values=k[:rows], slots=self.write_slots)
            self._write(values, values=v[:rows], slots=self.write_slots)
        seen = self.seen if layer in memory.spec.mount_layers else self.tree_seen
        if not self.decode:
            (index,) = seen.rows
            k = torch.cat([self._gather(keys, slots=index), k])
            v = torch.cat([self._gather(values, slots=index), v])
            return _attend_causally(q, k, v, self._mask(len(index), len(q)), scale)
        # One row at a time, with exactly its keys: a padded batch would round by its longest row,
        # and what one row gathers stays in the cache for its product. The query heads that share a
        # KV head are the rows of that product.
        heads, kv_heads = q.shape[1], k.shape[1]
        grouped = q.reshape(len(q), 1, kv_heads, heads // kv_heads, -1)
        outs = [
            F.scaled_dot_product_attention(
                query,
                self._gather(keys, slots=index)[None].transpose(1, 2),
                self._gather(values, slots=index)[None].transpose(1, 2),
                scale=scale,
            )
            for query, index in zip(grouped.unbind(), seen.rows)
        ]
        outs.append(torch.zeros_like(grouped[len(outs) :, 0]))  # padding
        return torch.cat(outs).reshape(q.shape)

    def carry(self, layer: int, tail_dtype: torch.dtype) -> PagedCarry:
        """Read and write one recurrent layer's slots."""
        return PagedCarry(self, layer)

    def finish(self, hidden: Hidden, head: nn.Module) -> PagedOutput:
        """Hand the last hidden states out; whoever samples applies the head to chosen rows."""
        return PagedOutput(hidden=hidden)

    def _mask(self, num_seen: int, rows: int) -> Tensor:
        """[T, L + T] bool: all that was seen before, and own rows causally."""
        if num_seen not in self._masks:
            mask = torch.ones(rows, num_seen + rows, dtype=torch.bool, device=self.tokens.device)
            self._masks[num_seen] = mask.tril_(num_seen)
        return self._masks[num_seen]


class PagedCarry:
    """Moves states between the pool and one recurrent layer's forward."""

    def __init__(self, context: PagedContext, layer: int) -> None:
        self._context = context
        self._tails = context.memory.tails[layer]
        self._states = context.memory.states[layer]

    def load(self, level: int) -> tuple[ConvTail, RecurrentState]:
        """Gather the slots that the runs start from."""
        index = self._context.read_states
        return self._tails.index_select(0, index), self._states.index_select(0, index)

    def store(self, level: int, tail: ConvTail, state: RecurrentState) -> None:
        """Scatter the ends into the slots of the runs that have one."""
        index = self._context.write_states
        runs = len(index)
        self._tails.index_copy_(0, index, tail[:runs].to(self._tails.dtype))
        self._states.index_copy_(0, index, state[:runs])


@dataclass
class PagedOutput(ModelOutput):
    """Output of a paged pass.

    Attributes:
        hidden: [T, d] last hidden states after the final norm.
    """

    hidden: Tensor | None = None


def run_paged(model: nn.Module, context: Any) -> Hidden:
    """Run one paged pass and return the last hidden states [T, d].

    Raises:
        ConfigError: the memory is not allocated.
    """
    if not context.memory.allocated:
        raise ConfigError("the pools hold no memory: call engine.wake() first")
    return model(octopus=context).hidden


def _attend_causally(q: Queries, k: Keys, v: Values, mask: Tensor, scale: float) -> Queries:
    """Attend from consecutive rows under a mask [T, L + T]."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)
