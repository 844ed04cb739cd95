"""The tree of an episode while it grows, from its events alone."""

from __future__ import annotations

import re
from typing import Any

from rich.text import Text
from rich.tree import Tree

STYLES = {"committed": "green", "cut": "yellow", "failed": "bold red"}
# A terminal takes these as orders (colours, the title, the cursor); what a model wrote gives none.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_LONGEST = 300


class GrowingTree:
    """Threads of one episode with the calls of each turn, as a rich tree to show live.

    Args:
        question: heads the tree; shown as text whatever it holds, as is all that the model wrote.
    """

    def __init__(self, question: str) -> None:
        self.tree = Tree(printable(question, "bold"), guide_style="dim")
        self._threads: dict[int, Tree] = {}
        self._notes: dict[int, list[str]] = {}

    def feed(self, event: dict[str, Any]) -> None:
        """Take the next event of the episode; one of an unknown type changes nothing."""
        thread, kind = int(event["thread"]), event["type"]
        notes = self._notes.setdefault(thread, [])
        if kind == "fork":
            self._branch(int(event["child"]), thread)
        elif kind == "wait":
            waited = ", ".join(map(str, event["targets"]))
            self._branch(thread).add(printable(f"waits for {waited}", "dim"))
        elif kind == "read":
            notes.append(f"mounts {event['tokens']} tokens of thread {event['target']}")
        elif kind == "rewind":
            notes.append(f"back to turn {event['to']}")
        elif kind == "fork_failed":
            notes.append(f"no thread was forked: {event['error']}")
        elif kind == "restart":
            self._branch(thread).add(printable("goes on from its own summary", "dim"))
        elif kind == "end":
            branch, status = self._branch(thread), str(event["status"])
            branch.label = printable(f"thread {thread} ({status})", STYLES.get(status, ""))
            if event.get("result"):
                notes.append(f"result {event['result']}")
            elif event.get("reason"):
                branch.add(printable(str(event["reason"]), STYLES.get(status, "")))
        elif kind == "turn":
            calls = ", ".join(
                name if outcome == "ok" else f"{name} ({outcome})"
                for name, outcome in event.get("calls", [])
            )
            self._branch(thread).add(printable("; ".join([calls or "no call", *notes])))
            self._notes[thread] = []

    def _branch(self, thread: int, parent: int | None = None) -> Tree:
        if thread not in self._threads:
            above = self.tree if parent is None else self._branch(parent)
            self._threads[thread] = above.add(printable(f"thread {thread}", "cyan"))
        return self._threads[thread]


def printable(text: str, style: str = "") -> Text:
    """Give a text for a terminal: no markup, no control characters, at most 300 characters."""
    shown = _CONTROL.sub("\ufffd", text)
    return Text(shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}…", style=style)
