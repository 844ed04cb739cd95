"""Numbers the segments of one episode as they are written, and answers what a chain sees.

The same rules as `Trace.check` (DESIGN §2), kept up to date segment by segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from octopus_trl.trace import Segment, Trace


class Recorder:
    """The growing DAG of one episode under one position rule (see `dag.starts`)."""

    def __init__(self, position: str = "jump") -> None:
        self.segments: list[Segment] = []
        self._position = position
        self._highest: list[int] = []  # highest end over what each segment sees by mount
        self._pasted: dict[int, tuple[int, ...]] = {}

    def add(
        self,
        thread: int,
        parent: int | None,
        kind: str,
        tokens: list[int],
        *,
        mounts: Sequence[int] = (),
        pasted: Sequence[int] = (),
        logps: list[float] | None = None,
        time_s: float | None = None,
    ) -> int:
        """Append a segment and return its id; its start follows the position rule.

        Args:
            pasted: segments whose text is part of this one's, so that no reader needs it again.
        """
        start, highest = 0, 0
        if parent is not None:
            start, highest = self.segments[parent].end, self._highest[parent]
        if self._position == "jump":
            highest = max([highest, *(self.segments[mount].end for mount in mounts)])
            start = max(start, highest)
        elif self._position == "reencode":
            start += self.num_tokens(mounts)
        segment = Segment(
            id=len(self.segments),
            thread=thread,
            parent=parent,
            kind=kind,
            tokens=tokens,
            mounts=list(mounts),
            start=start,
            logps=logps,
            time_s=time_s,
        )
        self.segments.append(segment)
        self._highest.append(highest)
        if pasted:
            self._pasted[segment.id] = tuple(pasted)
        return segment.id

    def visible(self, segment: int | None) -> set[int]:
        """Give what a token after `segment` sees: the chain through it and what was read on it."""
        seen: set[int] = set()
        node = segment
        while node is not None:
            seen.add(node)
            seen.update(self.segments[node].mounts)
            seen.update(self._pasted.get(node, ()))
            node = self.segments[node].parent
        return seen

    def num_tokens(self, segments: Sequence[int]) -> int:
        """Count the tokens of these segments."""
        return sum(len(self.segments[segment].tokens) for segment in segments)

    def tokens(self, segments: Sequence[int]) -> list[int]:
        """Concatenate the tokens of these segments."""
        return [token for segment in segments for token in self.segments[segment].tokens]


def failures(traces: Sequence[Trace]) -> list[str]:
    """Say why threads failed, a line for each reason; an episode goes on without its own."""
    reasons = Counter(
        str(event.get("reason"))
        for trace in traces
        for event in trace.events
        if event.get("type") == "end" and event.get("status") == "failed"
    )
    return [
        f"{count} threads failed in {len(traces)} episodes: {reason}"
        for reason, count in reasons.most_common()
    ]
