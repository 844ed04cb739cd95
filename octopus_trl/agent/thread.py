"""One line of work inside an episode: its place, its live chain, its budget, its inbox."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octopus_trl.agent.chat import Turn
from octopus_trl.agent.pool import PoolCall
from octopus_trl.agent.tools import Result, ToolCall
from octopus_trl.protocols import Finished
from octopus_trl.trace import ThreadRecord

Status = Literal["running", "waiting", "committed", "cut", "failed"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where a thread stood at the end of one turn, so that it can go back there.

    Attributes:
        segment: last segment of the chain.
        num_tokens: tokens of the chain, inherited ones counted.
        num_live: own live segments through it.
        closed, thinking: how its last turn ended, see `chat.Turn`.
    """

    segment: int
    num_tokens: int
    num_live: int
    closed: bool
    thinking: bool


@dataclass(frozen=True, slots=True)
class Fed:
    """Tool text that was given to the engine with a turn, and what the thread has read with it."""

    tokens: list[int]
    mounts: list[int] = field(default_factory=list)
    pasted: list[int] = field(default_factory=list)
    time_s: float | None = None


@dataclass(slots=True)
class Agenda:
    """The calls of one closed turn on their way to results.

    Attributes:
        calls: in order; a `ToolError` text stands for a call that was refused unread.
        launched: calls that run on the tool pool, by index.
        at: index of the first call that has not taken effect.
        results, mounts, sources, pasted: what the tool segment will hold; `sources` are the
            threads to mount, once each, `pasted` the segments whose text is in the results.
        rewind_to: snapshot to go back to.
        outcomes: one word a call for the record.
    """

    calls: list[ToolCall | str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    launched: dict[int, PoolCall] = field(default_factory=dict)
    at: int = 0
    results: list[Result] = field(default_factory=list)
    mounts: list[int] = field(default_factory=list)
    sources: dict[int, Thread] = field(default_factory=dict)
    pasted: list[int] = field(default_factory=list)
    rewind_to: int | None = None
    outcomes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Thread:
    """A thread of an episode; `Episode` moves it, this class keeps its books.

    Attributes:
        base_segment, base_tokens: where it was forked, and how many tokens it began with that are
            not its own; `None` and 0 for the root.
        live: its own segments on its live chain, all closed: what others may read.
        snapshots: index k is snapshot k, the end of its k-th turn on the live chain.
        num_turns: turns taken, those on left branches counted; orders effects and seeds draws.
        ticket: the turn in flight.
        fed: text before the turn in flight; it becomes a segment once the turn has drawn a token,
            as a turn that ends before leaves the cursor without it.
        finished, read: a turn that ended and waits for its round, and what it says.
        waiting_for: threads that must end before its agenda goes on.
        last_turn: None, or why the turn in flight is its last: "turns", "tokens", or "summary",
            after which it goes on in a context of its own.
        origin, boundary: cursors at its fork and at its last closed turn, kept only where others
            may read it while it writes.
        fork_cursor: cursor without the mounts that its waiting turn has made, for later forks.
    """

    id: int
    parent: Thread | None
    task: str
    depth: int
    cursor: Any = None
    base_segment: int | None = None
    base_tokens: int = 0
    head: int | None = None
    num_tokens: int = 0
    live: list[int] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    num_turns: int = 0
    status: Status = "running"
    result: str | None = None
    ticket: int | None = None
    fed: Fed | None = None
    finished: Finished | None = None
    read: Turn | None = None
    agenda: Agenda | None = None
    waiting_for: frozenset[int] = frozenset()
    waiting_since: float = 0.0
    last_turn: str | None = None
    origin: Any = None
    boundary: Any = None
    fork_cursor: Any = None

    @property
    def ended(self) -> bool:
        """Whether it can write no more."""
        return self.status not in ("running", "waiting")

    @property
    def num_own(self) -> int:
        """Tokens since its fork that are on its live chain: what the window limits."""
        return self.num_tokens - self.base_tokens

    @property
    def turn(self) -> int:
        """Number of its last turn on the live chain."""
        return len(self.snapshots) - 1

    @property
    def ready(self) -> bool:
        """Whether its turn has closed and every tool call of it has returned."""
        return (
            self.status == "running"
            and self.agenda is not None
            and all(call.done for call in self.agenda.launched.values())
        )

    def lineage(self) -> Iterator[Thread]:
        """Go from this thread up to its root."""
        thread: Thread | None = self
        while thread is not None:
            yield thread
            thread = thread.parent

    def append(self, segment: int, num_tokens: int) -> None:
        """Put a segment at the end of the live chain."""
        self.head = segment
        self.live.append(segment)
        self.num_tokens += num_tokens

    def take_snapshot(self, *, closed: bool, thinking: bool) -> None:
        """Remember the end of the chain as the next snapshot."""
        assert self.head is not None, "a snapshot follows the thread's first text"
        self.snapshots.append(
            Snapshot(self.head, self.num_tokens, len(self.live), closed, thinking)
        )

    def go_back(self, turn: int) -> None:
        """Make snapshot `turn` the end of the live chain; later ones are gone."""
        del self.snapshots[turn + 1 :]
        snapshot = self.snapshots[turn]
        self.head, self.num_tokens = snapshot.segment, snapshot.num_tokens
        del self.live[snapshot.num_live :]

    def leave_context(self) -> None:
        """Forget the live chain; the thread goes on from a root of its own."""
        self.head, self.num_tokens = None, 0
        self.live, self.snapshots = [], []

    def record(self) -> ThreadRecord:
        """Give what the trace keeps of it."""
        return ThreadRecord(
            id=self.id,
            parent=None if self.parent is None else self.parent.id,
            task=self.task,
            status="running" if self.status == "waiting" else self.status,
            head=self.head if self.live else None,
        )


def waits_on(threads: Mapping[int, Thread], start: Thread, target: Thread) -> bool:
    """Whether `start` waits for `target`, itself or through other waiting threads."""
    seen: set[int] = set()
    stack = [start]
    while stack:
        thread = stack.pop()
        if thread.id == target.id:
            return True
        if thread.id in seen or thread.status != "waiting":
            continue
        seen.add(thread.id)
        stack.extend(threads[awaited] for awaited in thread.waiting_for)
    return False


def draw_seed(identity: Mapping[str, Any], thread: Thread) -> int:
    """Give the seed of a thread's next turn: no two turns of a run share one."""
    key = (*(identity[name] for name in _SEEDED), thread.id, thread.num_turns)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


_SEEDED = ("seed", "step", "prompt_id", "rollout")
