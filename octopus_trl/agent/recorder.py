"""Numbers the segments of one episode as they are written, and answers what a chain sees.

The same rules as `Trace.check` (DESIGN §2), kept up to date segment by segment.
"""

from __future__ import annotations

from collections.abc import Sequence

from octopus_trl.trace import Segment


class Recorder:
    """The growing DAG of one episode under the position rule `jump`."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._highest: list[int] = []  # highest end over what each segment sees by mount

    def add(
        self,
        thread: int,
        parent: int | None,
        kind: str,
        tokens: list[int],
        *,
        mounts: Sequence[int] = (),
        logps: list[float] | None = None,
        time_s: float | None = None,
    ) -> int:
        """Append a segment and return its id; its start follows paper Eq. 2."""
        end, highest = 0, 0
        if parent is not None:
            end, highest = self.segments[parent].end, self._highest[parent]
        for mount in mounts:
            highest = max(highest, self.segments[mount].end)
        segment = Segment(
            id=len(self.segments),
            thread=thread,
            parent=parent,
            kind=kind,
            tokens=tokens,
            mounts=list(mounts),
            start=max(end, highest),
            logps=logps,
            time_s=time_s,
        )
        self.segments.append(segment)
        self._highest.append(highest)
        return segment.id

    def visible(self, segment: int | None) -> set[int]:
        """Give what a token after `segment` sees: the chain through it and every mount on it."""
        seen: set[int] = set()
        node = segment
        while node is not None:
            seen.add(node)
            seen.update(self.segments[node].mounts)
            node = self.segments[node].parent
        return seen

    def num_tokens(self, segments: Sequence[int]) -> int:
        """Count the tokens of these segments."""
        return sum(len(self.segments[segment].tokens) for segment in segments)
