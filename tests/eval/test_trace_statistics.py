"""Each figure of an episode against a case counted by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octopus_trl.errors import ConfigError
from octopus_trl.eval.trace_statistics import (
    accuracy_by,
    active_prompts,
    count_mounts,
    critical_path,
    explored_tokens,
    figures_of,
    forks_on_first_turn,
    gold_recall,
    left_segments,
    length_class,
    rewound_segments,
    statistics_of,
    work_of_children,
)
from octopus_trl.trace import Segment, ThreadRecord, Trace
from octopus_trl.trace_files import write_traces

ROOT = Path(__file__).parents[2]


def episode(**changes: Any) -> Trace:
    """Root (100 + 10) forks 1 (20 + 3) and 2 (5 + 2, left; 7 + 4); the root waits, mounts both."""
    sizes = [
        (0, None, "prompt", 100),
        (0, 0, "action", 10),
        (1, 1, "tool", 20),
        (1, 2, "action", 3),
        (2, 1, "tool", 5),
        (2, 4, "action", 2),
        (2, 4, "tool", 7),
        (2, 6, "action", 4),
        (0, 1, "tool", 6),
        (0, 8, "action", 1),
    ]
    segments = [
        Segment(at, thread, parent, kind, [1] * size)
        for at, (thread, parent, kind, size) in enumerate(sizes)
    ]
    segments[8].mounts = [2, 3, 4, 6, 7]
    threads = [
        ThreadRecord(0, None, head=9),
        ThreadRecord(1, 0, head=3),
        ThreadRecord(2, 0, head=7),
    ]
    events: list[dict[str, Any]] = [
        {"type": "turn", "thread": 0, "segment": 1, "calls": [["fork", "ok"], ["open", "ok"]]},
        {"type": "turn", "thread": 1, "segment": 3, "calls": [["open", "ok"], ["open", "refused"]]},
        {"type": "turn", "thread": 2, "segment": 7, "calls": [["open", "ok"], ["open", "ok"]]},
        {"type": "rewind", "thread": 2, "to": 0},
        {"type": "rewind", "thread": 0, "to": 0},
    ]
    fields: dict[str, Any] = {
        "reward": 1.0,
        "threads": threads,
        "segments": segments,
        "events": events,
        **changes,
    }
    return Trace("e", "p", **fields).place().check()


def test_a_fork_on_the_first_turn_is_seen_without_events_and_a_later_one_is_none() -> None:
    assert forks_on_first_turn(episode(events=[]))
    late = episode(events=[])
    late.segments[2].parent = late.segments[4].parent = late.segments[6].parent = 9
    assert not forks_on_first_turn(late)
    unheard = episode(events=[{"type": "fork", "thread": 0, "child": 3, "segment": 1}])
    unheard.segments = unheard.segments[:2]
    assert forks_on_first_turn(unheard)


def test_work_is_counted_once_carried_out_and_by_who_did_it() -> None:
    assert work_of_children(episode()) == (4, 3, 2, 1)


def test_a_mount_is_a_reader_and_a_thread_not_a_segment() -> None:
    # The root's second turn ends at 110; thread 1 ends at 133, thread 2 at 126.
    assert count_mounts(episode()) == (2, 2)
    behind = episode()
    behind.segments[8].parent = 7
    behind.segments[8].mounts = [2, 3]
    assert count_mounts(behind.place()) == (1, 1)
    behind.segments[6].tokens = [1] * 70
    assert count_mounts(behind.place()) == (1, 0)


def test_a_turn_sees_its_chain_and_its_mounts_and_not_the_left_branch() -> None:
    assert active_prompts(episode()) == [100, 130, 115, 122, 110 + 6 + 20 + 3 + 5 + 7 + 4]


def test_left_branches_are_explored_and_do_not_survive() -> None:
    assert rewound_segments(episode()) == {5}
    assert explored_tokens(episode()) == (158, 156)


def test_a_context_that_its_thread_left_for_a_new_root_was_not_rewound() -> None:
    segments = [
        Segment(0, 0, None, "prompt", [1] * 9),
        Segment(1, 0, 0, "action", [1]),
        Segment(2, 0, 0, "action", [1] * 3),
        Segment(3, 0, None, "prompt", [1] * 4),
        Segment(4, 0, 3, "action", [1]),
        Segment(5, 0, 3, "action", [1] * 2),
    ]
    threads = [ThreadRecord(0, None, head=5)]
    trace = Trace("e", "p", segments=segments, threads=threads).place().check()
    assert left_segments(trace) == {0, 1, 2, 4}
    assert rewound_segments(trace) == {4}


def test_the_critical_path_goes_through_the_longest_child_and_across_its_rewind() -> None:
    # 100 + 10, then the longer of 20 + 3 and 5 + 2 + 7 + 4, then what read both.
    assert critical_path(episode()) == 110 + 23 + 7
    longer = episode()
    longer.segments[5].tokens = [1] * 12
    assert critical_path(longer) == 110 + 5 + 12 + 7 + 4 + 7


def test_a_wait_without_a_read_is_on_the_critical_path() -> None:
    waiting = [
        {"type": "wait", "thread": 0, "targets": [1, 2]},
        {"type": "turn", "thread": 0, "segment": 1, "calls": [["wait_threads", "ok"]]},
    ]
    alone = episode(events=[])
    alone.segments[8].mounts = []
    assert critical_path(alone) == 110 + 23
    alone.events = waiting
    assert critical_path(alone) == 110 + 23 + 7


@pytest.mark.parametrize(
    ("opened", "gold", "recall"),
    [(["1", "2"], ["2", "3"], 0.5), ([], ["1"], 0.0), (None, ["1"], None), (["1"], [], None)],
)
def test_recall_is_known_only_where_both_lists_are(
    opened: list[str] | None, gold: list[str], recall: float | None
) -> None:
    assert gold_recall(opened, gold) == recall


def test_accuracy_is_grouped_by_hops_and_by_length() -> None:
    traces = [episode(meta={"hops": hops}, reward=float(hops == 2)) for hops in (2, 3, 3)]
    traces += [episode(meta={"branches": 2}, reward=0.0), episode(reward=None)]
    figures = [figures_of(trace) for trace in traces]
    rows = [(key, n, share) for key, n, share, _ in accuracy_by(figures, lambda one: one.hops)]
    assert rows == [(2, 2, 0.5), (3, 2, 0.0)]
    assert [length_class(size) for size in (1, 63, 64, 65)] == [1, 32, 64, 64]
    table = statistics_of(traces)
    assert [row[:2] for row in table["accuracy_by_length"]] == [(128, 4)]


def test_the_table_is_a_mean_an_episode_and_shares_are_over_all_episodes() -> None:
    quiet = episode(events=[], meta={"opened_docs": ["7"], "gold_docs": ["7", "8"]})
    table = statistics_of([episode(), quiet])
    assert table["n"] == 2
    assert table["reads"] == 2.0
    assert table["reads_by_children"] == 0.75
    assert table["gold_recall"] == 0.5
    assert table["parallelism"] == pytest.approx(158 / 140)
    with pytest.raises(ConfigError, match="no episodes"):
        statistics_of([])


def test_every_figure_has_an_interval_around_it_that_narrows_with_episodes() -> None:
    few = [episode(), episode(events=[])] * 3
    tables = [statistics_of(few), statistics_of(few * 40)]
    for table in tables:
        assert set(table["intervals"]) == set(table) - {
            *("n", "owned_range", "accuracy_by_hops", "accuracy_by_length", "intervals")
        }
        assert table["gold_recall"] is table["intervals"]["gold_recall"] is None
        for key, interval in table["intervals"].items():
            if interval is not None:
                assert interval[0] <= table[key] <= interval[1], key
    wide, narrow = (table["intervals"]["reads"] for table in tables)
    assert tables[0]["reads"] == tables[1]["reads"] == 2.0
    assert 0 < narrow[1] - narrow[0] < (wide[1] - wide[0]) / 3
    low, high = tables[0]["intervals"]["fork_on_first_turn"]
    assert 0.5 < low < high == 1.0, "six of six is no certainty"


def test_the_command_prints_every_figure_or_says_what_is_missing(tmp_path: Path) -> None:
    write_traces(tmp_path / "t.jsonl", [episode(meta={"hops": 2})])
    command = [sys.executable, "scripts/stats.py"]

    def run(path: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, str(path)], cwd=ROOT, capture_output=True, text=True, check=False
        )

    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    for text in ("75.0%", "1.13", "right, 2 hops, n = 1", "from 128 tokens"):
        assert text in done.stdout
    missing = run(tmp_path / "none.jsonl")
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: ")
    assert "no traces there" in missing.stderr
