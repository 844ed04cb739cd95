"""Parked states: boundaries whose recurrent state has a copy in host memory (host integers only).

A boundary that is not about to step needs no slot of the state pool. Before it loses its slot, its
state is copied to a place in host memory, and comes back from there when it is asked for, equal bit
by bit; only a boundary with neither slot nor place is computed again.

How many threads that holds, Qwen3.5-4B in bfloat16 on an H200: a state is 24 layers of 2 MiB of
float32 [32, 128, 128] and 48 KiB of convolution tail [8192, 3], 49.1 MiB. A running thread owns two
slots, its boundary's and its growing node's, so 256 resident threads take 24.6 GiB of the device.
1,024 threads of which 256 run keep 768 boundaries in 36.8 GiB of host memory; their keys and values
stay in pages, 32 KiB a token: 2,048 own tokens each are 64 GiB, beside 24.6 GiB of slots, 8.4 GB of
weights and 1 GiB for 32K shared tokens, of 139 GiB. `tests/engine/test_sizes.py` does the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from octopus_trl.errors import IntegrityError


class Parkable(Protocol):
    """A boundary that may hold a slot, and a place for a copy of what the slot holds."""

    slot: int | None
    place: int | None


class Mover(Protocol):
    """Copies states between slots and places.

    Attributes:
        runs_beside: whether copies run beside the passes, so that asking ahead saves time.
    """

    runs_beside: bool

    def store(self, slot: int, place: int) -> None:
        """Begin to copy a slot to a place."""

    def load(self, place: int, slot: int, *, ahead: bool = False) -> None:
        """Begin to copy a place to a slot; what follows waits for it, unless it is asked for
        `ahead`: then what reads the slot calls `arrive` first.
        """

    def arrive(self, slot: int) -> None:
        """Let what reads the slot next wait for a copy that was asked for ahead."""

    def claim(self, slot: int) -> None:
        """Let what writes the slot next wait for a copy that still reads it."""


class Parking:
    """Owners of places, and which of them to take a place from when none is free.

    Args:
        num_places: copies that the host memory holds; 0 parks nothing.
        rank: order in which owners lose their copy, lowest first; None forbids it.
    Attributes:
        dropped: owners that lost their copy and held no slot: their state is gone.
    """

    def __init__(
        self, num_places: int, rank: Callable[[Any], int | None], mover: Mover | None
    ) -> None:
        self.num_places = num_places if mover is not None else 0
        self.dropped = 0
        self._rank, self._mover = rank, mover
        self._owners: dict[int, Parkable] = {}  # in order of parking, oldest first
        self._free: list[int] = list(range(self.num_places - 1, -1, -1))
        self._coming: set[int] = set()  # slots that a copy asked for ahead may still fill

    @property
    def num_held(self) -> int:
        """Places with an owner."""
        return len(self._owners)

    def park(self, owner: Parkable) -> bool:
        """Copy an owner's slot to a place unless it has one; False where none can be had.

        A place is taken first from an owner that still has its slot, and never from one that
        matters more.
        """
        if owner.place is not None:
            return True
        if owner.slot is None:
            raise IntegrityError("a boundary without a slot cannot be parked")
        if not self._free and not self._drop_one(owner):
            return False
        assert self._mover is not None
        owner.place = place = self._free.pop()
        self._owners[place] = owner
        self.arrive(owner.slot)
        self._mover.store(owner.slot, place)
        return True

    def load(self, owner: Parkable, slot: int, *, ahead: bool = False) -> None:
        """Copy an owner's parked state into any slot; it keeps its place."""
        if owner.place is None or self._mover is None:
            raise IntegrityError("a boundary without a place has nothing to load")
        self._mover.load(owner.place, slot, ahead=ahead)
        if ahead:
            self._coming.add(slot)

    @property
    def runs_beside(self) -> bool:
        """Whether a state that is asked for ahead comes while passes run."""
        return self._mover is not None and self._mover.runs_beside

    def arrive(self, slot: int) -> None:
        """Make a slot safe to read that was asked for ahead."""
        if slot in self._coming:
            assert self._mover is not None
            self._coming.remove(slot)
            self._mover.arrive(slot)

    def claim(self, slot: int) -> None:
        """Make a slot safe to write while copies run."""
        self.arrive(slot)
        if self._mover is not None:
            self._mover.claim(slot)

    def release(self, owner: Parkable) -> None:
        """Take an owner's place back, if it has one."""
        if owner.place is not None:
            del self._owners[owner.place]
            self._free.append(owner.place)
            owner.place = None

    def check(self, owners: list[Parkable]) -> None:
        """Recount from all boundaries that exist.

        Raises:
            IntegrityError: an owner is unknown or doubled, or a place is neither owned nor free.
        """
        held = {owner.place: owner for owner in owners if owner.place is not None}
        if held.keys() != self._owners.keys() or any(
            self._owners[place] is not owner for place, owner in held.items()
        ):
            raise IntegrityError(
                f"places {sorted(self._owners)} are owned, boundaries hold {sorted(held)}"
            )
        if sorted([*self._free, *self._owners]) != list(range(self.num_places)):
            raise IntegrityError("a place for a parked state is lost, or free and owned at once")

    def _drop_one(self, newcomer: Parkable) -> bool:
        """Free the place that is missed least; False where all matter more than the newcomer."""
        ranked = [
            (owner.slot is None, rank, age, place)
            for age, (place, owner) in enumerate(self._owners.items())
            if (rank := self._rank(owner)) is not None
        ]
        if not ranked:
            return False
        gone, rank, _, place = min(ranked)
        mine = self._rank(newcomer)
        if gone and mine is not None and mine < rank:
            return False
        self.dropped += gone
        self.release(self._owners[place])
        return True
