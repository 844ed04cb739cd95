"""The record of an episode: a DAG of segments with all that training and looking need.

One JSON object a line on disk (schema 1, DESIGN §2). A trace stores only the tokens that each
segment added, so `linearize` of a segment concatenates exactly what the model saw on that chain.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octopus_trl.errors import TraceError
from octopus_trl.maths import dag

SCHEMA = 1
KINDS = ("prompt", "action", "tool")
STATUSES = ("running", "committed", "cut", "failed")
EXCHANGES = ("mount", "transcript", "summary", "splice")
POSITIONS = ("jump", "unshifted", "rerotate", "reencode")


@dataclass(slots=True)
class Segment:
    """A run of tokens of one thread and one kind.

    Attributes:
        id: number in creation order; every edge points to a smaller one.
        thread: id of the thread whose cursor added the tokens; the owner where kind is "action".
        parent: segment that this one continues, `None` for a root.
        kind: "prompt", "action" (sampled) or "tool" (inserted).
        tokens: token ids, at least one.
        mounts: ids that become readable at the boundary just before this segment.
        start: position of the first token.
        logps: natural-log probability of each token under the policy that sampled it; only on
            actions.
        time_s: seconds since the episode began when the segment was closed, or `None`.
    """

    id: int
    thread: int
    parent: int | None
    kind: str
    tokens: list[int]
    mounts: list[int] = field(default_factory=list)
    start: int = 0
    logps: list[float] | None = None
    time_s: float | None = None

    @property
    def end(self) -> int:
        """Position just past the last token."""
        return self.start + len(self.tokens)


@dataclass(slots=True)
class ThreadRecord:
    """A thread as the trace keeps it.

    Attributes:
        parent: thread that forked it, `None` for a root thread.
        task: text of its task, empty for a root.
        status: "running", "committed", "cut" or "failed".
        head: last segment of its live chain; a thread that was never given one has `None`.
    """

    id: int
    parent: int | None
    task: str = ""
    status: str = "running"
    head: int | None = None


@dataclass(slots=True)
class Trace:
    """One episode as a DAG of segments (schema in DESIGN §2).

    `check` verifies it against its own rules; `linearize` gives what the model saw on one chain.

    >>> trace = Trace("e", "p", segments=[Segment(0, 0, None, "prompt", [5, 6])],
    ...               threads=[ThreadRecord(0, None, head=0)])
    >>> trace.check().linearize(0)
    ([5, 6], [0, 1])
    """

    episode_id: str
    prompt_id: str
    policy_version: int = 0
    reward: float | None = None
    truncated: bool = False
    threads: list[ThreadRecord] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    exchange: str = "mount"
    position: str = "jump"
    mount_layers: list[int] | None = None

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Trace:
        """Build a trace from one JSON object.

        Raises:
            TraceError: a field is missing, unknown or of the wrong type, or the schema is not 1.
        """
        if not isinstance(record, Mapping):
            raise TraceError(f"a trace is a JSON object, got {type(record).__name__}")
        known = {"schema", *cls.__dataclass_fields__}
        if unknown := sorted(set(record) - known):
            raise TraceError(f"unknown trace fields {unknown}; the fields are {sorted(known)}")
        if record.get("schema", SCHEMA) != SCHEMA:
            raise TraceError(f"schema is {record['schema']!r}, this version reads {SCHEMA}")
        for name in ("episode_id", "prompt_id", "threads", "segments"):
            if name not in record:
                raise TraceError(f"field {name!r} is missing")
        fields = {name: record[name] for name in record if name != "schema"}
        for name, kind, text in _TYPES:
            if name in fields and not isinstance(fields[name], kind):
                raise TraceError(f"field {name!r} is {fields[name]!r}, must be {text}")
        fields["episode_id"] = str(fields["episode_id"])
        fields["prompt_id"] = str(fields["prompt_id"])
        fields["threads"] = [_build(ThreadRecord, item, "thread") for item in record["threads"]]
        fields["segments"] = [_build(Segment, item, "segment") for item in record["segments"]]
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Give the JSON object of this trace; `from_dict` of it is equal."""
        return {
            "schema": SCHEMA,
            "episode_id": self.episode_id,
            "prompt_id": self.prompt_id,
            "policy_version": self.policy_version,
            "reward": self.reward,
            "truncated": self.truncated,
            "exchange": self.exchange,
            "position": self.position,
            "mount_layers": self.mount_layers,
            "threads": [_fields(thread) for thread in self.threads],
            "segments": [_fields(segment) for segment in self.segments],
            "events": [dict(event) for event in self.events],
            "meta": dict(self.meta),
        }

    @property
    def parents(self) -> list[int | None]:
        """Parent of each segment, in id order."""
        return [segment.parent for segment in self.segments]

    @property
    def mounts(self) -> list[list[int]]:
        """Mount edges of each segment, in id order."""
        return [segment.mounts for segment in self.segments]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each segment, in id order."""
        return [len(segment.tokens) for segment in self.segments]

    @property
    def num_owned(self) -> int:
        """Z: sampled tokens of the whole tree, each counted once (paper's 1/Z)."""
        return sum(len(s.tokens) for s in self.segments if s.kind == "action")

    def place(self) -> Trace:
        """Set every start under the trace's position rule (paper Eq. 2); returns itself."""
        places = dag.starts(self.parents, self.mounts, self.lengths, position=self.position)
        for segment, start in zip(self.segments, places, strict=True):
            segment.start = start
        return self

    def check(self, *, vocab_size: int | None = None) -> Trace:
        """Verify every id, edge, position, kind, owner, length, thread and token id; returns
        itself.

        Args:
            vocab_size: upper bound of token ids where it is known.
        Raises:
            TraceError: names the segment, the rule and both values.
        """
        self._check_header()
        self._check_threads()
        for index, segment in enumerate(self.segments):
            self._check_segment(index, segment, vocab_size)
        self._check_heads()
        self._check_mounts()
        self._check_starts()
        return self

    def linearize(self, segment_id: int) -> tuple[list[int], list[int]]:
        """Give the token ids and positions of the chain that ends with a segment.

        Mounted tokens are not part of the chain: they are read, not stepped through.

        Raises:
            TraceError: no such segment.
        """
        if not _is_int(segment_id) or not 0 <= segment_id < len(self.segments):
            raise TraceError(
                f"segment {segment_id!r} does not exist, ids are 0..{len(self.segments) - 1}"
            )
        tokens: list[int] = []
        positions: list[int] = []
        for index in [*dag.ancestors(self.parents, segment_id), segment_id]:
            segment = self.segments[index]
            tokens.extend(segment.tokens)
            positions.extend(range(segment.start, segment.end))
        return tokens, positions

    def _check_header(self) -> None:
        for name, value, allowed in (
            ("exchange", self.exchange, EXCHANGES),
            ("position", self.position, POSITIONS),
        ):
            if value not in allowed:
                raise TraceError(f"{name} is {value!r}, must be one of {allowed}")
        if not _is_int(self.policy_version) or self.policy_version < 0:
            raise TraceError(f"policy_version is {self.policy_version!r}, must be an integer >= 0")
        if self.reward is not None and not _is_finite(self.reward):
            raise TraceError(f"reward is {self.reward!r}, must be a finite number or null")
        layers = self.mount_layers
        if layers is not None and (
            not all(_is_int(layer) and layer >= 0 for layer in layers)
            or len(set(layers)) != len(layers)
        ):
            raise TraceError(f"mount_layers is {layers}, must be distinct layer indices >= 0")
        for event in self.events:
            if not isinstance(event, Mapping):
                raise TraceError(f"an event is a JSON object, got {event!r}")
        if not self.segments:
            raise TraceError("a trace holds at least one segment, got 0")
        if not self.threads:
            raise TraceError("a trace holds at least one thread, got 0")

    def _check_threads(self) -> None:
        ids = [thread.id for thread in self.threads]
        for thread in self.threads:
            if not _is_int(thread.id) or thread.id < 0:
                raise TraceError(f"thread id is {thread.id!r}, must be an integer >= 0")
            if thread.parent is not None and not _is_int(thread.parent):
                raise TraceError(
                    f"thread {thread.id}: parent is {thread.parent!r}, must be a thread id or null"
                )
            if not isinstance(thread.task, str):
                raise TraceError(f"thread {thread.id}: task is {thread.task!r}, must be text")
        if len(set(ids)) != len(ids):
            raise TraceError(f"thread ids must be unique, got {ids}")
        known = set(ids)
        by_id = {thread.id: thread for thread in self.threads}
        for thread in self.threads:
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

    def _check_heads(self) -> None:
        for thread in self.threads:
            if thread.head is None:
                continue
            if not _is_int(thread.head) or not 0 <= thread.head < len(self.segments):
                raise TraceError(
                    f"thread {thread.id}: head: got {thread.head!r}, must be a segment id below "
                    f"{len(self.segments)}"
                )
            owner = self.segments[thread.head].thread
            if not self._descends(thread.id, owner):
                raise TraceError(
                    f"thread {thread.id}: head {thread.head} lies on its own chain: got a segment "
                    f"of thread {owner}, must be of {thread.id} or a thread above it"
                )

    def _check_segment(self, index: int, segment: Segment, vocab_size: int | None) -> None:
        def fail(rule: str, got: object, want: object) -> TraceError:
            return TraceError(f"segment {segment.id}: {rule}: got {got}, must be {want}")

        if segment.id != index:
            raise fail("ids count up from 0 in creation order", segment.id, index)
        if segment.kind not in KINDS:
            raise fail("kind", repr(segment.kind), f"one of {KINDS}")
        if not _is_int(segment.thread) or segment.thread not in {t.id for t in self.threads}:
            raise fail("thread", segment.thread, "a thread of this trace")
        if segment.parent is not None and not (
            _is_int(segment.parent) and 0 <= segment.parent < index
        ):
            raise fail("parent", segment.parent, f"null or an id below {index}")
        if segment.parent is not None and not self._descends(
            segment.thread, self.segments[segment.parent].thread
        ):
            owner = self.segments[segment.parent].thread
            raise fail("owner continues its own thread or one above it", segment.thread, owner)
        if not segment.tokens:
            raise fail("length", 0, "at least 1 token")
        for token in segment.tokens:
            if not _is_int(token) or token < 0 or (vocab_size is not None and token >= vocab_size):
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
                if not _is_finite(logp) or logp > 1e-4:
                    raise fail("logp", repr(logp), "finite and at most 0")

    def _descends(self, thread: int, above: int) -> bool:
        by_id = {record.id: record for record in self.threads}
        node: int | None = thread
        while node is not None and node != above:
            node = by_id[node].parent
        return node == above

    def _check_mounts(self) -> None:
        parents, mounts = self.parents, self.mounts
        for segment in self.segments:
            for mount in segment.mounts:
                if not _is_int(mount) or not 0 <= mount < segment.id:
                    raise TraceError(
                        f"segment {segment.id}: mount: got {mount!r}, must be an id below "
                        f"{segment.id}"
                    )
            if len(set(segment.mounts)) != len(segment.mounts):
                raise TraceError(
                    f"segment {segment.id}: mounts are listed once: got {segment.mounts}, "
                    f"must be {sorted(set(segment.mounts))}"
                )
        tree = dag.ancestor_matrix(parents)
        seen = tree | dag.mounted_matrix(parents, mounts)
        for segment in self.segments:
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

    def _check_starts(self) -> None:
        expected = dag.starts(self.parents, self.mounts, self.lengths, position=self.position)
        for segment, start in zip(self.segments, expected, strict=True):
            if segment.start != start or not _is_int(segment.start):
                raise TraceError(
                    f"segment {segment.id}: start under position rule {self.position!r}: got "
                    f"{segment.start}, must be {start}"
                )


def read_traces(path: str | Path, *, check: bool = True) -> Iterator[Trace]:
    """Read a JSONL file of traces one by one.

    A last line without its newline is what an interrupted writer leaves; it is skipped.

    Raises:
        TraceError: a line is broken; names the file and the line number.
    """
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n") and not _parses(line):
                return
            if line.strip():
                yield _load(line, path, number, check)


class TraceWriter:
    """Append traces to a JSONL file so that a killed process leaves only whole lines behind.

    Opening a file that ends in half a line cuts that line off; `episode_ids` then says what is
    already there, so a run can go on where it stopped. Each line goes out in one write and is
    flushed to the disk.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.episode_ids: set[str] = set()
        if self.path.exists():
            self._recover()
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, trace: Trace) -> None:
        """Write one trace as one line."""
        data = _line(trace)
        written = os.write(self._descriptor, data)
        while written < len(data):
            written += os.write(self._descriptor, data[written:])
        os.fsync(self._descriptor)
        self.episode_ids.add(trace.episode_id)

    def close(self) -> None:
        """Close the file; further appends fail."""
        os.close(self._descriptor)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _recover(self) -> None:
        data = self.path.read_bytes()
        tail = data[data.rfind(b"\n") + 1 :]
        for trace in read_traces(self.path, check=False):
            self.episode_ids.add(trace.episode_id)
        if tail and _parses(tail):
            with self.path.open("ab") as stream:
                stream.write(b"\n")
        elif tail:
            os.truncate(self.path, len(data) - len(tail))


def write_traces(path: str | Path, traces: Sequence[Trace]) -> None:
    """Write a whole file of traces atomically: beside the target, then renamed."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with beside.open("wb") as stream:
            for trace in traces:
                stream.write(_line(trace))
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _line(trace: Trace) -> bytes:
    text = json.dumps(trace.to_dict(), separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def _load(line: bytes, path: str | Path, number: int, check: bool) -> Trace:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} line {number}: no JSON object ({error})") from error
    try:
        trace = Trace.from_dict(record)
        return trace.check() if check else trace
    except TraceError as error:
        raise TraceError(f"{path} line {number}: {error}") from error


def _parses(line: bytes) -> bool:
    try:
        json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return False
    return True


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


_TYPES: tuple[tuple[str, Any, str], ...] = (
    ("episode_id", (str, int), "text"),
    ("prompt_id", (str, int), "text"),
    ("policy_version", int, "an integer"),
    ("reward", (float, int, type(None)), "a number or null"),
    ("truncated", bool, "true or false"),
    ("threads", list, "a list"),
    ("segments", list, "a list"),
    ("events", list, "a list"),
    ("meta", Mapping, "an object"),
    ("mount_layers", (list, type(None)), "a list of layer indices or null"),
)


def _build(cls: Any, record: Any, noun: str) -> Any:
    if not isinstance(record, Mapping):
        raise TraceError(f"a {noun} is a JSON object, got {record!r}")
    names = cls.__dataclass_fields__
    if unknown := sorted(set(record) - set(names)):
        raise TraceError(f"{noun} {record.get('id')}: unknown fields {unknown}")
    missing = [name for name in ("id", "parent") if name not in record]
    if cls is Segment:
        missing += [name for name in ("thread", "kind", "tokens", "start") if name not in record]
    if missing:
        raise TraceError(f"{noun} {record.get('id')}: fields {missing} are missing")
    values = dict(record)
    for name in ("tokens", "mounts", "logps"):
        value = values.get(name)
        if value is None:
            continue
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise TraceError(f"{noun} {record.get('id')}: {name} is {value!r}, must be a list")
        values[name] = list(value)
    if values.get("mounts", []) is None:
        values["mounts"] = []
    return cls(**values)


def _fields(record: Any) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value := getattr(record, name), list) else value
        for name in record.__dataclass_fields__
    }
