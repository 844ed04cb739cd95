"""The tree of an episode while it grows."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from octopus_trl.report.growing import GrowingTree, Tail
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


def lines_of(*events: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    grown = GrowingTree("q", lines.append)
    for event in events:
        grown.feed(event)
    return lines


def test_lines_say_what_the_tree_says_indented_by_depth() -> None:
    lines = lines_of(
        {"type": "fork", "thread": 0, "child": 1, "task": "find [it]"},
        {"type": "fork", "thread": 1, "child": 2},
        *EVENTS[1:],
        {"type": "end", "thread": 2, "status": "cut", "reason": "turns"},
    )
    assert lines == [
        "  thread 1 forked by thread 0: find [it]",
        "    thread 2 forked by thread 1",
        "thread 0: fork, open (refused)",
        "thread 0: waits for 1",
        "  thread 1: commit; result [bold]it[/bold]",
        "thread 0: read_thread; mounts 65 tokens of thread 1",
        "    thread 2 cut: its turns are used up",
    ]


def test_no_text_of_a_model_makes_a_line_of_its_own() -> None:
    task = "a\nthread 0 committed\r\u2028b\x1b[2J" + "x" * 9000
    (line,) = lines_of({"type": "fork", "thread": 0, "child": 1, "task": task})
    assert line.startswith("  thread 1 forked by thread 0: a thread 0 committed b\ufffd[2J")
    assert len(line.splitlines()) == 1
    assert len(line) < 310


def test_what_was_searched_for_and_opened_stands_with_the_call() -> None:
    calls = [["search", "ok"], ["fork", "ok"], ["open", "failed"], ["search", "ok"]]
    given = [
        {"query": "north\x9bgate"},
        None,
        {"docid": "VQF", "page": 2},
        {"query": "y" * 500},
    ]
    event = {"type": "turn", "thread": 0, "calls": calls, "arguments": given}
    (line,) = lines_of(event)
    assert line.startswith('thread 0: search("north\ufffdgate"), fork, open("VQF", 2) (failed), ')
    assert line.count("y") == 79
    assert 'open("VQF", 2) (failed)' in grown_from(event).replace("\n", " ")


def test_a_thread_keeps_its_task_when_it_ends() -> None:
    text = grown_from(
        {"type": "fork", "thread": 0, "child": 1, "task": "find it"},
        {"type": "end", "thread": 1, "status": "cut", "reason": "turns"},
    )
    assert "thread 1 (cut): find it" in text


@pytest.mark.parametrize(("whole", "first"), [(False, "turn 29"), (True, "q")])
def test_a_small_screen_shows_the_last_lines_until_all_are_wanted(whole: bool, first: str) -> None:
    grown = GrowingTree("q")
    for number in range(1, 33):
        grown.feed({"type": "turn", "thread": 0, "calls": [[f"turn {number}", "ok"]]})
    tail = Tail(grown.tree)
    tail.whole = whole
    console = Console(width=60, height=5, record=True, file=io.StringIO())
    console.print(tail)
    lines = console.export_text().splitlines()
    assert lines[0].endswith(first)
    assert lines[-1].endswith("turn 32")
    assert len(lines) == (34 if whole else 4)


def test_every_thread_of_a_large_episode_is_in_the_tree_once() -> None:
    trace = large_episode(lambda text: list(range(1 + len(text) // 40)), tokens=2_000)
    forks = [
        {"type": "fork", "thread": thread.parent, "child": thread.id}
        for thread in trace.threads
        if thread.parent is not None
    ]
    found = depths(grown_from(*forks, *trace.events))
    assert sorted(map(int, found)) == [thread.id for thread in trace.threads]
