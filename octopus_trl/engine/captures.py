"""Work captured as CUDA graphs: on one stream of a device, into one pool of memory; and passes of a
fused model that are replayed while the addresses that they read stay the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from octopus_trl.engine.counters import Counters
from octopus_trl.models.fused import FusedModel


class Captures:
    """Captures work over buffers that stay where they are, to be replayed.

    Graphs share the memory of what they compute in between, so no result may stay in it, and they
    run one after another.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._pool: Any = None

    def rehearse(self, run: Callable[[], object]) -> None:
        """Run work on the stream of captures, after what was launched and before what will be, so
        that kernels compile and libraries take their memory.
        """
        current, side = torch.cuda.current_stream(self._place), _side_stream(self._place)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                run()
        finally:  # what work that failed had launched still writes to the pools
            current.wait_stream(side)

    def capture(self, run: Callable[[], object]) -> Any:
        """Give the graph of work that has run before with the same shapes; it does not run now."""
        torch.cuda.synchronize(self._place)
        pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph,
            pool=pool,
            stream=_side_stream(self._place),
            capture_error_mode="thread_local",
        ):
            run()
        self._pool = pool  # not before: one whose only capture failed takes no other
        return graph

    def release(self) -> None:
        """Let go of the pool, before the graphs that hold it; nothing of theirs is under way then.

        A pool whose graphs are all gone cannot be captured into again.
        """
        if self._pool is not None:
            # An allocator that gives memory back waits for the stream of captures, not for replays.
            torch.cuda.synchronize(self._place)
            self._pool = None


class CapturedPasses:
    """What passes that are captured once a key, and replayed, have in common."""

    def __init__(self, fused: FusedModel, counters: Counters) -> None:
        self._fused, self._counters = fused, counters
        self._captures = Captures(fused.memory.device)
        self._graphs: dict[Any, Any] = {}
        self._signature: tuple[int, ...] = ()
        self._tables: Any = None

    def check(self) -> None:
        """Forget captured passes that read addresses of before."""
        signature, self._tables = self._fused.signature(), self._fused.tables
        if signature != self._signature:
            self.release()
            self._signature = signature

    def release(self) -> None:
        """Drop the captured passes and their memory."""
        self._captures.release()
        self._graphs.clear()
        self._signature = ()

    def _cover(self, position: int) -> None:
        """Make the rotary tables reach a position; other passes may have moved them, too."""
        self._fused.cover(position)
        if self._fused.tables is not self._tables:
            self.check()


@functools.cache
def _side_stream(place: torch.device) -> torch.cuda.Stream:
    """One for all captures: a BLAS library keeps a workspace for each stream."""
    return torch.cuda.Stream(place)
