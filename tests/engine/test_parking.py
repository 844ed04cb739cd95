"""Parked states: what loses its slot comes back bit by bit, or is computed again and counted."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import pytest
import torch

from octopus_trl.engine import Engine
from octopus_trl.engine.host_states import HostStates
from octopus_trl.engine.parking import Parking
from octopus_trl.engine.states import StatePool
from octopus_trl.errors import ConfigError, IntegrityError
from octopus_trl.models.paged import bytes_per_state
from octopus_trl.protocols import SamplingParams
from tests.engine.conftest import small_engine, tokens
from tests.engine.replay import play
from tests.tiny import random_trace


@dataclass(eq=False)
class Boundary:
    rank: int | None = 0
    slot: int | None = None
    place: int | None = None
    stated: bool = False


class Notebook:
    """A mover that writes down what each slot and place holds.

    Where it runs beside the passes, what is asked for ahead comes when somebody waits for it.
    """

    def __init__(self, *, runs_beside: bool = False) -> None:
        self.runs_beside = runs_beside
        self.coming: dict[int, str] = {}
        self.slots: dict[int, str] = {}
        self.places: dict[int, str] = {}
        self.claimed: list[int] = []

    def store(self, slot: int, place: int) -> None:
        self.places[place] = self.slots[slot]

    def load(self, place: int, slot: int, *, ahead: bool = False) -> None:
        (self.coming if ahead else self.slots)[slot] = self.places[place]

    def arrive(self, slot: int) -> None:
        self.slots[slot] = self.coming.pop(slot)

    def claim(self, slot: int) -> None:
        self.claimed.append(slot)


def make_pool(
    num_slots: int, num_places: int, *, runs_beside: bool = False
) -> tuple[StatePool, Notebook]:
    notes = Notebook(runs_beside=runs_beside)
    pool = StatePool(num_slots, lambda owner: owner.rank, num_places=num_places, mover=notes)
    return pool, notes


# Host integers


def test_a_state_is_parked_before_it_is_dropped() -> None:
    pool, notes = make_pool(1, 1)
    one, two, three = Boundary(), Boundary(), Boundary()
    notes.slots[pool.take(one)] = "one"
    notes.slots[pool.take(two)] = "two"
    assert (one.slot, one.place, pool.evicted) == (None, 0, 0)
    assert notes.places[0] == "one"
    notes.slots[pool.take(three)] = "three"  # the older copy goes, the younger takes its place
    assert (one.place, two.place, pool.evicted) == (None, 0, 1)
    assert notes.claimed == [1, 1, 1]
    pool.check([two, three])


def test_a_state_that_is_fetched_ahead_is_there_when_it_is_read_kept_or_parked_again() -> None:
    pool, notes = make_pool(2, 2, runs_beside=True)
    one, two, three = Boundary(), Boundary(), Boundary()
    for name, owner in (("one", one), ("two", two), ("three", three)):
        notes.slots[pool.take(owner)] = name
    assert one.slot is None
    assert not pool.fetch(one), "no slot is free, and none is taken for this"
    assert not pool.fetch(two), "it has its slot"
    pool.release(three)
    assert pool.fetch(one)
    assert one.slot is not None
    assert one.slot in notes.coming
    pool.touch(one)
    assert notes.slots[one.slot] == "one"
    assert not notes.coming
    pool.take(three)  # takes the slot of two, whose state is parked first
    notes.slots[three.slot or 0] = "three"
    pool.release(three)
    assert pool.fetch(two)
    pool.parking.release(two)  # its place goes to another while the copy is under way
    pool.parking.park(two)
    assert two.place is not None
    assert notes.places[two.place] == "two"
    pool.check([one, two])


def test_nothing_is_fetched_ahead_where_copies_do_not_run_beside_the_passes() -> None:
    pool, notes = make_pool(1, 1)
    one, two = Boundary(), Boundary()
    for name, owner in (("one", one), ("two", two)):
        notes.slots[pool.take(owner)] = name
    pool.release(two)
    assert not pool.fetch(one)
    assert pool.num_free == 1


def test_a_copy_of_what_still_has_its_slot_is_given_up_first() -> None:
    pool, notes = make_pool(3, 2)
    cold, warm, busy = Boundary(), Boundary(), Boundary(None)
    for owner in (cold, warm):
        notes.slots[pool.take(owner)] = "x"
        assert pool.parking.park(owner)
    pool.take(busy)
    notes.slots[3] = "busy"
    newcomer = Boundary()
    notes.slots[pool.take(newcomer)] = "new"  # takes the slot of the coldest
    assert (cold.slot, cold.place) == (None, 0)
    pool.take(Boundary(None))
    assert (warm.slot, warm.place, pool.evicted) == (None, 1, 0)
    pool.take(Boundary(None))  # evicts the newcomer; of two copies the older one goes
    assert (cold.place, newcomer.place, pool.evicted) == (None, 0, 1)


def test_an_idle_thread_outlives_a_snapshot_in_host_memory() -> None:
    pool, notes = make_pool(1, 1)
    thread, snapshot = Boundary(1), Boundary(0)
    notes.slots[pool.take(thread)] = "thread"
    notes.slots[pool.take(snapshot)] = "snapshot"
    pool.take(Boundary(None))
    assert (thread.place, snapshot.place, snapshot.slot, pool.evicted) == (0, None, None, 1)


def test_the_coldest_is_copied_ahead_while_slots_are_scarce_and_only_then() -> None:
    pool, notes = make_pool(32, 8)
    owners = [Boundary() for _ in range(31)]
    for owner in owners[:30]:
        notes.slots[pool.take(owner)] = "x"
    pool.tidy()
    assert not notes.places  # two slots are free, one in sixteen
    notes.slots[pool.take(owners[30])] = "x"
    pool.touch(owners[0])
    pool.tidy()
    assert (owners[1].place, owners[1].slot is not None) == (0, True)
    pool.tidy()
    assert len(notes.places) == 1
    pool.take(Boundary(None))
    pool.take(Boundary(None))
    assert owners[1].slot is None
    assert len(notes.places) == 1  # nothing had to be copied at that moment


def test_broken_counts_of_places_are_found() -> None:
    pool, notes = make_pool(1, 2)
    owner = Boundary()
    notes.slots[pool.take(owner)] = "x"
    pool.parking.park(owner)
    pool.check([owner])
    with pytest.raises(IntegrityError, match="places"):
        Parking(2, lambda _: 0, notes).check([owner])
    owner.place = None
    with pytest.raises(IntegrityError, match="places"):
        pool.check([owner])
    with pytest.raises(IntegrityError, match="nothing to load"):
        pool.parking.load(owner, 1)


def test_random_moves_never_mix_states_up() -> None:
    draws = random.Random(5)
    pool, notes = make_pool(4, 3)
    alive: list[Boundary] = []
    for step in range(600):
        move = draws.random()
        owner = draws.choice(alive) if alive else None
        if move < 0.4 or owner is None:
            owner = Boundary(draws.choice([0, 0, 1]))
            notes.slots[pool.take(owner)] = f"{id(owner)}"
            alive.append(owner)
        elif move < 0.6 and owner.slot is None and owner.place is not None:
            rank, owner.rank = owner.rank, None
            heir = Boundary(0)
            slot = pool.take(heir)
            pool.parking.load(owner, slot)
            assert notes.slots[slot] == f"{id(owner)}"
            notes.slots[slot] = f"{id(heir)}"
            owner.rank = rank
            alive.append(heir)
        elif move < 0.7:
            pool.touch(owner)
        elif move < 0.85:
            pool.tidy()
        else:
            alive.remove(owner)
            pool.release(owner)
        pool.check(alive)  # type: ignore[arg-type]
        for held in alive:
            if held.slot is not None:
                assert notes.slots[held.slot] == f"{id(held)}"
            if held.place is not None:
                assert notes.places[held.place] == f"{id(held)}"
        assert step >= 0


# Tensors


def parked_engine(model: Any, num_states: int, num_places: int, **options: Any) -> Engine:
    size = bytes_per_state(model.octopus_spec, torch.float32)
    return small_engine(model, num_states=num_states, park_bytes=num_places * size, **options)


def test_a_parked_state_comes_back_bit_by_bit(hybrid: Any) -> None:
    engine = parked_engine(hybrid, 2, 40)
    root = engine.open(tokens(11))
    memory, node = engine._memory, engine.extend(engine.fork(root), tokens(5))._tail
    layers = engine.spec.recurrent_layers
    want = [
        (memory.states[i][node.slot].clone(), memory.tails[i][node.slot].clone()) for i in layers
    ]
    cursors = [engine.extend(engine.fork(root), tokens(3, seed)) for seed in range(4)]
    assert (node.slot, node.place is not None) == (None, True)
    slot = engine._tree.states.take(node)
    engine._tree.states.parking.load(node, slot)
    for (state, tail), layer in zip(want, layers, strict=True):
        assert torch.equal(memory.states[layer][slot], state)
        assert torch.equal(memory.tails[layer][slot], tail)
    engine.check_integrity()
    assert len(cursors) == 4


@pytest.mark.parametrize("num_states", [1, 2, 3])
def test_parking_changes_no_bit_and_replays_nothing(hybrid: Any, num_states: int) -> None:
    trace = random_trace(2)
    few, many = parked_engine(hybrid, num_states, 200), small_engine(hybrid)
    for ours, want in zip(play(few, trace)[1], play(many, trace)[1], strict=True):
        assert torch.equal(ours, want)
    few.check_integrity()
    stats = few.stats()
    size = bytes_per_state(few.spec, torch.float32)
    assert (stats["replayed"], stats["evicted_states"]) == (0, 0)
    assert stats["parked"] >= stats["parked_now"] > 0
    assert stats["restored"] > 0
    assert stats["parked_bytes"] == stats["parked"] * size
    assert stats["restored_bytes"] == stats["restored"] * size
    assert size * stats["parked_now"] <= stats["host_bytes"]
    assert many.stats()["parked"] == many.stats()["host_bytes"] == 0


def test_pc04_with_too_few_places_the_rest_is_replayed_and_counted(hybrid: Any) -> None:
    roomy, tight = small_engine(hybrid), parked_engine(hybrid, 2, 3)
    chains: list[list[torch.Tensor]] = []
    for engine in (roomy, tight):
        root = engine.open(tokens(10))
        forks = [engine.fork(root) for _ in range(8)]
        heard = []
        for lap in range(3):
            for index, cursor in enumerate(forks):
                engine.extend(cursor, tokens(3, 100 * lap + index))
                heard.append(engine.logits(cursor).log_softmax(-1))
                engine.check_integrity()
        chains.append(heard)
    torch.testing.assert_close(torch.stack(chains[1]), torch.stack(chains[0]), atol=1e-5, rtol=0)
    stats = tight.stats()
    assert stats["evicted_states"] > 0
    assert stats["replayed"] > 0
    assert stats["peak_slots"] <= 2
    assert stats["parked_now"] <= 3


def test_turns_whose_states_are_fetched_ahead_draw_the_same(
    hybrid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes ahead comes as late as it may: its slot holds NaN until somebody waits for it."""
    load, memory_of = HostStates.load, attrgetter("_memory")
    coming: dict[int, list[Any]] = {}
    waited = 0

    def late_load(self: HostStates, place: int, slot: int, *, ahead: bool = False) -> None:
        load(self, place, slot)
        if ahead:
            memory = memory_of(self)
            layers = memory.spec.recurrent_layers
            pools = [pool[layer] for pool in (memory.states, memory.tails) for layer in layers]
            coming[slot] = [(pool, pool[slot].clone()) for pool in pools]
            for pool in pools:
                pool[slot].fill_(math.nan)

    def late_arrive(self: HostStates, slot: int) -> None:
        nonlocal waited
        waited += slot in coming
        for pool, kept in coming.pop(slot, ()):
            pool[slot].copy_(kept)

    def draws(engine: Engine) -> list[list[int]]:
        root = engine.open(tokens(9))
        cursors = [engine.extend(engine.fork(root), tokens(3, seed)) for seed in range(7)]
        found: list[list[int]] = []
        for turn in range(3):
            for index in (5, 0, 3, 6):
                params = SamplingParams(seed=10 * turn + index, max_tokens=4)
                [(ids, _)] = engine.generate([cursors[index]], params, until=())
                found.append(ids)
            engine.close(engine.extend(engine.fork(root), [turn]))  # leaves a slot free
        engine.check_integrity()
        return found

    want = draws(small_engine(hybrid))
    monkeypatch.setattr(HostStates, "load", late_load)
    monkeypatch.setattr(HostStates, "arrive", late_arrive)
    engine = small_engine(
        hybrid,
        num_states=5,
        max_snapshots=1,
        park_bytes=40 * bytes_per_state(hybrid.octopus_spec, torch.float32),
    )
    engine._pools._parked.runs_beside = True
    assert draws(engine) == want
    assert waited > 0, "nothing was fetched ahead: the test has lost its point"
    assert engine.stats()["replayed"] == 0


def test_more_turns_than_slots_go_on_from_parked_states(hybrid: Any) -> None:
    drawn = []
    for engine in (parked_engine(hybrid, 3, 60), small_engine(hybrid)):
        root = engine.open(tokens(7))
        cursors = [engine.fork(root) for _ in range(6)]
        for lap in range(3):
            params = [SamplingParams(seed=10 * lap + i, max_tokens=3 + i) for i in range(6)]
            drawn.append(engine.generate(cursors, params, until=()))
            engine.check_integrity()
        assert engine.stats()["replayed"] == 0
    assert drawn[:3] == drawn[3:]


def test_going_back_to_a_parked_snapshot_moves_a_pointer_and_reads_it_later(hybrid: Any) -> None:
    engine = parked_engine(hybrid, 2, 20)
    cursor = engine.open(tokens(9))
    for seed in range(3):
        engine.extend(cursor, tokens(4, seed))
    restored = engine.stats()["restored"]
    engine.rewind(cursor, 9)
    assert cursor._tail.slot is None
    assert engine.stats()["restored"] == restored
    engine.extend(cursor, tokens(5, 7))
    assert engine.stats()["restored"] == restored + 1
    assert engine.stats()["replayed"] == 0
    fresh = small_engine(hybrid)
    want = fresh.logits(fresh.extend(fresh.open(tokens(9)), tokens(5, 7)))
    assert torch.equal(engine.logits(cursor), want)
    engine.check_integrity()


def test_parked_states_go_with_their_cursors_with_sleep_and_with_new_weights(hybrid: Any) -> None:
    engine = parked_engine(hybrid, 2, 20)
    root = engine.open(tokens(9))
    cursors = [engine.extend(engine.fork(root), tokens(2, seed)) for seed in range(5)]
    assert engine.stats()["parked_now"] > 3
    for cursor in cursors:
        engine.close(cursor)
    engine.check_integrity()
    assert engine.stats()["parked_now"] <= 1
    cursors = [engine.extend(engine.fork(root), tokens(2, seed)) for seed in range(5)]
    assert engine.stats()["host_bytes"] > 0
    engine.sleep()
    assert engine.stats()["parked_now"] == engine.stats()["host_bytes"] == 0
    engine.wake()
    for cursor in [root, *cursors]:
        engine.close(cursor)
    root = engine.open(tokens(9))
    cursors = [engine.extend(engine.fork(root), tokens(2, seed)) for seed in range(5)]
    engine.set_policy_version(1)
    for cursor in [root, *cursors]:
        engine.close(cursor)
    engine.check_integrity()
    assert (engine.stats()["parked_now"], engine.stats()["slots"]) == (0, 0)


def test_without_a_budget_nothing_is_parked_and_a_budget_below_one_state_is_refused(
    hybrid: Any, dense: Any
) -> None:
    for options in ({}, {"park_bytes": 0}):
        engine = small_engine(hybrid, num_states=2, **options)
        root = engine.open(tokens(9))
        for seed in range(4):
            engine.extend(engine.fork(root), tokens(2, seed))
        assert engine.stats()["parked"] == 0
    with pytest.raises(ConfigError, match="park_bytes=5: a state takes"):
        small_engine(hybrid, park_bytes=5)
    with pytest.raises(ConfigError, match="park_bytes"):
        small_engine(hybrid, park_bytes=-1)
    assert small_engine(dense, park_bytes=5).stats()["host_bytes"] == 0
