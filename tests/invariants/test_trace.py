"""A trace says what happened and refuses to say anything else."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octopus_trl.errors import TraceError
from octopus_trl.trace import Segment, ThreadRecord, Trace
from tests.tiny import VOCAB, random_trace


def small() -> dict[str, Any]:
    """Two roots, a fork, a branch that a rewind left, and a mount; every start is hand-computed.

    Thread 0: s0 prompt 0..2, s1 action 3..4, s4 tool (mounts 3) 9..10, s5 action 11.
    Thread 1, forked after s1: s2 tool 5..6, s3 action 7..8 (head: rewound to s2).
    Thread 2, a root: s6 prompt 0..1.
    """
    rows: list[tuple[int, int | None, str, list[int], list[int], int]] = [
        (0, None, "prompt", [1, 2, 3], [], 0),
        (0, 0, "action", [4, 5], [], 3),
        (1, 1, "tool", [6, 7], [], 5),
        (1, 2, "action", [8, 9], [], 7),
        (0, 1, "tool", [10, 11], [3], 9),
        (0, 4, "action", [12], [], 11),
        (2, None, "prompt", [13, 14], [], 0),
    ]
    return {
        "schema": 1,
        "episode_id": "e",
        "prompt_id": "p",
        "policy_version": 3,
        "reward": 1.0,
        "truncated": False,
        "threads": [
            {"id": 0, "parent": None, "task": "", "status": "committed", "head": 5},
            {"id": 1, "parent": 0, "task": "look", "status": "cut", "head": 2},
            {"id": 2, "parent": None, "task": "", "status": "failed", "head": 6},
        ],
        "segments": [
            {
                "id": index,
                "thread": thread,
                "parent": parent,
                "kind": kind,
                "tokens": tokens,
                "mounts": mounts,
                "start": start,
                "logps": [-0.5] * len(tokens) if kind == "action" else None,
                "time_s": 0.25 * index,
            }
            for index, (thread, parent, kind, tokens, mounts, start) in enumerate(rows)
        ],
        "events": [{"kind": "fork", "turn": 1}],
        "meta": {"seed": 7},
    }


def load(record: Any) -> Trace:
    return Trace.from_dict(record).check(vocab_size=VOCAB)


def test_a_valid_trace_passes_its_own_check() -> None:
    trace = load(small())
    assert trace.num_owned == 5
    assert (trace.exchange, trace.position, trace.mount_layers) == ("mount", "jump", None)


@pytest.mark.parametrize("seed", range(30))
def test_every_random_episode_passes_its_own_check(seed: int) -> None:
    random_trace(seed, logps=True, roots=1 + seed % 3).check(vocab_size=VOCAB)


def test_to_dict_and_from_dict_are_inverse_through_json() -> None:
    for seed in range(8):
        trace = random_trace(seed, logps=True)
        again = Trace.from_dict(json.loads(json.dumps(trace.to_dict())))
        assert again == trace
        assert again.to_dict() == trace.to_dict()


def test_to_dict_has_exactly_the_fields_of_the_schema() -> None:
    record = load(small()).to_dict()
    assert set(record) == set(small()) | {"exchange", "position", "mount_layers"}
    assert set(record["segments"][0]) == set(small()["segments"][0])
    assert set(record["threads"][0]) == set(small()["threads"][0])


def test_changing_a_dict_of_a_trace_does_not_change_the_trace() -> None:
    trace = load(small())
    record = trace.to_dict()
    record["segments"][0]["tokens"].append(9)
    record["segments"][4]["mounts"].clear()
    record["threads"].clear()
    record["meta"]["seed"] = 8
    assert trace == load(small())


def test_optional_fields_have_the_defaults_of_the_schema() -> None:
    record = small()
    for name in ("reward", "truncated", "events", "meta"):
        full = {**record, "exchange": "mount", "position": "jump", "mount_layers": None}
        assert load({k: v for k, v in full.items() if k not in ("exchange", "position")})
        assert name in full
    assert load({**record, "reward": None}).reward is None


def test_a_mounted_span_sends_the_reader_past_its_highest_position() -> None:
    """The paper's example: a reader at 2,000 mounts 1,500 to 4,000; its next token is 4,001."""
    segments = [
        Segment(0, 0, None, "prompt", [1] * 1500, start=0),
        Segment(1, 1, 0, "tool", [2] * 2501, start=1500),
        Segment(2, 0, 0, "action", [3] * 501, start=1500),
        Segment(3, 0, 2, "tool", [4] * 10, mounts=[1], start=4001),
    ]
    assert segments[1].end - 1 == 4000
    assert segments[2].end - 1 == 2000
    threads = [ThreadRecord(0, None, head=3), ThreadRecord(1, 0, head=1)]
    trace = Trace("e", "p", threads=threads, segments=segments).check()
    assert trace.linearize(3)[1][-10:] == list(range(4001, 4011))
    segments[3].start = 2001
    with pytest.raises(TraceError, match=r"segment 3.*2001.*4001"):
        trace.check()


def test_a_mount_that_ends_below_the_reader_does_not_move_it() -> None:
    segments = [
        Segment(0, 0, None, "prompt", [1] * 10, start=0),
        Segment(1, 1, 0, "tool", [2] * 3, start=10),
        Segment(2, 0, 0, "action", [3] * 9, start=10),
        Segment(3, 0, 2, "tool", [4], mounts=[1], start=19),
    ]
    threads = [ThreadRecord(0, None, head=3), ThreadRecord(1, 0, head=1)]
    Trace("e", "p", threads=threads, segments=segments).check()


@pytest.mark.parametrize(
    ("position", "start"), [("jump", 9), ("unshifted", 5), ("rerotate", 5), ("reencode", 7)]
)
def test_starts_follow_the_traces_own_position_rule(position: str, start: int) -> None:
    record = {**small(), "position": position}
    record["segments"][4]["start"] = start
    record["segments"][5]["start"] = start + 2
    load(record)
    record["segments"][5]["start"] = start + 3
    with pytest.raises(TraceError, match="segment 5"):
        load(record)


def test_a_forked_child_inherits_the_highest_mounted_position() -> None:
    record = small()
    record["threads"].append({"id": 3, "parent": 0, "task": "", "status": "cut", "head": 7})
    child = copy.deepcopy(record["segments"][5])
    child.update(id=7, thread=3, parent=4, kind="tool", logps=None, start=11)
    record["segments"].append(child)
    load(record)


def test_a_branch_after_a_rewind_past_a_mount_forgets_it() -> None:
    record = small()
    child = copy.deepcopy(record["segments"][5])
    child.update(id=7, thread=0, parent=1, start=5)
    record["segments"].append(child)
    record["threads"][0]["head"] = 7
    load(record)
    child["start"] = 9
    with pytest.raises(TraceError, match=r"segment 7.*9.*5"):
        load(record)


@pytest.mark.parametrize("seed", range(12))
def test_linearize_gives_the_tokens_and_positions_of_the_chain(seed: int) -> None:
    trace = random_trace(seed)
    for segment in trace.segments:
        chain = [segment]
        while chain[0].parent is not None:
            chain.insert(0, trace.segments[chain[0].parent])
        tokens = [token for link in chain for token in link.tokens]
        positions = [link.start + i for link in chain for i in range(len(link.tokens))]
        assert trace.linearize(segment.id) == (tokens, positions)
        assert all(a < b for a, b in itertools.pairwise(positions))


@pytest.mark.parametrize("wrong", [-1, 7, 10**9, "0", None, 1.0, True])
def test_linearize_of_no_such_segment_is_a_trace_error(wrong: Any) -> None:
    with pytest.raises(TraceError):
        load(small()).linearize(wrong)


Mutation = Callable[[dict[str, Any]], object]


def _set(where: str, index: int, **fields: Any) -> Mutation:
    return lambda record: record[where][index].update(fields)


def _drop(where: str, index: int, name: str) -> Mutation:
    return lambda record: record[where][index].pop(name)


def _top(**fields: Any) -> Mutation:
    return lambda record: record.update(fields)


SEGMENT_FAULTS: dict[str, tuple[int, Mutation]] = {
    "start too low": (4, _set("segments", 4, start=8)),
    "start too high": (1, _set("segments", 1, start=4)),
    "start of a root": (6, _set("segments", 6, start=1)),
    "start is a float": (1, _set("segments", 1, start=3.0)),
    "start is text": (1, _set("segments", 1, start="3")),
    "start is a list": (1, _set("segments", 1, start=[3])),
    "start is null": (1, _set("segments", 1, start=None)),
    "id skips": (9, _set("segments", 5, id=9)),
    "id repeats": (4, _set("segments", 5, id=4)),
    "parent is itself": (2, _set("segments", 2, parent=2)),
    "parent is later": (2, _set("segments", 2, parent=5)),
    "parent is out of range": (2, _set("segments", 2, parent=70)),
    "parent is negative": (2, _set("segments", 2, parent=-1)),
    "parent is a float": (2, _set("segments", 2, parent=1.0)),
    "parent is true": (2, _set("segments", 2, parent=True)),
    "parent is text": (2, _set("segments", 2, parent="1")),
    "parent is a list": (2, _set("segments", 2, parent=[1])),
    "parent belongs to a thread below": (4, _set("segments", 4, parent=3, mounts=[], start=9)),
    "kind unknown": (2, _set("segments", 2, kind="thought")),
    "kind is null": (2, _set("segments", 2, kind=None)),
    "kind is a list": (2, _set("segments", 2, kind=["tool"])),
    "no tokens": (6, _set("segments", 6, tokens=[])),
    "token negative": (6, _set("segments", 6, tokens=[1, -1])),
    "token outside the vocabulary": (6, _set("segments", 6, tokens=[1, VOCAB])),
    "token is a float": (6, _set("segments", 6, tokens=[1, 2.0])),
    "token is true": (6, _set("segments", 6, tokens=[1, True])),
    "token is text": (6, _set("segments", 6, tokens=[1, "2"])),
    "token is null": (6, _set("segments", 6, tokens=[1, None])),
    "token is a list": (6, _set("segments", 6, tokens=[1, [2]])),
    "tokens are text": (6, _set("segments", 6, tokens="ab")),
    "tokens are null": (6, _set("segments", 6, tokens=None)),
    "mount of itself": (4, _set("segments", 4, mounts=[4])),
    "mount of a later segment": (4, _set("segments", 4, mounts=[5])),
    "mount out of range": (4, _set("segments", 4, mounts=[99])),
    "mount negative": (4, _set("segments", 4, mounts=[-1])),
    "mount is a float": (4, _set("segments", 4, mounts=[3.0])),
    "mount is text": (4, _set("segments", 4, mounts=["3"])),
    "mount is a list": (4, _set("segments", 4, mounts=[[3]])),
    "mounts are a number": (4, _set("segments", 4, mounts=3)),
    "mount of an ancestor": (4, _set("segments", 4, mounts=[0, 3])),
    "mount of the parent": (4, _set("segments", 4, mounts=[1, 3])),
    "mount listed twice": (4, _set("segments", 4, mounts=[3, 3])),
    "mount on an action": (5, _set("segments", 5, mounts=[2])),
    "mount on a prompt": (6, _set("segments", 6, mounts=[0], start=3)),
    "mount that the parent sees": (5, _set("segments", 5, kind="tool", logps=None, mounts=[3])),
    "thread unknown": (2, _set("segments", 2, thread=9)),
    "thread is a list": (2, _set("segments", 2, thread=[1])),
    "thread is null": (2, _set("segments", 2, thread=None)),
    "owner on another branch": (2, _set("segments", 2, thread=2)),
    "owner above its own text": (3, _set("segments", 3, thread=0)),
    "logps too few": (1, _set("segments", 1, logps=[-0.5])),
    "logps too many": (1, _set("segments", 1, logps=[-0.5] * 3)),
    "logps on tool text": (2, _set("segments", 2, logps=[-0.5, -0.5])),
    "logps on a prompt": (0, _set("segments", 0, logps=[-0.5] * 3)),
    "logp is nan": (1, _set("segments", 1, logps=[-0.5, math.nan])),
    "logp is minus infinity": (1, _set("segments", 1, logps=[-0.5, -math.inf])),
    "logp positive": (1, _set("segments", 1, logps=[-0.5, 0.5])),
    "logp is null": (1, _set("segments", 1, logps=[-0.5, None])),
    "logp is text": (1, _set("segments", 1, logps=[-0.5, "x"])),
    "logps are text": (1, _set("segments", 1, logps="ab")),
    "time is text": (1, _set("segments", 1, time_s="noon")),
    "unknown field": (1, _set("segments", 1, colour="red")),
    "tokens missing": (1, _drop("segments", 1, "tokens")),
    "kind missing": (1, _drop("segments", 1, "kind")),
    "parent missing": (1, _drop("segments", 1, "parent")),
    "thread missing": (1, _drop("segments", 1, "thread")),
    "start missing": (1, _drop("segments", 1, "start")),
}


@pytest.mark.parametrize("fault", SEGMENT_FAULTS)
def test_a_corrupt_segment_is_refused_by_its_id(fault: str) -> None:
    index, mutate = SEGMENT_FAULTS[fault]
    record = small()
    mutate(record)
    with pytest.raises(TraceError, match=rf"segment {index}\b"):
        load(record)


OTHER_FAULTS: dict[str, Mutation] = {
    "thread id repeats": _set("threads", 1, id=0),
    "thread id is negative": _set("threads", 2, id=-2),
    "thread id is text": _set("threads", 2, id="2"),
    "thread id is a list": _set("threads", 2, id=[2]),
    "thread status unknown": _set("threads", 0, status="asleep"),
    "thread status is a list": _set("threads", 0, status=["cut"]),
    "thread parent unknown": _set("threads", 1, parent=8),
    "thread parent is itself": _set("threads", 1, parent=1),
    "thread parents form a cycle": _set("threads", 0, parent=1),
    "thread parent is a list": _set("threads", 1, parent=[0]),
    "thread head out of range": _set("threads", 1, head=7),
    "thread head negative": _set("threads", 1, head=-1),
    "thread head is text": _set("threads", 1, head="2"),
    "thread head on a branch that is not its own": _set("threads", 0, head=3),
    "thread head in another root": _set("threads", 1, head=6),
    "thread task is a number": _set("threads", 1, task=3),
    "thread has an unknown field": _set("threads", 1, mood="calm"),
    "thread id missing": _drop("threads", 1, "id"),
    "thread is no object": _top(threads=[3]),
    "no threads": _top(threads=[], segments=small()["segments"]),
    "threads are an object": _top(threads={}),
    "no segments": _top(segments=[]),
    "segments are text": _top(segments="abc"),
    "segment is no object": lambda record: record["segments"].append(3),
    "reward is nan": _top(reward=math.nan),
    "reward is infinite": _top(reward=math.inf),
    "reward is text": _top(reward="good"),
    "reward is true": _top(reward=True),
    "truncated is a number": _top(truncated=1),
    "policy version negative": _top(policy_version=-1),
    "policy version is true": _top(policy_version=True),
    "policy version is a float": _top(policy_version=1.5),
    "exchange unknown": _top(exchange="telepathy"),
    "exchange is a list": _top(exchange=["mount"]),
    "position unknown": _top(position="here"),
    "position is null": _top(position=None),
    "mount layers are text": _top(mount_layers="attention"),
    "mount layer negative": _top(mount_layers=[-1]),
    "mount layer is text": _top(mount_layers=["3"]),
    "mount layer listed twice": _top(mount_layers=[3, 3]),
    "events are an object": _top(events={}),
    "event is no object": _top(events=[3]),
    "meta is a list": _top(meta=[]),
    "schema of the future": _top(schema=2),
    "schema is text": _top(schema="1"),
    "unknown field": _top(answer=42),
    "episode id missing": lambda record: record.pop("episode_id"),
    "episode id is null": _top(episode_id=None),
    "prompt id missing": lambda record: record.pop("prompt_id"),
    "segments missing": lambda record: record.pop("segments"),
    "threads missing": lambda record: record.pop("threads"),
}


@pytest.mark.parametrize("fault", OTHER_FAULTS)
def test_a_corrupt_trace_is_refused(fault: str) -> None:
    record = small()
    OTHER_FAULTS[fault](record)
    with pytest.raises(TraceError):
        load(record)


@pytest.mark.parametrize("wrong", [None, 3, "trace", [], [{}]])
def test_a_trace_that_is_no_object_is_refused(wrong: Any) -> None:
    with pytest.raises(TraceError):
        Trace.from_dict(wrong)


def test_an_error_names_the_segment_the_rule_and_both_values() -> None:
    record = small()
    record["segments"][4]["start"] = 8
    with pytest.raises(TraceError, match=r"segment 4: start.*got 8, must be 9"):
        load(record)
    record = small()
    record["segments"][1]["logps"] = [-0.5]
    with pytest.raises(TraceError, match=r"segment 1: number of logps.*got 1, must be 2"):
        load(record)


def test_a_trace_error_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        Trace.from_dict({})


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    found = [path] if path else []
    for key, inner in items:
        found += _places(inner, (*path, key))
    return found


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 200)
    | st.floats(allow_nan=True)
    | st.sampled_from(["", "tool", "action", "prompt", "jump", "cut", "0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=4,
)


def _loads_soundly_or_refuses(place: tuple[Any, ...], junk: Any) -> None:
    record = small()
    inner: Any = record
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = junk
    try:
        trace = load(record)
    except TraceError:
        return
    again = Trace.from_dict(json.loads(json.dumps(trace.to_dict()))).check(vocab_size=VOCAB)
    assert again == trace or "NaN" in json.dumps(trace.to_dict())
    for segment in trace.segments:
        trace.linearize(segment.id)


@settings(max_examples=200, deadline=None)
@given(place=st.sampled_from(_places(small())), junk=JUNK)
def test_any_value_anywhere_gives_a_sound_trace_or_a_trace_error(
    place: tuple[Any, ...], junk: Any
) -> None:
    _loads_soundly_or_refuses(place, junk)


@pytest.mark.parametrize("junk", [False, True, 0.0, 1.0, -1, None, "", [], {}, [[]], [False]])
def test_values_that_equal_an_integer_but_are_none_are_refused_in_every_place(junk: Any) -> None:
    for place in _places(small()):
        _loads_soundly_or_refuses(place, junk)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_no_moved_start_edge_or_owner_slips_through_unless_it_is_consistent(
    seed: int, data: st.DataObject
) -> None:
    """Changing one start alone is always caught: positions are implied by everything else."""
    trace = random_trace(seed, steps=8, max_tokens=60)
    index = data.draw(st.integers(0, len(trace.segments) - 1))
    shift = data.draw(st.integers(-5, 5).filter(bool))
    trace.segments[index].start += shift
    with pytest.raises(TraceError, match=rf"segment {index}\b"):
        trace.check()


def test_a_trace_prints_as_one_short_line() -> None:
    tokens = list(range(50_000))
    segments = [Segment(0, 0, None, "prompt", tokens)]
    trace = Trace("e", "p", segments=segments, threads=[ThreadRecord(0, None, head=0)])
    assert repr(trace) == "Trace('e', 1 threads, 1 segments, 50000 tokens, reward None)"
