"""One episode with and without each of its branches, on the host.

A branch is a forked thread. Leaving branch b out drops every mount of a segment that b or a thread
below it wrote (DESIGN §5); texts, tree edges and recorded positions stay. Only what comes after a
dropped mount is computed otherwise, so all versions of an episode fit one trace: the segments that
the answer depends on, once, and a copy of those that a branch's absence changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octopus_trl.trace import Segment, ThreadRecord, Trace

# Where the committed text begins, in the two formats of `agent.calls`.
_XML_RESULT = re.compile(r"<parameter=result>\n?")
_JSON_RESULT = re.compile(r'"result"\s*:\s*"')


@dataclass(slots=True)
class Counterfactual:
    """An episode's answer in every version of the episode, as one trace to be scored.

    Attributes:
        trace: only the answers' tokens are `action`.
        answers: segment of the answer without each branch that changes it; None keys the answer
            of the episode as it was.
    """

    trace: Trace
    answers: dict[int | None, int] = field(default_factory=dict)


def branches_of(trace: Trace) -> list[int]:
    """List the forked threads that sampled a token."""
    writers = {segment.thread for segment in trace.segments if segment.kind == "action"}
    return [t.id for t in trace.threads if t.parent is not None and t.id in writers]


def below(trace: Trace, branch: int) -> set[int]:
    """Give a thread and all that descend from it."""
    found = {branch}
    while True:
        more = {t.id for t in trace.threads if t.parent in found} - found
        if not more:
            return found
        found |= more


def commit_of(trace: Trace) -> Segment | None:
    """Give the turn that committed the episode's answer, None where there is none."""
    if not trace.threads or trace.threads[0].status != "committed":
        return None
    head = trace.threads[0].head
    if head is None or trace.segments[head].kind != "action":
        return None
    return trace.segments[head]


def changed_segments(trace: Trace, branch: int) -> set[int]:
    """List the segments whose computation differs where a branch's mounts are dropped.

    Those that mounted it, what continues them, and what mounted any of these.
    """
    lost = _written_below(trace, branch)
    changed: set[int] = set()
    for segment in trace.segments:
        if segment.parent in changed or any(m in lost or m in changed for m in segment.mounts):
            changed.add(segment.id)
    return changed


def read_branches(trace: Trace) -> list[int]:
    """List the branches without which the root would have committed after other text."""
    commit = commit_of(trace)
    if commit is None or commit.parent is None:
        return []
    return [b for b in branches_of(trace) if commit.parent in changed_segments(trace, b)]


def turns_after_reading(trace: Trace, branch: int) -> set[int]:
    """List the root's turns that come after its first mount of what a branch wrote or taught."""
    changed = changed_segments(trace, branch)
    return {
        segment.id
        for segment in trace.segments
        if segment.id in changed
        and segment.kind == "action"
        and trace.threads[segment.thread].parent is None
    }


def counterfactual(trace: Trace, lead: Sequence[int], answer: Sequence[int]) -> Counterfactual:
    """Put an answer in place of the root's commit, after the whole episode and without branches.

    Args:
        trace: an episode whose root has committed.
        lead: tokens of the committing turn before the answer.
        answer: at least one token.
    """
    commit = commit_of(trace)
    assert commit is not None, "the root has committed"
    assert commit.parent is not None, "a commit follows a prompt"
    made = Counterfactual(
        Trace(
            f"{trace.episode_id} (credit)",
            trace.prompt_id,
            policy_version=trace.policy_version,
            threads=[ThreadRecord(thread.id, thread.parent) for thread in trace.threads],
            exchange=trace.exchange,
            position=trace.position,
            mount_layers=trace.mount_layers,
        )
    )
    base = _copy(trace, made.trace, _needed(trace, commit.parent, set()), {}, set())
    made.answers[None] = _append_answer(made.trace, commit, base[commit.parent], lead, answer)
    for branch in read_branches(trace):
        lost = _written_below(trace, branch)
        changed = changed_segments(trace, branch) & _needed(trace, commit.parent, lost)
        places = {**base, **_copy(trace, made.trace, changed, base, lost)}
        end = places[commit.parent]
        made.answers[branch] = _append_answer(made.trace, commit, end, lead, answer)
    return made


def answer_place(
    tokens: Sequence[int],
    gold: str,
    *,
    decode: Callable[[Sequence[int]], str],
    encode: Callable[[str], Sequence[int]],
) -> tuple[list[int], list[int]] | None:
    """Cut a committing turn before its result and spell a gold answer there.

    Args:
        decode: gives text with every control token shown.
        encode: encodes plain text.
    Returns:
        Tokens before the answer, and the answer's; None where no result is found. Where a token
        spans the border its text before the border is spelled again, as part of the answer.
    """
    text = decode(tokens)
    places = [(m.end(), m.re is _JSON_RESULT) for m in _XML_RESULT.finditer(text)]
    places += [(m.end(), m.re is _JSON_RESULT) for m in _JSON_RESULT.finditer(text)]
    if not places or not gold:
        return None
    border, is_json = max(places)
    lead, before = len(tokens), text
    while lead and (len(before) > border or not text.startswith(before)):
        lead -= 1
        before = decode(tokens[:lead])
    spelled = json.dumps(gold, ensure_ascii=False)[1:-1] if is_json else gold
    answer = list(encode(text[len(before) : border] + spelled))
    return (list(tokens[:lead]), answer) if answer else None


def _written_below(trace: Trace, branch: int) -> set[int]:
    threads = below(trace, branch)
    return {segment.id for segment in trace.segments if segment.thread in threads}


def _needed(trace: Trace, end: int, lost: set[int]) -> set[int]:
    """List what the state after a segment depends on, mounts of lost segments dropped."""
    needed: set[int] = set()
    todo = [end]
    while todo:
        segment = trace.segments[todo.pop()]
        if segment.id in needed:
            continue
        needed.add(segment.id)
        todo += [mount for mount in segment.mounts if mount not in lost]
        if segment.parent is not None:
            todo.append(segment.parent)
    return needed


def _copy(
    trace: Trace, into: Trace, wanted: set[int], places: dict[int, int], lost: set[int]
) -> dict[int, int]:
    """Append copies of segments and say where each went; edges follow `places` and the copies."""
    copies: dict[int, int] = {}
    for index in sorted(wanted):
        segment = trace.segments[index]
        where = {**places, **copies}
        copies[index] = len(into.segments)
        into.segments.append(
            Segment(
                copies[index],
                segment.thread,
                None if segment.parent is None else where[segment.parent],
                "prompt" if segment.kind == "prompt" else "tool",
                segment.tokens,
                [where[mount] for mount in segment.mounts if mount not in lost],
                segment.start,
            )
        )
    return copies


def _append_answer(
    into: Trace, commit: Segment, end: int, lead: Sequence[int], answer: Sequence[int]
) -> int:
    start = commit.start
    for kind, tokens in (("tool", lead), ("action", answer)):
        if tokens:
            index = len(into.segments)
            into.segments.append(Segment(index, commit.thread, end, kind, list(tokens), [], start))
            end, start = index, start + len(tokens)
    return end
