"""An engine's memory as a whole: taken at the start and by `wake`, given back by `sleep`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from octopus_trl.engine.counters import Counters
from octopus_trl.engine.host_states import HostStates
from octopus_trl.engine.sizes import Sizes, bytes_of
from octopus_trl.engine.tree import Tree
from octopus_trl.errors import ConfigError
from octopus_trl.models.paged import PagedMemory
from octopus_trl.models.spec import ModelSpec


class Pools:
    """Page and state tensors, parked states, and the tree that says who holds what.

    Attributes:
        memory: the tensors; the same object over the engine's life.
        tree: of the present epoch; a new one after each `give_back`.
        on_taken: called when the tensors are there anew, their addresses may have changed: whoever
            captured graphs over them captures again. Its time is `seconds["capture"]`.
        on_given_back: called before the tensors go.
    """

    def __init__(
        self,
        spec: ModelSpec,
        sizes: Sizes,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        counters: Counters,
    ) -> None:
        self._sizes, self._page_size, self._counters = sizes, page_size, counters
        self.memory = PagedMemory(
            spec,
            page_size=page_size,
            num_pages=sizes.pages,
            num_states=sizes.states,
            dtype=dtype,
            device=device,
        )
        self._parked = HostStates(self.memory, sizes.places, counters)
        self.on_taken: list[Callable[[], None]] = []
        self.on_given_back: list[Callable[[], None]] = []
        self._peaks = {"peak_pages": 0, "peak_slots": 0}
        self._evicted = 0
        self.tree = self._empty_tree()

    def take(self) -> None:
        """Take the memory, unless it is held.

        Raises:
            ConfigError: the device has too little of it free now.
        """
        if self.memory.allocated:
            return
        device = self.memory.device
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what the trainer's allocator keeps in small pieces
        try:
            self.memory.allocate()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            self.memory.release()
            raise ConfigError(
                f"num_pages={self._sizes.pages}, num_states={self._sizes.states}: {device} does "
                f"not give the {self._num_bytes()} bytes that the pools take; free some, or give "
                f"smaller numbers ({str(error).splitlines()[0]})"
            ) from None
        with self._counters.timed("capture"):
            for call in self.on_taken:
                call()

    def give_back(self) -> None:
        """Release all memory, parked states too; whatever stood in it is gone."""
        for call in self.on_given_back:
            call()
        for name, value in self._now().items():
            self._peaks[name] = max(self._peaks[name], value)
        self._evicted += self.tree.states.evicted
        self.tree = self._empty_tree()
        self._parked.release()
        self.memory.release()
        if self.memory.device.type == "cuda":
            torch.cuda.empty_cache()

    def report(self) -> dict[str, Any]:
        """Give counts of slots, parked states and peaks as plain values."""
        states, parked = self.tree.states, self._parked
        peaks = {name: max(self._peaks[name], value) for name, value in self._now().items()}
        return {
            **peaks,
            "slots": states.num_held,
            "evicted_states": self._evicted + states.evicted,
            "parked_now": states.parking.num_held,
            "parked": parked.parked,
            "parked_bytes": parked.parked * parked.bytes_per_state,
            "restored": parked.restored,
            "restored_bytes": parked.restored * parked.bytes_per_state,
            "host_bytes": parked.num_bytes,
        }

    def _now(self) -> dict[str, int]:
        return {"peak_pages": self.tree.pages.peak, "peak_slots": self.tree.states.peak}

    def _num_bytes(self) -> int:
        memory = self.memory
        return bytes_of(memory.spec, self._sizes, self._page_size, memory.dtype)

    def _empty_tree(self) -> Tree:
        sizes = self._sizes
        return Tree(
            sizes.pages,
            self._page_size,
            sizes.states,
            num_places=sizes.places,
            mover=self._parked if sizes.places else None,
        )
