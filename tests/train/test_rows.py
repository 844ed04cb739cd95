"""Rows of loss: each sampled token once, whole trees, prompts shared, classes by structure."""

from __future__ import annotations

import numpy as np
import pytest

from octopus_trl.maths import dag
from octopus_trl.trace import Segment, ThreadRecord, Trace
from octopus_trl.train.rows import (
    MOUNTED,
    REWOUND,
    UNMOUNTED,
    Tree,
    build_row,
    empty_row,
    logical_tokens,
    longest_path,
    num_rewinds,
    plan_rows,
)
from tests.tiny import random_trace


def episode() -> Trace:
    """Root forks a child, leaves a dead end, goes on, and reads the child."""
    segments = [
        Segment(0, 0, None, "prompt", [1, 2, 3]),
        Segment(1, 0, 0, "action", [4, 5], start=3, logps=[-1.0, -2.0]),
        Segment(2, 1, 1, "tool", [6], start=5),
        Segment(3, 1, 2, "action", [7, 8, 9], start=6, logps=[-1.0, -1.0, -1.0]),
        Segment(4, 0, 1, "tool", [10], start=5),
        Segment(5, 0, 4, "action", [11], start=6, logps=[-3.0]),
        Segment(6, 0, 1, "tool", [12, 13], mounts=[2, 3], start=9),
        Segment(7, 0, 6, "action", [14], start=11, logps=[-4.0]),
    ]
    threads = [ThreadRecord(0, None, head=7), ThreadRecord(1, 0, head=3)]
    return Trace("e", "p", threads=threads, segments=segments).check()


def test_every_sampled_token_carries_loss_once() -> None:
    for seed in range(6):
        trace = random_trace(seed, logps=True)
        row = build_row([Tree(trace, 1.0)], mounts="live")
        actions = [s for s in trace.segments if s.kind == "action"]
        assert row.targets.tolist() == [t for s in actions for t in s.tokens]
        assert row.sampling_logps.tolist() == [p for s in actions for p in s.logps or []]
        assert row.num_owned.tolist() == [trace.num_owned]


def test_a_token_is_predicted_from_the_end_of_its_parent() -> None:
    trace = episode()
    row = build_row([Tree(trace, 1.0)], mounts="live")
    first = row.packed.layout.first_row
    ends = [first[s.id] + len(s.tokens) - 1 for s in trace.segments]
    firsts = [0, 2, 5, 6]  # places of the first tokens of segments 1, 3, 5, 7 among the owned
    assert row.rows[firsts].tolist() == [ends[0], ends[2], ends[4], ends[6]]


def test_tokens_are_unmounted_mounted_or_rewound_by_structure() -> None:
    row = build_row([Tree(episode(), 1.0)], mounts="live")
    assert row.where.tolist() == [UNMOUNTED] * 5 + [REWOUND, MOUNTED]
    assert row.after_rewind.tolist() == [False] * 6 + [True]
    assert num_rewinds(episode()) == 1


def test_rollouts_of_a_prompt_share_it_and_none_of_their_own_tokens() -> None:
    traces = [random_trace(seed, roots=1, prompt=range(30), logps=True) for seed in range(3)]
    row = build_row([Tree(trace, float(i)) for i, trace in enumerate(traces)], mounts="live")
    assert row.packed.num_rows == sum(sum(t.lengths) for t in traces) - 2 * 30
    assert np.bincount(row.tree_of_token).tolist() == [t.num_owned for t in traces]


def test_rows_hold_whole_trees_within_their_cap() -> None:
    traces = [random_trace(seed, logps=True) for seed in range(9)]
    trees = [Tree(trace, 0.0) for trace in traces if trace.num_owned]
    planned, left_out = plan_rows(trees, max_row_tokens=700, max_path_tokens=None)
    assert [id(tree) for row in planned for tree in row] == [id(tree) for tree in trees]
    assert not left_out
    sizes = [build_row(row, mounts="live").packed.num_rows for row in planned]
    assert max(sizes) <= 700
    assert len(sizes) > 1


def test_a_shared_prompt_counts_once_against_the_cap() -> None:
    traces = [random_trace(s, roots=1, prompt=range(90), max_tokens=60) for s in range(4)]
    unique = sum(sum(trace.lengths) for trace in traces) - 3 * 90
    trees = [Tree(trace, 0.0) for trace in traces]
    planned, _ = plan_rows(trees, max_row_tokens=unique, max_path_tokens=None)
    assert len(planned) == 1
    planned, _ = plan_rows(trees, max_row_tokens=unique - 1, max_path_tokens=None)
    assert len(planned) == 2


def test_path_cap_and_row_cap_are_separate_and_say_so() -> None:
    wide = Trace(
        "wide",
        "p",
        threads=[ThreadRecord(i, None if i == 0 else 0) for i in range(65)],
        segments=[Segment(0, 0, None, "prompt", [1] * 40)]
        + [Segment(i, i, 0, "action", [2] * 20, start=40) for i in range(1, 65)],
    ).check()
    assert (longest_path(wide), sum(wide.lengths)) == (60, 1320)
    planned, left_out = plan_rows([Tree(wide, 0.0)], max_row_tokens=1320, max_path_tokens=60)
    assert (len(planned), left_out) == (1, [])
    _, by_path = plan_rows([Tree(wide, 0.0)], max_row_tokens=1320, max_path_tokens=59)
    _, by_row = plan_rows([Tree(wide, 0.0)], max_row_tokens=1319, max_path_tokens=60)
    assert by_path == ["episode wide: a path of 60 tokens, max_path_tokens is 59"]
    assert by_row == ["episode wide: 1320 unique tokens, max_row_tokens is 1319"]


def test_a_tree_without_a_sampled_token_is_in_no_row() -> None:
    trace = Trace(
        "e", "p", threads=[ThreadRecord(0, None)], segments=[Segment(0, 0, None, "prompt", [1])]
    )
    assert plan_rows([Tree(trace, 1.0)], max_row_tokens=9, max_path_tokens=None) == ([], [])


def test_an_empty_row_owns_nothing() -> None:
    row = empty_row()
    assert (row.num_owned.tolist(), row.packed.num_rows) == ([0], 2)


def test_logical_tokens_count_leaf_chains_with_what_they_mounted() -> None:
    trace = episode()
    # leaves: 3 (chain 9), 5 (chain 7), 7 (chain 8 and 4 mounted)
    assert logical_tokens(trace) == 9 + 7 + 8 + 4


@pytest.mark.parametrize("seed", range(4))
def test_logical_tokens_equal_the_sum_over_leaves_by_definition(seed: int) -> None:
    trace = random_trace(seed)
    parents = set(trace.parents)
    total = 0
    for segment in trace.segments:
        if segment.id in parents:
            continue
        chain = {*dag.ancestors(trace.parents, segment.id), segment.id}
        read = {m for s in chain for m in trace.segments[s].mounts} - chain
        total += sum(len(trace.segments[s].tokens) for s in chain | read)
    assert logical_tokens(trace) == total
