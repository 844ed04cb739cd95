"""The state pool: who holds a slot, and who loses it first."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from octopus_trl.engine.states import StatePool
from octopus_trl.errors import IntegrityError, StatesExhausted


@dataclass(eq=False)
class Boundary:
    rank: int | None
    slot: int | None = None
    place: int | None = None
    stated: bool = False


def make_pool(num_slots: int) -> StatePool:
    return StatePool(num_slots, lambda owner: owner.rank)


def test_zero_slot_is_never_given_away() -> None:
    pool = make_pool(3)
    assert sorted(pool.take(Boundary(0)) for _ in range(3)) == [1, 2, 3]


def test_lowest_rank_goes_first_and_of_equals_the_longest_unused() -> None:
    pool = make_pool(4)
    idle, old, young, busy = Boundary(1), Boundary(0), Boundary(0), Boundary(None)
    for owner in (idle, old, young, busy):
        pool.take(owner)
    pool.touch(old)
    taken = []
    for _ in range(3):
        pool.take(Boundary(None))
        taken.append([owner.slot is None for owner in (idle, old, young, busy)])
    assert taken == [
        [False, False, True, False],
        [False, True, True, False],
        [True, True, True, False],
    ]
    assert pool.evicted == 3
    with pytest.raises(StatesExhausted) as caught:
        pool.take(Boundary(None))
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (1, 0, 0)


def test_heir_takes_the_slot_over() -> None:
    pool = make_pool(1)
    source, heir = Boundary(None), Boundary(None)
    slot = pool.take(source)
    assert pool.hand_over(source, heir) == slot
    assert (source.slot, heir.slot) == (None, slot)
    pool.check([heir])
    with pytest.raises(IntegrityError):
        pool.check([source])


def test_release_frees_the_slot() -> None:
    pool = make_pool(1)
    owner = Boundary(None)
    pool.take(owner)
    pool.release(owner)
    pool.release(owner)
    assert (owner.slot, pool.num_free, pool.num_held, pool.peak) == (None, 1, 0, 1)
    pool.check([])
