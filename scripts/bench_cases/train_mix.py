"""Episode mixes of the update, frozen at a dedup ratio (DESIGN §8).

    python -m scripts.bench_cases.train_mix        writes data/bench/mixes/train_r*.json.gz again

A root explores and forks children; they search, open, read a sibling, leave dead ends, and some
fork on; the root reads all of them and commits. A longer trunk under the same children is more
shared, so its length is what sets the ratio r of tokens in separate rows to unique tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from octopus_trl import Trace
from octopus_trl.train.rows import logical_tokens

from .mix import Mix, Turn, trace_of, write

MIXES = Path(__file__).parents[2] / "data" / "bench" / "mixes"
STEP = 128  # tokens by which the trunk grows until the ratio is met


@dataclass(frozen=True, slots=True)
class Shape:
    """What a mix is made of; lengths in tokens.

    Attributes:
        ratio: wanted dedup ratio r.
        children, turns: of the root, and turns of each.
        given, sampled: shortest and longest tool text and action of a child's turn.
        rewinds: children that leave a dead end, one more leaf each.
        forks: children that fork a child of their own.
        reads: children that read their neighbour.
    """

    ratio: float
    children: int
    turns: int
    given: tuple[int, int]
    sampled: tuple[int, int]
    rewinds: int
    forks: int
    reads: int


SHAPES = {
    "train_r3": Shape(3.0, 8, 4, (240, 560), (80, 200), rewinds=2, forks=1, reads=4),
    "train_r8": Shape(8.0, 10, 3, (60, 140), (40, 100), rewinds=5, forks=3, reads=6),
    "train_r11": Shape(11.0, 12, 3, (40, 80), (24, 56), rewinds=6, forks=4, reads=8),
}


def train_mix(name: str) -> Mix:
    """Make a mix: the shortest trunk whose ratio is the wanted one or more."""
    shape = SHAPES[name]
    trunk = STEP
    while dedup_ratio(trace_of(mix := _plan(name, shape, trunk), vocab_size=1000)) < shape.ratio:
        trunk += STEP
    return mix


def dedup_ratio(trace: Trace) -> float:
    """r: leaf chains with what each mounted, over unique tokens."""
    return logical_tokens(trace) / sum(trace.lengths)


def path_of(name: str) -> Path:
    """Where a mix is frozen."""
    return MIXES / f"{name}.json.gz"


def _plan(name: str, shape: Shape, trunk: int) -> Mix:
    """Plan the turns over a trunk of about that many tokens."""
    draw = random.Random(f"{name} 2026-11-30")

    def between(bounds: tuple[int, int]) -> int:
        low, high = bounds
        return low + int(draw.random() * (high - low + 1))

    turns = [Turn(0, 0, given=trunk, sampled=between(shape.sampled))]
    threads = shape.children
    last = 0
    for child in range(1, shape.children + 1):
        plan = [Turn(child, 1, between(shape.given), between(shape.sampled), fork=0)]

        def add(child: int = child, plan: list[Turn] = plan, **rest: object) -> None:
            lengths = between(shape.given), between(shape.sampled)
            plan.append(Turn(child, 1 + len(plan), *lengths, **rest))  # type: ignore[arg-type]

        for _ in range(1, shape.turns):
            add()
        if child <= shape.rewinds:
            add(keep=1)  # back to after its first turn
            add()
        if child > shape.children - shape.reads:
            add(reads=[child % shape.children + 1])
        if child <= shape.forks:
            threads += 1
            begin = len(plan) + 1
            turns.append(Turn(threads, begin, 40, between(shape.sampled), fork=child))
            turns.append(Turn(threads, begin + 1, between(shape.given), between(shape.sampled)))
            last = max(last, begin + 1)
        turns += plan
        last = max(last, len(plan))
    everyone = list(range(1, threads + 1))
    turns.append(Turn(0, last + 1, 60, between(shape.sampled), reads=everyone))
    turns.sort(key=lambda turn: (turn.round, turn.thread))
    return Mix(name, turns)


if __name__ == "__main__":
    for each in SHAPES:
        write(train_mix(each), path_of(each))
