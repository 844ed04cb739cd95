"""From growing nodes to the tensors of one paged pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octopus_trl.engine.cursor import Node, slots_of
from octopus_trl.engine.pages import Slots
from octopus_trl.engine.states import ZERO_SLOT
from octopus_trl.models.paged import PagedContext, PagedMemory, SeenSlots


class Seen:
    """Slots that the next token of a growing node sees: mounted ones, then the chain, then own.

    Appending an own token costs O(1), so a decode step never walks the chain.
    """

    def __init__(self, own: Sequence[Node], mounted: Sequence[Node], room: int = 64) -> None:
        before = [slots_of(mounted), slots_of(own)]
        self._num_mounted = len(before[0])
        self._length = len(before[0]) + len(before[1])
        self._buffer = np.empty(self._length + room, dtype=np.int64)
        np.concatenate(before, out=self._buffer[: self._length])

    def append(self, slots: Slots) -> None:
        """Add own slots, in order."""
        length = self._length + len(slots)
        if length > len(self._buffer):
            grown = np.empty(2 * length, dtype=np.int64)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : length] = slots
        self._length = length

    def push(self, slot: int) -> None:
        """Add one own slot."""
        if self._length == len(self._buffer):
            self.append(np.array([slot], dtype=np.int64))
        else:
            self._buffer[self._length] = slot
            self._length += 1

    def drop(self, count: int) -> None:
        """Take the last `count` own slots back."""
        self._length -= count

    @property
    def has_mounts(self) -> bool:
        """Whether something is seen by mount."""
        return self._num_mounted > 0

    @property
    def last(self) -> int:
        """The slot that was appended last."""
        return int(self._buffer[self._length - 1])

    def slots(self, *, mounted: bool) -> Slots:
        """Give the slots, with or without mounted ones."""
        return self._buffer[0 if mounted else self._num_mounted : self._length]


@dataclass(eq=False, slots=True)
class Growth:
    """A node that grows, and what its next pass reads.

    Attributes:
        read_slot: state slot to start from: the parent's before the first pass, the own after it.
        source: boundary whose state the first pass still has to read.
        hidden: [d] last hidden state after the tokens fed so far.
        spans, mounted: slots of the frozen nodes that a fused pass sees, on the chain and by mount;
            there `seen` holds own slots alone.
        serial: names the growth.
    """

    node: Node
    seen: Seen
    read_slot: int = ZERO_SLOT
    source: Node | None = None
    hidden: Tensor | None = None
    spans: tuple[Slots, ...] = ()
    mounted: tuple[Slots, ...] = ()
    serial: int = field(default_factory=itertools.count().__next__)

    @property
    def position(self) -> int:
        """Position of the next token."""
        return self.node.end


def prefill_context(
    memory: PagedMemory,
    tokens: Sequence[int],
    position: int,
    seen: Seen,
    *,
    slots: Slots | None,
    read_slot: int,
    write_slot: int | None,
) -> PagedContext:
    """Feed consecutive tokens of one chain.

    Args:
        slots: where their keys and values go; None when they are in the pool already.
        write_slot: state slot for the end, None for a model without recurrent layers.
    """
    device = memory.device
    index = _tensor(np.array(seen.slots(mounted=True)), device)
    tree = index[len(index) - len(seen.slots(mounted=False)) :]
    return PagedContext(
        memory,
        _tensor(np.asarray(tokens, dtype=np.int64), device),
        _tensor(np.arange(position, position + len(tokens), dtype=np.int64), device),
        SeenSlots((index,)),
        SeenSlots((tree,)),
        None if slots is None else _tensor(slots, device),
        _tensor(np.array([read_slot], dtype=np.int64), device),
        _tensor(np.array([] if write_slot is None else [write_slot], dtype=np.int64), device),
        decode=False,
    )


def decode_context(
    memory: PagedMemory,
    growths: Sequence[Growth],
    tokens: Sequence[int],
    slots: Slots,
    *,
    width: int,
) -> PagedContext:
    """Feed one token to each growing node, whose slot is already the last one it sees.

    Args:
        slots: [n] int64, one a node.
        width: rows of the pass; the rest is padding at position 0.
    """
    device, num = memory.device, len(growths)
    ids = np.zeros(width, dtype=np.int64)
    ids[:num] = tokens
    positions = np.zeros(width, dtype=np.int64)
    positions[:num] = [growth.position for growth in growths]
    reads = np.full(width, ZERO_SLOT, dtype=np.int64)
    reads[:num] = [growth.read_slot for growth in growths]
    writes = [growth.node.slot for growth in growths if growth.node.slot is not None]
    seen = _joined([growth.seen.slots(mounted=True) for growth in growths], device)
    tree = seen
    if any(growth.seen.has_mounts for growth in growths):
        tree = _joined([growth.seen.slots(mounted=False) for growth in growths], device)
    return PagedContext(
        memory,
        _tensor(ids, device),
        _tensor(positions, device),
        seen,
        tree,
        _tensor(slots, device),
        _tensor(reads, device),
        _tensor(np.array(writes, dtype=np.int64), device),
        decode=True,
    )


def _joined(parts: Sequence[Slots], device: torch.device) -> SeenSlots:
    index = _tensor(np.concatenate(parts), device)
    return SeenSlots(index.split([len(part) for part in parts]))


def _tensor(array: Slots, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
