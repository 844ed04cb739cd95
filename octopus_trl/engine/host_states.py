"""Recurrent states in host memory, copied beside the passes that run.

On CUDA the memory is pinned and copies run on two streams of their own, one out and one back, so
that both directions of the bus are used; events order them with the passes and the host never
waits. On a CPU the same calls copy at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octopus_trl.engine.counters import Counters
from octopus_trl.models.paged import PagedMemory, bytes_per_state, state_dtype

BLOCK_BYTES = 1 << 30  # pinned memory is taken in blocks: a page lock costs by the call


class HostStates:
    """Places for states of an engine's pool, and the copies to and from them.

    Args:
        num_places: most states held at once; memory is taken when places are first used.
        counters: whose `bytes_moved` counts the copies.
    Attributes:
        parked, restored: states copied out and back since the engine was made.
        runs_beside: whether copies run on streams of their own.
    """

    def __init__(
        self, memory: PagedMemory, num_places: int, counters: Counters | None = None
    ) -> None:
        self._memory, self._num_places = memory, num_places
        self._counters = counters or Counters()
        self.bytes_per_state = bytes_per_state(memory.spec, memory.dtype)
        self._per_block = max(1, BLOCK_BYTES // max(1, self.bytes_per_state))
        self.parked = self.restored = 0
        self._blocks: list[tuple[Tensor, Tensor]] = []
        self._cuda = self.runs_beside = memory.device.type == "cuda"
        self._out = torch.cuda.Stream(memory.device) if self._cuda else None
        self._back = torch.cuda.Stream(memory.device) if self._cuda else None
        self._leaving: dict[int, torch.cuda.Event] = {}  # slot -> copy that still reads it
        self._stored: dict[int, torch.cuda.Event] = {}  # place -> copy that fills it
        self._loaded: dict[int, torch.cuda.Event] = {}  # place -> copy that still reads it
        self._arriving: dict[int, torch.cuda.Event] = {}  # slot -> copy that still fills it

    @property
    def num_bytes(self) -> int:
        """Host memory taken so far."""
        return sum(part.nbytes for block in self._blocks for part in block)

    def store(self, slot: int, place: int) -> None:
        """Begin to copy a slot to a place."""
        states, tails = self._at(place)
        memory = self._memory

        def copy() -> None:
            for row, layer in enumerate(memory.spec.recurrent_layers):
                states[row].copy_(memory.states[layer][slot], non_blocking=True)
                tails[row].copy_(memory.tails[layer][slot], non_blocking=True)

        event = self._beside(self._out, copy, self._loaded.pop(place, None))
        if event is not None:
            self._leaving[slot] = self._stored[place] = event
        self.parked += 1
        self._counters.bytes_moved += self.bytes_per_state

    def load(self, place: int, slot: int, *, ahead: bool = False) -> None:
        """Begin to copy a place to a slot; the current stream goes on after it.

        Args:
            ahead: the stream goes on at once, and waits in `arrive`.
        """
        states, tails = self._at(place)
        memory = self._memory

        def copy() -> None:
            for row, layer in enumerate(memory.spec.recurrent_layers):
                memory.states[layer][slot].copy_(states[row], non_blocking=True)
                memory.tails[layer][slot].copy_(tails[row], non_blocking=True)

        event = self._beside(self._back, copy, self._stored.get(place))
        if event is not None:
            self._loaded[place] = event
            self._arriving[slot] = event
            if not ahead:
                self.arrive(slot)
        self.restored += 1
        self._counters.bytes_moved += self.bytes_per_state

    def arrive(self, slot: int) -> None:
        """Let the current stream wait for a copy that still fills a slot."""
        event = self._arriving.pop(slot, None)
        if event is not None:
            torch.cuda.current_stream(self._memory.device).wait_event(event)

    def claim(self, slot: int) -> None:
        """Let the current stream wait for a copy that still reads a slot."""
        event = self._leaving.pop(slot, None)
        if event is not None:
            torch.cuda.current_stream(self._memory.device).wait_event(event)

    def release(self) -> None:
        """Give the host memory back once no copy uses it."""
        for stream in (self._out, self._back):
            if stream is not None:
                stream.synchronize()
        self._blocks = []
        for events in (self._leaving, self._stored, self._loaded, self._arriving):
            events.clear()

    def _at(self, place: int) -> tuple[Tensor, Tensor]:
        """Give the place's states [L, ...] and tails [L, C, W - 1] over the recurrent layers."""
        block, row = divmod(place, self._per_block)
        while len(self._blocks) <= block:
            self._blocks.append(self._take())
        states, tails = self._blocks[block]
        return states[row], tails[row]

    def _take(self) -> tuple[Tensor, Tensor]:
        rows = min(self._per_block, self._num_places - len(self._blocks) * self._per_block)
        spec, dtype = self._memory.spec, self._memory.dtype

        def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            whole = (rows, len(spec.recurrent_layers), *shape)
            return torch.empty(whole, dtype=dtype, pin_memory=self._cuda)

        return empty(spec.state_shape, state_dtype(dtype)), empty(spec.tail_shape, dtype)

    def _beside(
        self,
        stream: torch.cuda.Stream | None,
        copy: Callable[[], None],
        after: torch.cuda.Event | None,
    ) -> torch.cuda.Event | None:
        """Copy on a stream, after what the current one holds and after an event."""
        if stream is None:
            copy()
            return None
        stream.wait_stream(torch.cuda.current_stream(self._memory.device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            copy()
        return stream.record_event()
