"""The tree of an episode while it grows, from its events alone."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.tree import Tree


class GrowingTree:
    """Threads of one episode with the calls of each turn, as a rich tree to show live.

    Args:
        question: heads the tree; shown as text whatever it holds, as is all that the model wrote.
    """

    def __init__(self, question: str) -> None:
        self.tree = Tree(escape(question))
        self._threads: dict[int, Tree] = {}
        self._notes: dict[int, list[str]] = {}

    def feed(self, event: dict[str, Any]) -> None:
        """Take the next event of the episode."""
        thread, kind = int(event["thread"]), event["type"]
        notes = self._notes.setdefault(thread, [])
        if kind == "fork":
            self._branch(int(event["child"]), thread)
        elif kind == "wait":
            self._branch(thread).add(f"waits for {', '.join(map(str, event['targets']))}")
        elif kind == "read":
            notes.append(f"mounts {event['tokens']} tokens of thread {event['target']}")
        elif kind == "rewind":
            notes.append(f"back to turn {event['to']}")
        elif kind == "end":
            branch = self._branch(thread)
            branch.label = escape(f"thread {thread} ({event['status']})")
            if event.get("result"):
                notes.append(f"result {event['result']}")
            elif event.get("reason"):
                branch.add(escape(str(event["reason"])))
        elif kind == "turn":
            calls = ", ".join(
                name if outcome == "ok" else f"{name} ({outcome})"
                for name, outcome in event.get("calls", [])
            )
            self._branch(thread).add(escape("; ".join([calls or "no call", *notes])))
            self._notes[thread] = []

    def _branch(self, thread: int, parent: int | None = None) -> Tree:
        if thread not in self._threads:
            above = self.tree if parent is None else self._branch(parent)
            self._threads[thread] = above.add(f"thread {thread}")
        return self._threads[thread]
