"""What episodes did: branching, reading, what was explored, how far work ran side by side.

Pure functions of traces. The paper names these figures and not their formulas, so each formula here
is ours and stands in its docstring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octopus_trl.errors import ConfigError
from octopus_trl.eval.intervals import ratio, share, wilson_interval
from octopus_trl.maths import dag
from octopus_trl.trace import Trace

GOLD, OPENED = "gold_docs", "opened_docs"  # keys of a trace's meta, lists of docids
HOPS = ("hops", "branches")  # keys of a trace's meta, the first that is there counts


@dataclass(frozen=True, slots=True)
class EpisodeFigures:
    """The figures of one episode; lengths in tokens.

    Attributes:
        forked_first: see `forks_on_first_turn`.
        reads, child_reads, rewinds, child_rewinds: see `work_of_children`.
        owned: sampled tokens of the tree, left branches counted (the Z of the paper's 1/Z).
        mounts, mounts_ahead: see `count_mounts`.
        prompts: see `active_prompts`.
        explored, surviving: see `explored_tokens`.
        critical: see `critical_path`; `explored` is its serial length.
        gold_recall: see `gold_recall`.
        hops: hops, else branches, that the question needs, where the trace's meta says so.
    """

    reward: float | None
    forked_first: bool
    reads: int
    child_reads: int
    rewinds: int
    child_rewinds: int
    owned: int
    mounts: int
    mounts_ahead: int
    prompts: list[int]
    explored: int
    surviving: int
    critical: int
    gold_recall: float | None
    hops: int | None


def figures_of(trace: Trace) -> EpisodeFigures:
    """Measure one episode."""
    hops = next((trace.meta[key] for key in HOPS if trace.meta.get(key) is not None), None)
    return EpisodeFigures(
        trace.reward,
        forks_on_first_turn(trace),
        *work_of_children(trace),
        trace.num_owned,
        *count_mounts(trace),
        active_prompts(trace),
        *explored_tokens(trace),
        critical_path(trace),
        gold_recall(trace.meta.get(OPENED), trace.meta.get(GOLD)),
        None if hops is None else int(hops),
    )


def forks_on_first_turn(trace: Trace) -> bool:
    """Whether a thread was forked at the end of a root's first turn.

    A child's first segment continues its parent's action segment of the turn that forked it; a
    child that never wrote a token is found by its `fork` event.
    """
    roots = {thread.id for thread in trace.threads if thread.parent is None}
    first: dict[int, int] = {}
    for segment in trace.segments:
        if segment.kind == "action" and segment.thread in roots:
            first.setdefault(segment.thread, segment.id)
    turns = set(first.values())
    grown = any(
        segment.parent in turns and segment.thread != trace.segments[segment.parent].thread
        for segment in trace.segments
        if segment.parent is not None
    )
    return grown or any(
        event.get("type") == "fork" and event.get("segment") in turns for event in trace.events
    )


def work_of_children(trace: Trace) -> tuple[int, int, int, int]:
    """Count pages read and rewinds: all, and those of threads that were forked.

    A page read is an `open` that was carried out; a rewind counts where it took effect.

    Returns:
        reads, reads of children, rewinds, rewinds of children.
    """
    children = {thread.id for thread in trace.threads if thread.parent is not None}
    reads = child_reads = rewinds = child_rewinds = 0
    for event in trace.events:
        by_child = event.get("thread") in children
        if event.get("type") == "turn":
            opened = sum(call == ["open", "ok"] for call in map(list, event.get("calls", [])))
            reads += opened
            child_reads += opened * by_child
        elif event.get("type") == "rewind":
            rewinds += 1
            child_rewinds += by_child
    return reads, child_reads, rewinds, child_rewinds


def count_mounts(trace: Trace) -> tuple[int, int]:
    """Count the mounts, and those whose source ends past the reader's next position.

    A mount is a pair of a segment and a thread whose segments became readable before it: one a
    `read_thread` that found something new and whose text was given to the reader; a read that a
    rewind or the end of the episode overtook is none. A source is ahead where a segment of the span
    ends past the end of the reader's parent segment, so that Eq. 2 makes the reader jump.

    Returns:
        mounts, mounts of sources that are ahead.
    """
    num = ahead = 0
    for segment in trace.segments:
        here = 0 if segment.parent is None else trace.segments[segment.parent].end
        ends: dict[int, int] = {}
        for mount in segment.mounts:
            source = trace.segments[mount]
            ends[source.thread] = max(ends.get(source.thread, 0), source.end)
        num += len(ends)
        ahead += sum(end > here for end in ends.values())
    return num, ahead


def active_prompts(trace: Trace) -> list[int]:
    """Count, for each turn, the tokens that its first sampled token sees: chain and mounts."""
    actions = [segment.id for segment in trace.segments if segment.kind == "action"]
    if not actions:
        return []
    sees = dag.visible_matrix(trace.parents, trace.mounts)[actions]
    return [int(count) for count in sees @ np.asarray(trace.lengths, dtype=np.int64)]


def explored_tokens(trace: Trace) -> tuple[int, int]:
    """Count the unique tokens of all segments, and of those that no rewind left behind.

    A segment survives where its thread's head descends from it or is it. A thread without a head
    keeps all of its own; a child that was forked on a left branch keeps its own, not its parent's.

    Returns:
        gross, surviving.
    """
    left = rewound_segments(trace)
    lengths = trace.lengths
    return sum(lengths), sum(lengths) - sum(lengths[segment] for segment in left)


def rewound_segments(trace: Trace) -> set[int]:
    """Give the segments that a rewind left behind: off their thread's live chain, under its root.

    A context that a thread left for a new root, as one that summarises does, was not rewound.
    """
    root_of: list[int] = []
    for segment in trace.segments:
        root_of.append(segment.id if segment.parent is None else root_of[segment.parent])
    roots = {thread.id: root_of[thread.head] for thread in trace.threads if thread.head is not None}
    return {
        segment
        for segment in left_segments(trace)
        if root_of[segment] == roots[trace.segments[segment].thread]
    }


def left_segments(trace: Trace) -> set[int]:
    """Give the segments that are not on the live chain of their own thread, if it has one."""
    live: set[int] = set()
    heads = {thread.id: thread.head for thread in trace.threads}
    for thread, head in heads.items():
        node = head
        while node is not None and trace.segments[node].thread == thread:
            live.add(node)
            node = trace.segments[node].parent
    return {
        segment.id
        for segment in trace.segments
        if segment.id not in live and heads.get(segment.thread) is not None
    }


def critical_path(trace: Trace) -> int:
    """Give the tokens of the longest chain of segments that had to come one after another.

    depth(s) = |s| + max depth over what s waited for: its parent, the segment that its thread
    wrote before (also across a rewind), its mounts, and after a `wait` event the last segments of
    the awaited threads; the critical path is the largest depth. Threads that ran side by side
    count once, so serial length (all unique tokens) over it is what branching could save. A wait
    that found its threads ended leaves no event and adds nothing.
    """
    awaited = _awaited(trace)
    depth: list[int] = []
    last: dict[int, int] = {}
    for segment in trace.segments:
        before = [*segment.mounts]
        if segment.parent is not None:
            before.append(segment.parent)
        if (previous := last.get(segment.thread)) is not None:
            before.append(previous)
            before += [last[thread] for thread in awaited.get(previous, ()) if thread in last]
        depth.append(len(segment.tokens) + max((depth[s] for s in before), default=0))
        last[segment.thread] = segment.id
    return max(depth)


def gold_recall(opened: Sequence[str] | None, gold: Sequence[str] | None) -> float | None:
    """Give the share of gold documents that were opened, None where either list is not known.

    >>> gold_recall(["a", "c"], ["a", "b"])
    0.5
    """
    if opened is None or not gold:
        return None
    wanted = set(map(str, gold))
    return len(wanted & set(map(str, opened))) / len(wanted)


def accuracy_by(
    figures: Iterable[EpisodeFigures], key: Callable[[EpisodeFigures], Any]
) -> list[tuple[Any, int, float, tuple[float, float]]]:
    """Group graded episodes and give each group's accuracy.

    Returns:
        key, n, accuracy, its 95 % Wilson interval, in ascending order of keys; episodes without a
        reward or a key are left out.
    """
    groups: dict[Any, list[bool]] = {}
    for one in figures:
        name = key(one)
        if name is not None and one.reward is not None:
            groups.setdefault(name, []).append(one.reward == 1.0)
    return [
        (name, len(right), sum(right) / len(right), wilson_interval(sum(right), len(right)))
        for name, right in sorted(groups.items())
    ]


def length_class(num_tokens: int) -> int:
    """Give the lower bound of a length's class: the largest power of two that it reaches.

    >>> length_class(1023), length_class(1024)
    (512, 1024)
    """
    return 1 << max(num_tokens.bit_length() - 1, 0)


# key of `statistics_of` -> what it adds up over episodes, and what that is divided by
RATIOS: dict[str, tuple[Callable[[EpisodeFigures], float], Callable[[EpisodeFigures], float]]] = {
    "reads": (lambda one: one.reads, lambda one: 1),
    "reads_by_children": (lambda one: one.child_reads, lambda one: one.reads),
    "rewinds": (lambda one: one.rewinds, lambda one: 1),
    "rewinds_by_children": (lambda one: one.child_rewinds, lambda one: one.rewinds),
    "mounts": (lambda one: one.mounts, lambda one: 1),
    "mounts_ahead": (lambda one: one.mounts_ahead, lambda one: one.mounts),
    "owned": (lambda one: one.owned, lambda one: 1),
    "active_prompt": (lambda one: sum(one.prompts), lambda one: len(one.prompts)),
    "explored": (lambda one: one.explored, lambda one: 1),
    "surviving": (lambda one: one.surviving, lambda one: 1),
    "critical_path": (lambda one: one.critical, lambda one: 1),
    "parallelism": (lambda one: one.explored, lambda one: one.critical),
    "gold_recall": (lambda one: one.gold_recall or 0, lambda one: one.gold_recall is not None),
}


def statistics_of(traces: Iterable[Trace]) -> dict[str, Any]:
    """Reduce episodes to the table of the paper's behaviour section.

    Shares are over all episodes together; lengths, mounts and recall are means an episode,
    `active_prompt` a mean a turn. `parallelism` is the sum of serial lengths over the sum of
    critical paths. `intervals` holds the 95 % interval of each: Wilson's for the share of episodes
    that fork first, else the bootstrap over episodes; None where a figure is.

    Raises:
        ConfigError: no episode.
    """
    figures = [figures_of(trace) for trace in traces]
    if not figures:
        raise ConfigError("no episodes: give traces with at least one whole line")
    estimates = {"fork_on_first_turn": share([one.forked_first for one in figures])}
    for key, (part, whole) in RATIOS.items():
        estimates[key] = ratio([part(one) for one in figures], [whole(one) for one in figures])
    return {
        "n": len(figures),
        **{key: estimate.value for key, estimate in estimates.items()},
        "owned_range": [min(one.owned for one in figures), max(one.owned for one in figures)],
        "accuracy_by_hops": accuracy_by(figures, lambda one: one.hops),
        "accuracy_by_length": accuracy_by(figures, lambda one: length_class(one.explored)),
        "intervals": {
            key: None if estimate.interval is None else list(estimate.interval)
            for key, estimate in estimates.items()
        },
    }


def _awaited(trace: Trace) -> dict[int, set[int]]:
    """Give the threads that were waited for right after a turn's action segment."""
    pending: dict[int, set[int]] = {}
    awaited: dict[int, set[int]] = {}
    for event in trace.events:
        thread = event.get("thread")
        if event.get("type") == "wait" and isinstance(thread, int):
            pending.setdefault(thread, set()).update(event.get("targets", ()))
        elif event.get("type") == "turn" and thread in pending:
            segment = event.get("segment")
            if isinstance(segment, int):
                awaited.setdefault(segment, set()).update(pending.pop(thread))
    return awaited
