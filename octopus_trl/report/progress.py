"""How far a script is: a bar for each stage on a terminal, else a line now and then."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

TELL_EVERY_S = 15.0


class StageBars(Progress):
    """Shows on stderr, between `with` and its end, how far each stage is and the time left.

    Args:
        amount: the column between bar and time; done/all if not given.
        tell_ends: without a terminal, print a line at the end of a stage, however short it was.
    """

    def __init__(self, amount: ProgressColumn | None = None, *, tell_ends: bool = False) -> None:
        console = Console(stderr=True)
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            amount or MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tell_ends = tell_ends
        self._told = time.monotonic()
        self._stages: dict[str, tuple[TaskID, float, int]] = {}

    def tell(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Move a stage; its first call starts its clock, what was done before takes no time.

        Args:
            stage: names the bar.
            done: units so far.
            total: units in all.
            note: stands behind the name and may change.
        """
        now = time.monotonic()
        if stage not in self._stages:
            task = self.add_task(stage, total=total, completed=done)
            self._stages[stage] = task, now, done
        task, began, first = self._stages[stage]
        self.update(task, completed=done, total=total, description=_joined(stage, note))
        due = now - self._told >= TELL_EVERY_S or (self._tell_ends and done >= total)
        if self.disable and due:
            self._told = now
            left = (now - began) / max(done - first, 1) * (total - done)
            known = f"{left:.0f} s left" if done > first else ""
            self.console.out(_joined(f"{stage} {done:,}/{total:,}", note, known), highlight=False)


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))
