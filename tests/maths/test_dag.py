"""The integers of a DAG equal what its definitions (DESIGN §2) give, written out naively."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octopus_trl.maths import dag

Dag = tuple[list[int | None], list[list[int]], list[int]]


def chain(parents: list[int | None], segment: int) -> list[int]:
    """Ancestors and the segment itself, root first, by recursion."""
    parent = parents[segment]
    return [segment] if parent is None else [*chain(parents, parent), segment]


def mounted(parents: list[int | None], mounts: list[list[int]], segment: int) -> set[int]:
    """What the segment or any ancestor mounted: not transitive."""
    return {mount for link in chain(parents, segment) for mount in mounts[link]}


@st.composite
def dags(draw: st.DrawFn, max_segments: int = 12) -> Dag:
    """Draw any legal DAG: several roots, chains and branches, mounts of anything not yet seen."""
    num = draw(st.integers(1, max_segments))
    parents: list[int | None] = []
    mounts: list[list[int]] = []
    for index in range(num):
        parent = draw(st.none() | st.integers(0, index - 1)) if index else None
        parents.append(parent)
        mounts.append([])
        known = {*chain(parents, index), *mounted(parents, mounts, index)}
        free = [other for other in range(index) if other not in known]
        wanted: bool = draw(st.booleans())
        if free and wanted:
            mounts[index] = draw(st.lists(st.sampled_from(free), unique=True, max_size=3))
    lengths = [draw(st.integers(1, 5)) for _ in range(num)]
    return parents, mounts, lengths


# P -> {A -> {R0, R1}, B -> {R2, R3}}, and R2's continuation reads R0.
PC_18: Dag = (
    [None, 0, 0, 1, 1, 2, 2, 5],
    [[], [], [], [], [], [], [], [3]],
    [4, 1, 3, 2, 1, 5, 2, 1],
)
# A mesh: two children read each other's first half, a third reads both, another root reads all.
MESH: Dag = (
    [None, 0, 0, 0, 1, 2, 3, None, 7],
    [[], [], [], [], [2], [1], [1, 2, 4], [], [1, 2, 3, 4, 5, 6]],
    [3, 2, 2, 1, 1, 4, 1, 2, 2],
)
CHAIN: Dag = ([None, 0, 1, 2], [[], [], [], []], [1, 1, 1, 1])
ONE: Dag = ([None], [[]], [1])
SHAPES = pytest.mark.parametrize(
    "shape", [PC_18, MESH, CHAIN, ONE], ids=["pc18", "mesh", "chain", "one"]
)


@settings(max_examples=80, deadline=None)
@example(PC_18)
@example(MESH)
@given(dags())
def test_ancestors_mounts_and_visibility_equal_the_closure(shape: Dag) -> None:
    parents, mounts, _ = shape
    num = len(parents)
    tree = dag.ancestor_matrix(parents)
    reads = dag.mounted_matrix(parents, mounts)
    sees = dag.visible_matrix(parents, mounts)
    for segment in range(num):
        above = chain(parents, segment)[:-1]
        assert dag.ancestors(parents, segment) == above
        assert set(np.flatnonzero(tree[segment])) == set(above)
        assert set(np.flatnonzero(reads[segment])) == mounted(parents, mounts, segment)
        assert set(np.flatnonzero(sees[segment])) == set(above) | mounted(parents, mounts, segment)
        assert not sees[segment, segment:].any()


@settings(max_examples=80, deadline=None)
@given(dags())
def test_a_segment_starts_past_its_parent_and_everything_it_reads(shape: Dag) -> None:
    parents, mounts, lengths = shape
    starts = dag.starts(parents, mounts, lengths)
    ends = [start + length for start, length in zip(starts, lengths)]
    plain = dag.starts(parents, mounts, lengths, position="unshifted")
    for segment, parent in enumerate(parents):
        bounds = [ends[m] for m in mounted(parents, mounts, segment)]
        if parent is not None:
            bounds.append(ends[parent])
        assert starts[segment] == max(bounds, default=0)
        assert plain[segment] == sum(lengths[link] for link in chain(parents, segment)[:-1])


def test_a_reader_at_2000_that_mounts_1500_to_4000_goes_on_at_4001() -> None:
    starts = dag.starts([None, 0, 0, 2], [[], [], [], [1]], [1500, 2501, 501, 1])
    assert starts == [0, 1500, 1500, 4001]


@settings(max_examples=80, deadline=None)
@given(dags())
def test_runs_are_chains_without_a_branch_inside_and_levels_count_branch_points(shape: Dag) -> None:
    parents, _, _ = shape
    children = [[c for c, p in enumerate(parents) if p == s] for s in range(len(parents))]
    runs, run_parent, level = dag.runs(parents)
    assert sorted(itertools.chain(*runs)) == list(range(len(parents)))
    run_of = {segment: index for index, run in enumerate(runs) for segment in run}
    for index, run in enumerate(runs):
        for above, below in itertools.pairwise(run):
            assert children[above] == [below]
        assert len(children[run[-1]]) != 1, "a run ends at a branch point or a leaf"
        parent = parents[run[0]]
        assert run_parent[index] == (-1 if parent is None else run_of[parent])
        branches = [s for s in chain(parents, run[0])[:-1] if len(children[s]) > 1]
        assert level[index] == len(branches)


@settings(max_examples=80, deadline=None)
@example(PC_18)
@given(dags())
def test_a_layout_holds_each_token_once_with_whole_runs_in_levels(shape: Dag) -> None:
    parents, mounts, lengths = shape
    layout = dag.layout(parents, mounts, lengths)
    assert layout.num_rows == sum(lengths)
    assert sorted(layout.order) == list(range(len(parents)))
    row = 0
    for segment in layout.order:
        assert layout.first_row[segment] == row
        row += lengths[segment]
    chains, run_parent, level_of = dag.runs(parents)
    ends: list[list[int]] = []  # for each level, the row just past each run
    row = 0
    for depth, level in enumerate(layout.levels):
        assert level.lo == row
        bounds = list(itertools.accumulate(level.lengths, initial=level.lo))
        assert level.hi == bounds[-1]
        row = level.hi
        ends.append(bounds[1:])
        assert level_of.count(depth) == len(level.lengths) == len(level.parent_run)
        for index, (lo, parent_run) in enumerate(zip(bounds, level.parent_run)):
            head = next(s for s in range(len(parents)) if layout.first_row[s] == lo)
            run = next(r for r in chains if r[0] == head)
            assert level.lengths[index] == sum(lengths[s] for s in run)
            parent = parents[head]
            if parent is None:
                assert (parent_run, depth) == (-1, 0)
            else:
                last_row_of_parent = layout.first_row[parent] + lengths[parent]
                assert ends[depth - 1][parent_run] == last_row_of_parent
    assert row == layout.num_rows
    assert run_parent.count(-1) == parents.count(None)


def by_definition(shape: Dag, layout: dag.Layout) -> tuple[np.ndarray, np.ndarray]:
    """Token visibility [T, T] along the tree and through mounts, in row order."""
    parents, mounts, lengths = shape
    tree = np.zeros((layout.num_rows, layout.num_rows), dtype=bool)
    far = np.zeros_like(tree)
    for segment, length in enumerate(lengths):
        above = chain(parents, segment)[:-1]
        for offset in range(length):
            row = layout.first_row[segment] + offset
            tree[row, layout.first_row[segment] : row + 1] = True
            for other in above:
                tree[row, layout.first_row[other] :][: lengths[other]] = True
            for other in mounted(parents, mounts, segment):
                far[row, layout.first_row[other] :][: lengths[other]] = True
    return tree, far & ~tree


@settings(max_examples=80, deadline=None)
@example(PC_18)
@example(MESH)
@given(dags())
def test_the_attention_plan_shows_each_row_what_the_definitions_show_it(shape: Dag) -> None:
    layout = dag.layout(*shape)
    tree, far = by_definition(shape, layout)
    for plan, reads in ((layout.plan, far), (layout.plan.without_mounts(), np.zeros_like(far))):
        own = np.zeros_like(tree)
        other = np.zeros_like(far)
        row = 0
        for group in plan.groups:
            assert group.lo == row < group.hi
            for row in range(group.lo, group.hi):
                own[row, group.seen] = True
                own[row, group.lo : row + 1] = True
                other[row, group.mounted] = True
            row = group.hi
            visible = np.concatenate([group.seen, group.mounted])
            assert len(np.unique(visible)) == len(visible), "each key is read once"
            assert not ((visible >= group.lo) & (visible < group.hi)).any()
        assert row == plan.num_rows
        np.testing.assert_array_equal(own, tree)
        np.testing.assert_array_equal(other, reads)
        # The segment matrices say the same for the kernels.
        at = plan.segment_of_row
        wide = plan.visible[at[:, None], at[None, :]]
        wide |= (at[:, None] == at[None, :]) & np.tri(len(at), dtype=bool)
        np.testing.assert_array_equal(wide, tree)
        np.testing.assert_array_equal(plan.mounted[at[:, None], at[None, :]], reads)


@settings(max_examples=60, deadline=None)
@given(dags())
def test_a_token_is_predicted_by_the_token_before_it_on_its_chain(shape: Dag) -> None:
    parents, mounts, lengths = shape
    layout = dag.layout(parents, mounts, lengths)
    for segment in range(len(parents)):
        path = [layout.first_row[s] + i for s in chain(parents, segment) for i in range(lengths[s])]
        before = [dag.NO_ROW, *path[:-1]][-lengths[segment] :]
        assert layout.predictor(parents, lengths, segment).tolist() == before


@settings(max_examples=40, deadline=None)
@given(dags())
def test_steps_of_a_splice_are_the_chain_with_what_was_read_before_each_segment(
    shape: Dag,
) -> None:
    parents, mounts, lengths = shape
    layout = dag.layout(parents, mounts, lengths, spliced=mounts)
    if not any(mounts):
        assert layout.steps is None
        return
    assert layout.steps is not None
    assert layout.own is not None

    def rows(segments: list[int]) -> list[int]:
        return [layout.first_row[s] + i for s in segments for i in range(lengths[s])]

    np.testing.assert_array_equal(layout.steps[layout.own], np.arange(layout.num_rows))
    chains, _, level_of = dag.runs(parents)
    at = 0
    for depth, level in enumerate(layout.levels):
        assert level.lo == at
        for run, length in zip([r for r, d in enumerate(level_of) if d == depth], level.lengths):
            want = rows([s for own in chains[run] for s in (*mounts[own], own)])
            assert layout.steps[at : at + length].tolist() == want
            at += length
        assert level.hi == at
    assert at == len(layout.steps)


def test_copies_are_read_as_mounts_and_lie_past_all_rows() -> None:
    layout = dag.layout([None, 0, 0, None], [[], [], [3], []], [3, 2, 4, 2], num_copies=1)
    assert (layout.num_rows, layout.plan.num_rows) == (9, 11)
    assert (layout.order, layout.levels[-1].hi) == ([0, 1, 2], 9)
    reader = next(group for group in layout.plan.groups if group.lo == layout.first_row[2])
    assert reader.mounted.tolist() == [9, 10]
    tree = layout.plan.tree()
    assert (tree.num_rows, len(tree.visible), tree.num_copies) == (9, 3, 0)
    assert [(group.lo, group.hi) for group in tree.groups] == [(0, 3), (3, 5), (5, 9)]
    assert not any(len(group.mounted_spans) for group in tree.groups)


@SHAPES
def test_siblings_never_see_each_other_without_a_mount(shape: Dag) -> None:
    parents, mounts, _ = shape
    sees = dag.visible_matrix(parents, [[] for _ in mounts])
    for a, b in itertools.combinations(range(len(parents)), 2):
        assert sees[b, a] == (a in chain(parents, b))


def test_pc_18_reader_sees_the_one_leaf_it_mounted_and_no_other() -> None:
    parents, mounts, _ = PC_18
    sees = dag.visible_matrix(parents, mounts)
    assert set(np.flatnonzero(sees[7])) == {0, 2, 5, 3}
    assert set(np.flatnonzero(sees[6])) == {0, 2}
    assert set(np.flatnonzero(sees[4])) == {0, 1}


def test_mounts_are_not_transitive() -> None:
    """2 reads 1, 3 reads 2: 3 does not see 1."""
    sees = dag.visible_matrix([None, None, None, None], [[], [], [1], [2]])
    assert set(np.flatnonzero(sees[3])) == {2}


def test_the_owner_mask_holds_every_action_token_once_and_nothing_else() -> None:
    masks = dag.owner_mask(["prompt", "action", "tool", "action"], [2, 3, 1, 1])
    assert [mask.tolist() for mask in masks] == [[False] * 2, [True] * 3, [False], [True]]


def test_visibility_grows_with_segments_and_not_with_tokens_squared() -> None:
    """Sixty-four leaves of 2,000 tokens: what the plan holds stays linear in T."""
    num = 64
    parents: list[int | None] = [None, *([0] * num), *range(1, num + 1)]
    mounts: list[list[int]] = [[] for _ in range(num + 1)]
    mounts += [[leaf - 1 if leaf > 1 else num] for leaf in range(1, num + 1)]
    layout = dag.layout(parents, mounts, [1000, *([1000] * (2 * num))])
    held = sum(group.seen.nbytes + group.mounted.nbytes for group in layout.plan.groups)
    assert layout.num_rows == 129_000
    assert held < 8 * 3 * layout.num_rows
