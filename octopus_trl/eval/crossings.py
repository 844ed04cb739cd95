"""Crossings of recorded episodes: what would a thread have done had it read its sibling.

Two threads that one turn forked work side by side and read nobody. Where one goes on with a turn of
its own, a read of the other is put in: the recorded turn is the reader's own continuation, the
other's turn at the same place the sibling's. Nothing is sampled, so that any policy's episodes tell
how far a read moves it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from octopus_trl.eval.extra_kv import PASTES
from octopus_trl.eval.readings import Crossing
from octopus_trl.maths import dag
from octopus_trl.trace import Segment, Trace


def crossings_of(traces: Sequence[Trace], *, seed: int = 0) -> list[Crossing]:
    """Give one crossing an episode that has any, drawn from them.

    The sibling is read as it stands just before its own turn there, with the tool text that it was
    given; the reader has the tool text of its own turn still to be told, where the read takes
    effect.
    """
    draw = random.Random(f"crossings-{seed}")
    found = []
    for trace in traces:
        if possible := list(_crossings(trace)):
            found.append(draw.choice(possible))
    return found


def _crossings(trace: Trace) -> Iterator[Crossing]:
    reads = _reads(trace)
    chains = {thread.id: _chain(trace, thread.id, reads) for thread in trace.threads}
    pairs = [
        (reader, sibling)
        for reader, own in chains.items()
        for sibling, other in chains.items()
        if reader != sibling and own and other and own[0].parent == other[0].parent is not None
    ]
    for reader, sibling in pairs:
        own, other = chains[reader], chains[sibling]
        fork = own[0].parent
        assert fork is not None, "pairs have a fork"
        if not reads.isdisjoint(dag.ancestors(trace.parents, own[0].id)):
            continue
        prompt, _ = trace.linearize(fork)
        for turn in range(1, min(_turns(own), _turns(other))):
            at, there = _place(own, turn), _place(other, turn)
            if own[at - 1].kind != "tool" or at < 2:
                continue
            if own[at].tokens == other[there].tokens:
                continue  # both would say the same, nobody could be hijacked
            yield Crossing(
                id=f"{trace.episode_id}-{reader}-{sibling}-{turn}",
                prompt=tuple(prompt),
                sibling=_text(other[:there]),
                own=_text(own[: at - 1]),
                question=(),
                answer=(),
                own_next=tuple(own[at].tokens),
                cue=tuple(own[at - 1].tokens),
                sibling_next=tuple(other[there].tokens),
            )


def _chain(trace: Trace, thread: int, reads: set[int]) -> list[Segment]:
    """Give a forked thread's live segments since its fork up to its first read."""
    node = trace.threads[thread].head
    chain: list[Segment] = []
    while node is not None and trace.segments[node].thread == thread:
        chain.append(trace.segments[node])
        node = trace.segments[node].parent
    if node is None:
        return []
    chain.reverse()
    read = next((at for at, segment in enumerate(chain) if segment.id in reads), len(chain))
    return chain[:read]


def _reads(trace: Trace) -> set[int]:
    """Give the segments that another thread's text came in with: by a mount, or pasted."""
    pasting: set[int] = set()
    if trace.exchange in PASTES:
        pasting = {
            event["segment"]
            for event in trace.events
            if event.get("type") == "turn" and ["read_thread", "ok"] in map(list, event["calls"])
        }
    return {
        segment.id
        for segment in trace.segments
        if segment.mounts
        or (
            segment.kind == "tool"
            and segment.parent in pasting
            and trace.segments[segment.parent].thread == segment.thread
        )
    }


def _turns(chain: Sequence[Segment]) -> int:
    return sum(segment.kind == "action" for segment in chain)


def _place(chain: Sequence[Segment], turn: int) -> int:
    """Give the index of a chain's turn, counted from 0."""
    return [at for at, segment in enumerate(chain) if segment.kind == "action"][turn]


def _text(chain: Sequence[Segment]) -> tuple[int, ...]:
    return tuple(token for segment in chain for token in segment.tokens)
