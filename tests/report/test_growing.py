"""The tree of an episode while it grows."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from octopus_trl.report.growing import GrowingTree
from tests.report.large_episode import large_episode

EVENTS: list[dict[str, Any]] = [
    {"type": "fork", "thread": 0, "child": 1, "segment": 1},
    {"type": "turn", "thread": 0, "calls": [["fork", "ok"], ["open", "refused"]]},
    {"type": "wait", "thread": 0, "targets": [1]},
    {"type": "end", "thread": 1, "status": "committed", "result": "[bold]it[/bold]"},
    {"type": "turn", "thread": 1, "calls": [["commit", "ok"]]},
    {"type": "read", "thread": 0, "target": 1, "tokens": 65, "segments": [2]},
    {"type": "turn", "thread": 0, "calls": [["read_thread", "ok"]]},
]


def drawn(grown: GrowingTree) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(grown.tree)
    return console.export_text()


def test_each_event_shows_at_once_under_its_thread() -> None:
    grown, seen = GrowingTree("why [not]?"), []
    for event in EVENTS:
        grown.feed(event)
        seen.append(drawn(grown))
    assert "thread 1" in seen[0]
    assert "fork, open (refused)" in seen[1]
    assert "waits for 1" in seen[2]
    assert "thread 1 (committed)" in seen[3]
    assert "read_thread; mounts 65 tokens of thread 1" in seen[6]


def test_what_a_model_wrote_is_no_markup() -> None:
    grown = GrowingTree("why [not]?")
    for event in EVENTS:
        grown.feed(event)
    text = drawn(grown)
    assert "why [not]?" in text
    assert "commit; result [bold]it[/bold]" in text


def grown_from(*events: dict[str, Any]) -> str:
    grown = GrowingTree("q")
    for event in events:
        grown.feed(event)
    return drawn(grown)


def depths(text: str) -> dict[str, int]:
    """Give the column at which each thread's line begins."""
    lines = [line for line in text.splitlines() if "thread " in line and "mounts" not in line]
    return {line.split("thread ")[1].split()[0]: line.index("thread") for line in lines}


def test_children_hang_below_their_parent_however_deep() -> None:
    forks = [
        {"type": "fork", "thread": parent, "child": child}
        for parent, child in ((0, 1), (1, 2), (2, 3), (0, 4))
    ]
    found = depths(grown_from({"type": "turn", "thread": 0, "calls": []}, *forks))
    assert found["0"] < found["1"] == found["4"] < found["2"] < found["3"]


def test_a_rewind_a_cut_and_a_failure_say_so_and_a_turn_without_a_call_too() -> None:
    text = grown_from(
        {"type": "rewind", "thread": 0, "to": 2},
        {"type": "turn", "thread": 0, "calls": [["rewind", "ok"]]},
        {"type": "turn", "thread": 0, "calls": []},
        {"type": "fork_failed", "thread": 0, "error": "no [slot]"},
        {"type": "turn", "thread": 0, "calls": [["fork", "refused"]]},
        {"type": "restart", "thread": 0, "segment": 3},
        {"type": "end", "thread": 1, "status": "cut"},
        {"type": "end", "thread": 0, "status": "failed", "reason": "ran out of [pages]"},
    )
    for words in ("rewind; back to turn 2", "no call", "thread 1 (cut)", "thread 0 (failed)"):
        assert words in text
    assert "ran out of [pages]" in text
    assert "fork (refused); no thread was forked: no [slot]" in text
    assert "goes on from its own summary" in text


def test_a_note_belongs_to_its_own_thread_and_is_shown_once() -> None:
    text = grown_from(
        {"type": "read", "thread": 0, "target": 2, "tokens": 63},
        {"type": "turn", "thread": 1, "calls": [["search", "ok"]]},
        {"type": "turn", "thread": 0, "calls": [["read_thread", "ok"]]},
        {"type": "turn", "thread": 0, "calls": [["commit", "ok"]]},
    )
    assert text.count("mounts 63 tokens of thread 2") == 1
    assert "read_thread; mounts 63 tokens of thread 2" in text


@pytest.mark.parametrize("order", ["\x1b[2J\x1b]0;owned\x07", "\x9b31m", "\r", "\u202e"])
def test_a_terminal_takes_no_order_from_what_a_model_wrote(order: str) -> None:
    grown = GrowingTree(f"why{order}?")
    grown.feed({"type": "end", "thread": 0, "status": "committed", "result": f"it{order}!"})
    grown.feed({"type": "turn", "thread": 0, "calls": [[f"commit{order}", "ok"]]})
    text = drawn(grown)
    assert not set(order) & set("\x1b\x07\x9b\r\u202e") & set(text)
    assert "it\ufffd" in text


def test_a_long_result_is_cut_and_an_unknown_event_changes_nothing() -> None:
    end = {"type": "end", "thread": 0, "status": "committed", "result": "x" * 9000}
    turn = {"type": "turn", "thread": 0, "calls": [["commit", "ok"]]}
    text = grown_from(end, turn)
    assert 200 < text.count("x") <= 300
    assert grown_from(end, turn, {"type": "paused", "thread": 0}) == text


def test_every_thread_of_a_large_episode_is_in_the_tree_once() -> None:
    trace = large_episode(lambda text: list(range(1 + len(text) // 40)), tokens=2_000)
    forks = [
        {"type": "fork", "thread": thread.parent, "child": thread.id}
        for thread in trace.threads
        if thread.parent is not None
    ]
    found = depths(grown_from(*forks, *trace.events))
    assert sorted(map(int, found)) == [thread.id for thread in trace.threads]
