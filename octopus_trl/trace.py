"""The record of an episode: a DAG of segments with all that training and looking need.

One JSON object a line on disk (schema 1, DESIGN §2; `trace_files`). A trace stores only the tokens
that each segment added, so `linearize` of a segment concatenates exactly what the model saw on
that chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octopus_trl.errors import TraceError
from octopus_trl.maths import dag
from octopus_trl.trace_rules import check_trace, is_int

SCHEMA = 1


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


@dataclass(slots=True, repr=False)
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

    def __repr__(self) -> str:
        # Short: libraries print whole data-set rows in warnings.
        return (
            f"Trace({self.episode_id!r}, {len(self.threads)} threads, "
            f"{len(self.segments)} segments, {sum(self.lengths)} tokens, reward {self.reward})"
        )

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
        check_trace(self, vocab_size)
        return self

    def linearize(self, segment_id: int) -> tuple[list[int], list[int]]:
        """Give the token ids and positions of the chain that ends with a segment.

        Mounted tokens are not part of the chain: they are read, not stepped through.

        Raises:
            TraceError: no such segment.
        """
        if not is_int(segment_id) or not 0 <= segment_id < len(self.segments):
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
