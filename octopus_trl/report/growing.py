"""The tree of an episode while it grows, from its events alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.text import Text
from rich.tree import Tree

STYLES = {"committed": "green", "cut": "yellow", "failed": "bold red"}
# A terminal takes these as orders (colours, the title, the cursor); what a model wrote gives none.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# What a thread's end is on the record, in words.
_REASONS = {"turns": "its turns are used up", "tokens": "its window is used up"}
_LONGEST = 300
_LONGEST_ARGUMENT = 80


class GrowingTree:
    """Threads of one episode with the calls of each turn: a rich tree to show live, and lines.

    Args:
        question: heads the tree; shown as text whatever it holds, as is all that the model wrote.
        say: given each line that the tree gains, indented by the depth of its thread.
    """

    def __init__(self, question: str, say: Callable[[str], None] | None = None) -> None:
        self.tree = Tree(printable(question, "bold"), guide_style="dim")
        self._say = say
        self._threads: dict[int, Tree] = {}
        self._depths: dict[int, int] = {}
        self._tasks: dict[int, str] = {}
        self._notes: dict[int, list[str]] = {}

    def feed(self, event: dict[str, Any]) -> None:
        """Take the next event of the episode; one of an unknown type changes nothing."""
        thread, kind = int(event["thread"]), event["type"]
        notes = self._notes.setdefault(thread, [])
        if kind == "fork":
            child, task = int(event["child"]), str(event.get("task", ""))
            self._tasks[child] = task
            self._branch(child, thread)
            self._tell(child, f"thread {child} forked by thread {thread}{_after(task)}")
        elif kind == "wait":
            self._add(thread, f"waits for {', '.join(map(str, event['targets']))}", "dim")
        elif kind == "read":
            notes.append(f"mounts {event['tokens']} tokens of thread {event['target']}")
        elif kind == "rewind":
            notes.append(f"back to turn {event['to']}")
        elif kind == "fork_failed":
            notes.append(f"no thread was forked: {event['error']}")
        elif kind == "restart":
            self._add(thread, "goes on from its own summary", "dim")
        elif kind == "end":
            self._end(thread, event)
        elif kind == "turn":
            self._notes[thread] = []
            self._add(thread, "; ".join([", ".join(_calls(event)) or "no call", *notes]))

    def _end(self, thread: int, event: dict[str, Any]) -> None:
        branch, status = self._branch(thread), str(event["status"])
        style, reason = STYLES.get(status, ""), reason_of(event)
        task = self._tasks.get(thread, "")
        branch.label = printable(f"thread {thread} ({status}){_after(task)}", style)
        if event.get("result"):  # the turn that committed it comes next, and says it
            self._notes[thread].append(f"result {event['result']}")
            return
        if reason:
            branch.add(printable(reason, style))
        self._tell(thread, f"thread {thread} {status}{_after(reason)}")

    def _add(self, thread: int, text: str, style: str = "") -> None:
        self._branch(thread).add(printable(text, style))
        self._tell(thread, f"thread {thread}: {text}")

    def _tell(self, thread: int, text: str) -> None:
        if self._say is not None:
            line = printable(" ".join(text.split())).plain
            self._say("  " * self._depths.get(thread, 0) + line)

    def _branch(self, thread: int, parent: int | None = None) -> Tree:
        if thread not in self._threads:
            above = self.tree if parent is None else self._branch(parent)
            self._depths[thread] = 0 if parent is None else self._depths[parent] + 1
            label = f"thread {thread}{_after(self._tasks.get(thread, ''))}"
            self._threads[thread] = above.add(printable(label, "cyan"))
        return self._threads[thread]


class Tail:
    """The lines of a tree that fit a screen: its last ones, and all of them once `whole` is set."""

    def __init__(self, tree: Tree) -> None:
        self.whole = False
        self._tree = tree

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Give the lines to draw."""
        lines = console.render_lines(self._tree, options.update(height=None), pad=False)
        for line in lines if self.whole else lines[-max(console.height - 1, 1) :]:
            yield from line
            yield Segment.line()


def reason_of(event: dict[str, Any]) -> str:
    """Say why a thread ended without a result."""
    reason = str(event.get("reason") or "")
    return _REASONS.get(reason, reason)


def tame(text: str) -> str:
    """Give a text without the characters that a terminal would obey; lines and tabs stay."""
    return _CONTROL.sub("\ufffd", text)


def printable(text: str, style: str = "") -> Text:
    """Give a text for a terminal: no markup, no control characters, at most 300 characters."""
    shown = tame(text)
    return Text(shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…", style=style)


def _calls(event: dict[str, Any]) -> Iterator[str]:
    """Write each call of a turn with what it asked the corpus for, and how it ended if not well."""
    calls = event.get("calls", [])
    arguments = event.get("arguments") or [None] * len(calls)
    for (name, outcome), given in zip(calls, arguments, strict=False):
        values = (json.dumps(value, ensure_ascii=False) for value in (given or {}).values())
        inside = ", ".join(
            text if len(text) <= _LONGEST_ARGUMENT else f"{text[:_LONGEST_ARGUMENT]}…"
            for text in values
        )
        said = f"{name}({inside})" if inside else str(name)
        yield said if outcome == "ok" else f"{said} ({outcome})"


def _after(text: str) -> str:
    return f": {text}" if text else ""
