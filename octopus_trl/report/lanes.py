"""Where each segment of an episode is drawn, and who shares it: plain integers of a trace."""

from __future__ import annotations

from dataclasses import dataclass

from octopus_trl.eval.trace_statistics import left_segments, rewound_segments
from octopus_trl.trace import Segment, Trace


@dataclass(frozen=True, slots=True)
class Lanes:
    """The rows of a drawing.

    Attributes:
        rows: row of each segment; a thread's first row is its live chain, its left branches follow.
        first_row: row of each thread that has a segment.
        num_rows: rows in all.
        rewound: segments that a rewind left behind.
        heirs: for each segment the other threads that continue it (they share its pages).
        readers: for each segment the threads that mounted it.
    """

    rows: list[int]
    first_row: dict[int, int]
    num_rows: int
    rewound: set[int]
    heirs: list[list[int]]
    readers: list[list[int]]


def lay_out(trace: Trace) -> Lanes:
    """Place every segment: a lane a thread, children below their parent, a row a branch there."""
    left, rewound = left_segments(trace), rewound_segments(trace)
    heirs, readers = sharers(trace)
    rows = [0] * len(trace.segments)
    first_row: dict[int, int] = {}
    top = 0
    written: dict[int, list[Segment]] = {}
    for segment in trace.segments:
        written.setdefault(segment.thread, []).append(segment)
    for thread in _in_tree_order(trace):
        own = written.get(thread)
        if own is None:
            continue
        first_row[thread] = top
        ends: list[int] = [0]  # position up to which each row of this lane is taken
        for segment in own:
            if segment.id not in left:
                rows[segment.id] = top
                ends[0] = max(ends[0], segment.end)
        for segment in own:
            if segment.id not in left:
                continue
            above = segment.parent
            row = rows[above] - top if above is not None and above in left else None
            if row is None or row < 1 or ends[row] > segment.start:
                free = (at for at in range(1, len(ends)) if ends[at] <= segment.start)
                row = next(free, len(ends))
            if row == len(ends):
                ends.append(0)
            ends[row] = segment.end
            rows[segment.id] = top + row
        top += len(ends)
    return Lanes(rows, first_row, top, rewound, heirs, readers)


def _in_tree_order(trace: Trace) -> list[int]:
    """Give the threads as a tree is read: each before its children, those in order of their ids."""
    below: dict[int | None, list[int]] = {}
    for thread in trace.threads:
        below.setdefault(thread.parent, []).append(thread.id)
    order: list[int] = []
    waiting = below.get(None, [])[::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += below.get(order[-1], [])[::-1]
    return order


def sharers(trace: Trace) -> tuple[list[list[int]], list[list[int]]]:
    """Give the threads that continue, and those that mounted, each segment; its own left out."""
    num = len(trace.segments)
    below: list[set[int]] = [set() for _ in range(num)]
    mounted: list[set[int]] = [set() for _ in range(num)]
    for segment in reversed(trace.segments):
        below[segment.id].add(segment.thread)
        if segment.parent is not None:
            below[segment.parent] |= below[segment.id]
        for mount in segment.mounts:
            mounted[mount] |= below[segment.id]
    heirs = [
        sorted(threads - {segment.thread})
        for threads, segment in zip(below, trace.segments, strict=True)
    ]
    readers = [
        sorted(threads - {segment.thread} - below[segment.id])
        for threads, segment in zip(mounted, trace.segments, strict=True)
    ]
    return heirs, readers
