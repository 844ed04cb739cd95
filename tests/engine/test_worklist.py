"""Work lists say exactly what each row sees, whatever was shared, cut, moved or grown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from octopus_trl.engine.slot_table import SlotTable, TableFull
from octopus_trl.engine.work_layout import WorkLayout
from octopus_trl.engine.worklist import Run, WorkList, WorkLists
from octopus_trl.errors import ConfigError
from tests.decode_work import Places, all_seen, planned, random_runs, with_own


def read_back(one: WorkList, table: npt.NDArray[np.int32]) -> list[list[int]]:
    """List the slots that each row reads, and check what holds of every work list."""
    views = one.layout.views(one.packed)
    bounds, readers = views["bounds"], views["readers"]
    assert bounds[0] == 0
    assert (np.diff(bounds) >= 0).all()
    seen: list[list[int]] = [[] for _ in range(one.layout.max_rows)]
    given: list[int] = []
    for lo, slots, reader_lo, num_readers, sees, *unused in views["items"][: one.num_items]:
        assert not any(unused)
        for place, (row, partial) in enumerate(readers[reader_lo : reader_lo + num_readers]):
            seen[row].extend(table[lo : lo + min(slots, max(0, sees + place))])
            assert bounds[row] <= partial < bounds[row + 1], "a row merges its own partials"
            given.append(partial)
    assert sorted(given) == list(range(bounds[-1])), "every partial is given once"
    return seen


class Device:
    """Holds what a device would, from what is sent and appended alone."""

    def __init__(self, lists: WorkLists) -> None:
        self.lists, self.sent = lists, 0
        self.table = np.zeros_like(lists.table.mirror)
        self.packed = [np.zeros_like(one.packed) for one in lists.lists]

    def step(self) -> None:
        for lo, hi in self.lists.table.take_dirty():
            self.table[lo:hi] = self.lists.table.mirror[lo:hi]
            self.sent += hi - lo
        for one, packed in zip(self.lists.lists, self.packed, strict=True):
            packed[: one.num_changed] = one.packed[: one.num_changed]
        layout = self.lists.lists[0].layout
        appends = layout.views(self.packed[0])["appends"]
        self.table[appends[:, 0]] = appends[:, 1]

    def check(self, runs: Sequence[Run]) -> None:
        """Compare with what the runs see."""
        for one, packed in zip(self.lists.lists, self.packed, strict=True):
            assert np.array_equal(one.packed, packed), "the device has the whole list"
            rows = read_back(one, self.table)
            wanted = all_seen(runs, mounts=one.mounts)
            for row, slots in zip(rows, wanted, strict=False):
                assert sorted(row) == sorted(slots.tolist())
            assert not any(rows[len(wanted) :]), "rows beyond the runs read nothing"


@pytest.mark.parametrize("seed", range(12))
def test_every_row_reads_what_it_sees_and_nothing_twice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [1, 1, 5, 1, 1, 12, 1, 40, 1, 1]
    runs = random_runs(rng, Places(rng, 6000), num_nodes=14, num_rows=rows)
    lists = planned(runs, WorkLayout(80), chunk=int(rng.choice([0, 64, 192])))
    device = Device(lists)
    device.step()
    device.check(runs)
    views = lists.lists[0].layout.views(lists.lists[0].packed)
    assert views["items"][:, 3].max() <= 8, "an item has at most a tile of readers"


def test_text_that_many_rows_see_is_read_once() -> None:
    places = Places(np.random.default_rng(0), 20000)
    shared = places.take(8000)
    runs = [Run(n, [shared], places.take(100)) for n in range(8)]
    one = planned(runs, WorkLayout(8), chunk=1024).lists[0]
    items = one.layout.views(one.packed)["items"][: one.num_items]
    assert items[:, 1].sum() == 8000 + 8 * 100
    assert items[items[:, 3] > 1, 1].sum() == 8000


def test_tiles_of_a_chunk_are_even_and_follow_each_other() -> None:
    places = Places(np.random.default_rng(0), 20000)
    shared = places.take(4096)
    runs = [Run(n, [shared], places.take(100)) for n in range(18)]
    one = planned(runs, WorkLayout(18), chunk=1024).lists[0]
    items = one.layout.views(one.packed)["items"][: one.num_items]
    large = items[items[:, 3] > 1]
    assert large[:, 3].tolist() == [6] * 12, "18 readers in tiles of at most 8"
    assert np.array_equal(large[:, 0], np.repeat(np.unique(large[:, 0]), 3))


@pytest.mark.parametrize("split", [False, True])
def test_rows_that_grow_step_by_step_stay_right_through_forks_ends_and_full_tables(
    split: bool,
) -> None:
    rng = np.random.default_rng(3)
    places = Places(rng, 60000)
    layout = WorkLayout(16)
    table = SlotTable(14000)
    lists = WorkLists(
        [
            WorkList(layout, table, readers_per_tile=4, num_kv_heads=2, mounts=mounts)
            for mounts in ((True, False) if split else (True,))
        ]
    )
    device = Device(lists)
    runs = random_runs(rng, places, num_nodes=8, num_rows=[1] * 5)
    for turn in range(12):
        lists.plan(runs)
        device.step()
        device.check(runs)
        for _ in range(int(rng.choice([1, 9, 300]))):
            slots = places.take(len(runs))
            runs = [
                with_own(run, np.append(run.own, slot))
                for run, slot in zip(runs, slots, strict=True)
            ]
            lists.advance(slots)
            device.step()
        device.check(runs)
        # One turn ends: its text freezes and a tool text or a child goes on; one mounts another's.
        ended = runs.pop(int(rng.integers(len(runs))))
        frozen = [*ended.spans, ended.own]
        runs.append(Run((turn, 0), frozen, places.take(int(rng.integers(1, 40)))))
        if len(runs) < 9:
            runs.append(Run((turn, 1), frozen, places.take(1)))
        reader = int(rng.integers(len(runs) - 2))
        if all(ended.own is not span for span in runs[reader].mounted):
            old = runs[reader]
            runs[reader] = Run(old.key, old.spans, old.own, 1, [*old.mounted, ended.own])
    assert table.num_resets, "the table was never full: the test has lost its point"


def test_a_steady_step_sends_no_text_and_a_new_turn_not_the_shared_text_again() -> None:
    places = Places(np.random.default_rng(0), 60000)
    shared = places.take(20000)
    runs = [Run(n, [shared], places.take(500)) for n in range(8)]
    lists = planned(runs, WorkLayout(8))
    device = Device(lists)
    device.step()
    assert device.sent >= 20000
    device.sent = 0
    for _ in range(100):
        lists.advance(places.take(8))
        device.step()
    assert device.sent == 0
    runs[0] = Run("next", [shared, places.take(600)], places.take(30))
    lists.plan(runs)
    device.step()
    assert 0 < device.sent < 8 * 1000


def test_a_row_alone_is_cut_the_same_whatever_runs_beside_it() -> None:
    rng = np.random.default_rng(7)
    runs = random_runs(rng, Places(rng, 9000), num_nodes=12, num_rows=[1] * 9)

    def cuts(passed: Sequence[Run]) -> list[list[int]]:
        one = planned(passed, WorkLayout(9), alone=True, chunk=1 << 30).lists[0]
        views = one.layout.views(one.packed)
        items = views["items"][: one.num_items]
        assert set(items[:, 3]) == {1}
        slots = {partial: size for (_, partial), size in zip(views["readers"], items[:, 1])}
        bounds = views["bounds"]
        return [
            [int(slots[partial]) for partial in range(bounds[row], bounds[row + 1])]
            for row in range(len(passed))
        ]

    together = cuts(runs)
    assert together == [cuts([run])[0] for run in runs]
    assert all(len(row) <= 2 for row in together), "frozen text in one sweep, own text in one"
    device = Device(planned(runs, WorkLayout(9), alone=True))
    device.step()
    device.check(runs)


def test_own_text_that_a_failed_pass_took_back_is_read_as_it_is_now() -> None:
    places = Places(np.random.default_rng(0), 4000)
    run = Run("a", [], places.take(20))
    lists = planned([run], WorkLayout(2))
    device = Device(lists)
    device.step()
    lists.advance(places.take(1))  # this pass never runs
    shorter = with_own(run, np.append(run.own[:-3], places.take(2)))
    lists.plan([shorter])
    device.step()
    device.check([shorter])


def test_a_layout_too_small_for_sharing_still_reads_everything() -> None:
    rng = np.random.default_rng(5)
    places = Places(rng, 40000)
    runs = random_runs(rng, places, num_nodes=30, num_rows=[1] * 12, lengths=[150, 1500])
    tight = WorkLayout(12, max_items=24, max_partials=24)
    lists = WorkLists([WorkList(tight, SlotTable(1 << 18), readers_per_tile=4, num_kv_heads=2)])
    device = Device(lists)
    for _ in range(2):
        lists.plan(runs)
        device.step()
        device.check(runs)
        slots = places.take(12)
        runs = [with_own(r, np.append(r.own, s)) for r, s in zip(runs, slots, strict=True)]
        lists.advance(slots)
        device.step()
        device.check(runs)


def test_what_does_not_fit_is_refused_with_the_fix() -> None:
    places = Places(np.random.default_rng(0), 4000)
    with pytest.raises(ConfigError, match="5 rows, must be at most 4: raise max_rows"):
        planned([Run("a", [], places.take(9), 5)], WorkLayout(4))
    lists = WorkLists([WorkList(WorkLayout(4), SlotTable(100), readers_per_tile=4, num_kv_heads=1)])
    with pytest.raises(ConfigError, match="slot table has 100 places"):
        lists.plan([Run("a", [places.take(2000)], places.take(9))])
    with pytest.raises(ConfigError, match="at least twice max_rows"):
        WorkLayout(8, max_items=15)


def test_short_neighbours_are_joined_and_long_text_stays_where_it_is() -> None:
    places = Places(np.random.default_rng(0), 40000)
    table = SlotTable(30000)
    long, short = places.take(5000), [places.take(50) for _ in range(6)]
    assert table.place([short[0]]) == [(0, 50)]
    assert len(table.place([long])) == 1
    stretches = table.place([*short, long])
    assert [length for _, length in stretches] == [300, 5000]
    assert stretches[1] == table.place([long])[0]
    text = np.concatenate([table.mirror[lo : lo + length] for lo, length in stretches])
    assert np.array_equal(text, np.concatenate([*short, long]))
    with pytest.raises(TableFull):
        table.place([places.take(25000)])
