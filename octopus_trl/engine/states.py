"""The state pool: slots of recurrent state, each owned by the boundary whose state it holds.

Host integers only. Slot 0 is never owned: it stays zero, and a chain that has no state yet reads
it. A boundary that loses its slot loses no meaning: its state is parked in host memory, or computed
again from the nearest boundary above it that has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from octopus_trl.engine.parking import Mover, Parking
from octopus_trl.errors import IntegrityError, StatesExhausted

ZERO_SLOT = 0
AHEAD = 16  # one slot in so many is kept free, or parked already and free to take


class Owner(Protocol):
    """A boundary that may hold a slot and a parked copy.

    Attributes:
        stated: whether it ever had a state.
    """

    slot: int | None
    place: int | None
    stated: bool


class StatePool:
    """Owners of slots, and which of them to take a slot from when none is free.

    Args:
        num_slots: slots that can be owned; slot numbers are 1..num_slots.
        rank: order of eviction of an owner, lowest first; None forbids it. Among equals the slot
            that was used longest ago goes first.
        num_places: parked copies at most.
        mover: copies states to places and back; None parks nothing.
    Attributes:
        peak: most slots owned at once.
        parking: copies in host memory.
    """

    def __init__(
        self,
        num_slots: int,
        rank: Callable[[Any], int | None],
        *,
        num_places: int = 0,
        mover: Mover | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.peak = 0
        self.parking = Parking(num_places, rank, mover)
        self._evicted = 0
        self._rank = rank
        self._owners: dict[int, Owner] = {}  # in order of use, oldest first
        self._free: list[int] = list(range(num_slots, 0, -1))

    @property
    def num_free(self) -> int:
        """Slots without an owner."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Slots with an owner."""
        return len(self._owners)

    @property
    def evicted(self) -> int:
        """Owners that lost their state: slot and parked copy were both taken by others."""
        return self._evicted + self.parking.dropped

    def evictable(self) -> int:
        """Count the owned slots that may be taken from their owner."""
        return sum(self._rank(owner) is not None for owner in self._owners.values())

    def take(self, owner: Owner) -> int:
        """Give `owner` a slot, from another owner if none is free; that one is parked first.

        Raises:
            StatesExhausted: every slot is in use right now; nothing was changed.
        """
        if not self._free:
            ranked = [
                (rank, age, slot)
                for age, (slot, held) in enumerate(self._owners.items())
                if (rank := self._rank(held)) is not None
            ]
            if not ranked:
                raise StatesExhausted(1, 0, 0, "finish running turns or raise num_states")
            self._evict(self._owners[min(ranked)[2]])
        slot = self._free.pop()
        self.parking.claim(slot)
        self._own(owner, slot)
        self.peak = max(self.peak, self.num_held)
        return slot

    def hand_over(self, owner: Owner, heir: Owner) -> int:
        """Move a slot to the one reader of its state, which overwrites it in the same pass."""
        slot = owner.slot
        if slot is None:
            raise IntegrityError("a boundary without a slot cannot hand one over")
        self.parking.arrive(slot)
        self._evict(owner)
        slot = self._free.pop()
        self.parking.claim(slot)
        self._own(heir, slot)
        return slot

    def touch(self, owner: Owner) -> None:
        """Mark an owner's slot as used now: what follows may read it."""
        if owner.slot is not None:
            self.parking.arrive(owner.slot)
            self._owners[owner.slot] = self._owners.pop(owner.slot)

    def fetch(self, owner: Owner) -> bool:
        """Begin to bring an owner's parked state back before it is asked for, into a slot that
        nobody owns; False where it has one, none is free, or copies do not run beside the passes.
        """
        if owner.slot is not None or owner.place is None or not self._free:
            return False
        if not self.parking.runs_beside:
            return False
        slot = self._free.pop()
        self.parking.claim(slot)
        self._own(owner, slot)
        self.peak = max(self.peak, self.num_held)
        self.parking.load(owner, slot, ahead=True)
        return True

    def release(self, owner: Owner) -> None:
        """Take an owner's slot and its parked copy back, if it has them."""
        self._vacate(owner)
        self.parking.release(owner)

    def tidy(self) -> None:
        """Park one boundary ahead where few slots could be had without waiting for a copy.

        Called once a step: the copy runs beside the passes that follow.
        """
        wanted = -(-self.num_slots // AHEAD)
        if not self.parking.num_places or len(self._free) >= wanted:
            return
        ready, first = len(self._free), None
        for age, owner in enumerate(self._owners.values()):
            rank = self._rank(owner)
            if rank is None:
                continue
            if owner.place is not None:
                ready += 1
                if ready >= wanted:
                    return
            elif first is None or (rank, age) < first[0]:
                first = ((rank, age), owner)
        if first is not None:
            self.parking.park(first[1])

    def check(self, owners: list[Owner]) -> None:
        """Recount from all boundaries that exist.

        Raises:
            IntegrityError: an owner is unknown or doubled, or a slot is neither owned nor free.
        """
        held = {owner.slot: owner for owner in owners if owner.slot is not None}
        if held.keys() != self._owners.keys() or any(
            self._owners[slot] is not owner for slot, owner in held.items()
        ):
            raise IntegrityError(
                f"state slots {sorted(self._owners)} are owned, boundaries hold {sorted(held)}"
            )
        if sorted([*self._free, *self._owners]) != list(range(1, self.num_slots + 1)):
            raise IntegrityError("a state slot is lost, or free and owned at once")
        self.parking.check(list(owners))

    def _own(self, owner: Owner, slot: int) -> None:
        self._owners[slot] = owner
        owner.slot, owner.stated = slot, True

    def _evict(self, owner: Owner) -> None:
        """Take a slot from its owner; the state is parked, or lost where it cannot be."""
        if not self.parking.park(owner):
            self._evicted += 1
        self._vacate(owner)

    def _vacate(self, owner: Owner) -> None:
        if owner.slot is not None:
            del self._owners[owner.slot]
            self._free.append(owner.slot)
            owner.slot = None
