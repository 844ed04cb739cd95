"""The rules that a trace keeps: ids, edges, owners, kinds, lengths, positions (DESIGN §2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from octopus_trl.errors import TraceError
from octopus_trl.maths import dag

if TYPE_CHECKING:
    from octopus_trl.trace import Segment, Trace

KINDS = ("prompt", "action", "tool")
STATUSES = ("running", "committed", "cut", "failed")
EXCHANGES = ("mount", "transcript", "summary", "splice")
POSITIONS = ("jump", "unshifted", "rerotate", "reencode")
LOGP_SLACK = 1e-4  # nats that rounding may put a log-probability above 0


def check_trace(trace: Trace, vocab_size: int | None) -> None:
    """Raise `TraceError` with segment, rule and both values where a trace breaks a rule."""
    _check_header(trace)
    _check_threads(trace)
    for index, segment in enumerate(trace.segments):
        _check_segment(trace, index, segment, vocab_size)
    _check_heads(trace)
    _check_mounts(trace)
    _check_starts(trace)


def is_int(value: object) -> bool:
    """Whether a value is an integer and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _check_header(trace: Trace) -> None:
    for name, value, allowed in (
        ("exchange", trace.exchange, EXCHANGES),
        ("position", trace.position, POSITIONS),
    ):
        if value not in allowed:
            raise TraceError(f"{name} is {value!r}, must be one of {allowed}")
    if not is_int(trace.policy_version) or trace.policy_version < 0:
        raise TraceError(f"policy_version is {trace.policy_version!r}, must be an integer >= 0")
    if trace.reward is not None and not _is_finite(trace.reward):
        raise TraceError(f"reward is {trace.reward!r}, must be a finite number or null")
    layers = trace.mount_layers
    if layers is not None and (
        not all(is_int(layer) and layer >= 0 for layer in layers) or len(set(layers)) != len(layers)
    ):
        raise TraceError(f"mount_layers is {layers}, must be distinct layer indices >= 0")
    for event in trace.events:
        if not isinstance(event, Mapping):
            raise TraceError(f"an event is a JSON object, got {event!r}")
    if not trace.segments:
        raise TraceError("a trace holds at least one segment, got 0")
    if not trace.threads:
        raise TraceError("a trace holds at least one thread, got 0")


def _check_threads(trace: Trace) -> None:
    ids = [thread.id for thread in trace.threads]
    for thread in trace.threads:
        if not is_int(thread.id) or thread.id < 0:
            raise TraceError(f"thread id is {thread.id!r}, must be an integer >= 0")
        if thread.parent is not None and not is_int(thread.parent):
            raise TraceError(
                f"thread {thread.id}: parent is {thread.parent!r}, must be a thread id or null"
            )
        if not isinstance(thread.task, str):
            raise TraceError(f"thread {thread.id}: task is {thread.task!r}, must be text")
    if len(set(ids)) != len(ids):
        raise TraceError(f"thread ids must be unique, got {ids}")
    known = set(ids)
    by_id = {thread.id: thread for thread in trace.threads}
    for thread in trace.threads:
        if thread.status not in STATUSES:
            raise TraceError(
                f"thread {thread.id}: status is {thread.status!r}, must be one of {STATUSES}"
            )
        if thread.parent is not None and thread.parent not in known:
            raise TraceError(f"thread {thread.id}: parent {thread.parent} is no thread")
        above, hops = thread.parent, 0
        while above is not None and hops <= len(ids):
            above, hops = by_id[above].parent, hops + 1
        if hops > len(ids):
            raise TraceError(f"thread {thread.id}: its parents form a cycle")


def _check_heads(trace: Trace) -> None:
    for thread in trace.threads:
        if thread.head is None:
            continue
        if not is_int(thread.head) or not 0 <= thread.head < len(trace.segments):
            raise TraceError(
                f"thread {thread.id}: head: got {thread.head!r}, must be a segment id below "
                f"{len(trace.segments)}"
            )
        owner = trace.segments[thread.head].thread
        if not _descends(trace, thread.id, owner):
            raise TraceError(
                f"thread {thread.id}: head {thread.head} lies on its own chain: got a segment "
                f"of thread {owner}, must be of {thread.id} or a thread above it"
            )


def _check_segment(trace: Trace, index: int, segment: Segment, vocab_size: int | None) -> None:
    def fail(rule: str, got: object, want: object) -> TraceError:
        return TraceError(f"segment {segment.id}: {rule}: got {got}, must be {want}")

    if not is_int(segment.id) or segment.id != index:
        raise fail("ids count up from 0 in creation order", segment.id, index)
    if segment.kind not in KINDS:
        raise fail("kind", repr(segment.kind), f"one of {KINDS}")
    if not is_int(segment.thread) or segment.thread not in {t.id for t in trace.threads}:
        raise fail("thread", segment.thread, "a thread of this trace")
    if segment.parent is not None and not (is_int(segment.parent) and 0 <= segment.parent < index):
        raise fail("parent", segment.parent, f"null or an id below {index}")
    if segment.parent is not None and not _descends(
        trace, segment.thread, trace.segments[segment.parent].thread
    ):
        owner = trace.segments[segment.parent].thread
        raise fail("owner continues its own thread or one above it", segment.thread, owner)
    if not segment.tokens:
        raise fail("length", 0, "at least 1 token")
    for token in segment.tokens:
        if not is_int(token) or token < 0 or (vocab_size is not None and token >= vocab_size):
            limit = "an integer >= 0" if vocab_size is None else f"in 0..{vocab_size - 1}"
            raise fail("token id", repr(token), limit)
    if segment.time_s is not None and not _is_finite(segment.time_s):
        raise fail("time_s", repr(segment.time_s), "a finite number or null")
    if segment.logps is not None:
        if segment.kind != "action":
            raise fail("logps are kept on actions only, kind", segment.kind, "action")
        if len(segment.logps) != len(segment.tokens):
            raise fail("number of logps", len(segment.logps), len(segment.tokens))
        for logp in segment.logps:
            if not _is_finite(logp) or logp > LOGP_SLACK:
                raise fail("logp", repr(logp), "finite and at most 0")


def _descends(trace: Trace, thread: int, above: int) -> bool:
    by_id = {record.id: record for record in trace.threads}
    node: int | None = thread
    while node is not None and node != above:
        node = by_id[node].parent
    return node == above


def _check_mounts(trace: Trace) -> None:
    parents, mounts = trace.parents, trace.mounts
    for segment in trace.segments:
        for mount in segment.mounts:
            if not is_int(mount) or not 0 <= mount < segment.id:
                raise TraceError(
                    f"segment {segment.id}: mount: got {mount!r}, must be an id below {segment.id}"
                )
        if len(set(segment.mounts)) != len(segment.mounts):
            raise TraceError(
                f"segment {segment.id}: mounts are listed once: got {segment.mounts}, "
                f"must be {sorted(set(segment.mounts))}"
            )
    tree = dag.ancestor_matrix(parents)
    seen = tree | dag.mounted_matrix(parents, mounts)
    for segment in trace.segments:
        if segment.mounts and segment.kind != "tool":
            raise TraceError(
                f"segment {segment.id}: only tool segments carry mounts: got kind "
                f"{segment.kind}, must be tool"
            )
        for mount in segment.mounts:
            if tree[segment.id, mount]:
                raise TraceError(
                    f"segment {segment.id}: a mount is no ancestor: got {mount}, ancestors are "
                    f"{dag.ancestors(parents, segment.id)}"
                )
            if segment.parent is not None and seen[segment.parent, mount]:
                raise TraceError(
                    f"segment {segment.id}: mount {mount} is already visible to its parent "
                    f"{segment.parent}, must be new"
                )


def _check_starts(trace: Trace) -> None:
    expected = dag.starts(trace.parents, trace.mounts, trace.lengths, position=trace.position)
    for segment, start in zip(trace.segments, expected, strict=True):
        if segment.start != start or not is_int(segment.start):
            raise TraceError(
                f"segment {segment.id}: start under position rule {trace.position!r}: got "
                f"{segment.start}, must be {start}"
            )
