"""Episode mixes: frozen plans of synthetic episodes, and the traces that they stand for.

    python scripts/bench_cases/mix.py        writes data/bench/mixes/episode_v1.json.gz again

A mix says for each turn who takes it, what it forks from, goes back to and reads, and how many
tokens are given and sampled. `trace_of` gives the episode as a `Trace` with synthetic token ids, so
that what an engine should count follows from the record alone.
"""

from __future__ import annotations

import gzip
import io
import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from octopus_trl import Trace
from octopus_trl.trace import Segment, ThreadRecord

ROOT = Path(__file__).parents[2]
EPISODE_V1 = ROOT / "data" / "bench" / "mixes" / "episode_v1.json.gz"
CHILDREN, PAGE, PAGES = 10, 8_192, 3  # DESIGN §3: live children, page_tokens; pages a child keeps
READS, REWINDS = 14, 6  # by children; with the root's read of each child, 24 mounts


@dataclass(slots=True)
class Turn:
    """One turn of a thread.

    Attributes:
        round: turns of one round run at once, after its forks, then its rewinds, then its reads.
        fork: thread whose end of the round before is where this thread starts, at its first turn.
        keep: own turns that stay when the thread goes back first; None if it does not.
        reads: threads whose spans are mounted.
        given: tokens fed (prompt or tool text).
        sampled: tokens drawn after them.
    """

    thread: int
    round: int
    given: int
    sampled: int
    fork: int | None = None
    keep: int | None = None
    reads: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Mix:
    """A named plan; turns in order of round, then thread."""

    name: str
    turns: list[Turn]

    @property
    def num_rounds(self) -> int:
        """Rounds, one more than the last turn's."""
        return self.turns[-1].round + 1

    def of_round(self, index: int) -> list[Turn]:
        """Turns of one round."""
        return [turn for turn in self.turns if turn.round == index]

    def segments(self, index: int) -> list[tuple[int, int]]:
        """Ids in `trace_of` of what was given and what was drawn, for each turn of one round."""
        first = 2 * sum(turn.round < index for turn in self.turns)
        count = len(self.of_round(index))
        return [(first + i, first + count + i) for i in range(count)]

    def shortened(self, scale: int) -> Mix:
        """Divide every length by `scale`, leaving at least one token."""

        def short(turn: Turn) -> Turn:
            given, sampled = max(1, turn.given // scale), max(1, turn.sampled // scale)
            fields = asdict(turn) | {"given": given, "sampled": sampled}
            return Turn(**fields)

        return Mix(self.name, [short(turn) for turn in self.turns])


def episode_v1() -> Mix:
    """Make the mix: a root, 10 children, 30 pages of 8,192 tokens of which 6 are left by a rewind,
    and 24 mounts (14 by children of a sibling, 10 by the root).

    A child searches twice, opens a page and looks up two things in it, three times over; six of
    them leave their second page and open another. Reads of siblings lie after the first and after
    the last page.
    """
    draw = random.Random(20_261_130)

    def between(low: int, high: int) -> int:
        return low + int(draw.random() * (high - low + 1))

    turns = [Turn(0, 0, given=1_400, sampled=260)]
    last = 0
    for child in range(1, CHILDREN + 1):
        plan: list[Turn] = []

        def add(
            given: int, sampled: int, plan: list[Turn] = plan, child: int = child, **rest: Any
        ) -> None:
            plan.append(Turn(child, 1 + len(plan), given, sampled, **rest))

        add(between(60, 90), between(90, 150), fork=0)
        for page in range(PAGES):
            for _ in range(2):
                add(between(450, 750), between(80, 160))
            add(PAGE, between(120, 240))
            if page == 1 and child <= REWINDS:
                # Back to before the page: its own turn goes with it, a note takes its place.
                add(between(60, 100), between(80, 140), keep=len(plan) - 1)
                add(between(450, 750), between(80, 160))
                add(PAGE, between(120, 240))
            for _ in range(2):
                add(between(60, 140), between(40, 80))
            if page == 0:
                add(between(30, 50), between(110, 190), reads=[child % CHILDREN + 1])
        if child <= READS - CHILDREN:
            add(between(30, 50), between(110, 190), reads=[(child + 4) % CHILDREN + 1])
        add(between(40, 70), between(80, 140))
        turns += plan
        last = max(last, plan[-1].round)
    for index in range(CHILDREN // 2):
        pair = [2 * index + 1, 2 * index + 2]
        given, sampled = between(80, 120), between(150, 250)
        turns.append(Turn(0, last + 1 + index, given, sampled, reads=pair))
    turns.append(Turn(0, last + 1 + CHILDREN // 2, between(40, 70), between(120, 180)))
    turns.sort(key=lambda turn: (turn.round, turn.thread))
    return Mix("episode_v1", turns)


def dumps(mix: Mix) -> bytes:
    """Serialise a mix, byte for byte the same everywhere before compression."""
    record = {"schema": 1, "name": mix.name, "turns": [asdict(turn) for turn in mix.turns]}
    return (json.dumps(record, indent=1) + "\n").encode()


def write(mix: Mix, path: Path) -> None:
    """Write a mix, gzip-compressed without a time stamp."""
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as stream:
        stream.write(dumps(mix))
    path.write_bytes(buffer.getvalue())


def read(path: Path) -> Mix:
    """Read a mix."""
    record = json.loads(gzip.decompress(path.read_bytes()))
    return Mix(record["name"], [Turn(**turn) for turn in record["turns"]])


def trace_of(mix: Mix, vocab_size: int) -> Trace:
    """Give the episode that a mix plans: two segments a turn, what was given, then what was drawn.

    The trace is checked against DESIGN §2, so a plan that breaks a rule raises `TraceError`.
    """
    segments: list[Segment] = []
    live: dict[int, list[int]] = {}  # own segments of each thread since its fork
    heads: dict[int, int | None] = {}
    parents: dict[int, int | None] = {}
    seen: list[set[int]] = []  # what each segment sees, itself included

    def append(turn: Turn, kind: str, length: int, mounts: list[int]) -> None:
        index, parent = len(segments), heads[turn.thread]
        tokens = synthetic(index, length, vocab_size)
        segments.append(Segment(index, turn.thread, parent, kind, tokens, mounts))
        seen.append({index, *mounts, *(seen[parent] if parent is not None else ())})
        live[turn.thread].append(index)
        heads[turn.thread] = index

    for number in range(mix.num_rounds):
        turns = mix.of_round(number)
        for turn in turns:
            if turn.thread not in heads:
                parents[turn.thread] = turn.fork
                heads[turn.thread] = None if turn.fork is None else heads[turn.fork]
                live[turn.thread] = []
        for turn in turns:
            if turn.keep is not None:
                live[turn.thread] = live[turn.thread][: 2 * turn.keep]
                heads[turn.thread] = live[turn.thread][-1]
        spans = {thread: list(own) for thread, own in live.items()}
        for turn in turns:
            parent = heads[turn.thread]
            before = seen[parent] if parent is not None else set()
            read = {index for thread in turn.reads for index in spans[thread]}
            kind = "prompt" if parent is None else "tool"
            append(turn, kind, turn.given, sorted(read - before))
        for turn in turns:
            append(turn, "action", turn.sampled, [])
    threads = [
        ThreadRecord(thread, parents[thread], status="committed", head=heads[thread])
        for thread in sorted(heads)
    ]
    return Trace(mix.name, mix.name, segments=segments, threads=threads).place().check()


def synthetic(segment: int, length: int, vocab_size: int) -> list[int]:
    """Give made-up token ids that depend on segment and place alone (a 64-bit hash of both)."""
    bits = np.arange(length, dtype=np.uint64) + (np.uint64(segment + 1) << np.uint64(32))
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(multiplier)
    return ((bits >> np.uint64(33)) % np.uint64(vocab_size)).astype(np.int64).tolist()


if __name__ == "__main__":
    write(episode_v1(), EPISODE_V1)
