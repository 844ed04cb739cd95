"""Parts of an episode that no edge joins: what a row's cap may take apart.

A segment belongs with its parent and with what it mounts. Roots that neither fork nor mount into
each other (a sub-agent with a fresh context, a rewritten context) may lie in different rows, and
the sum of their losses is still the loss of the episode: nothing is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octopus_trl.trace import Segment, Trace


def parts(trace: Trace) -> list[list[int]]:
    """Group the segments of an episode that edges join, in order of their first segment."""
    part_of: list[int] = []  # its part's first segment, for each segment
    for segment in trace.segments:
        joined = {part_of[m] for m in segment.mounts}
        if segment.parent is not None:
            joined.add(part_of[segment.parent])
        first = min(joined, default=segment.id)
        if len(joined) > 1:
            part_of = [first if part in joined else part for part in part_of]
        part_of.append(first)
    groups: dict[int, list[int]] = {}
    for segment_id, part in enumerate(part_of):
        groups.setdefault(part, []).append(segment_id)
    return [groups[part] for part in sorted(groups)]


def take(trace: Trace, kept: Sequence[int]) -> Trace:
    """Give the trace of some whole parts: their segments renumbered, positions as recorded.

    Args:
        kept: segment ids, ascending; the parents and mounts of each are among them.
    """
    new_id = {old: new for new, old in enumerate(kept)}
    segments: list[Segment] = []
    for old, new in new_id.items():
        segment = trace.segments[old]
        parent = None if segment.parent is None else new_id[segment.parent]
        mounts = [new_id[mount] for mount in segment.mounts]
        segments.append(replace(segment, id=new, parent=parent, mounts=mounts))
    threads = [replace(t, head=new_id.get(-1 if t.head is None else t.head)) for t in trace.threads]
    return replace(trace, segments=segments, threads=threads, events=[])
