"""The tree of an episode while it grows."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from octopus_trl.report.growing import GrowingTree

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
