"""What the engine did since it was made: tokens, calls, seconds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

PRIMITIVES = ("fork", "mount", "rewind")
NUMBERS = (
    "prefilled",
    "reused",
    "re_prefilled",
    "decoded",
    "replayed",
    "decode_steps",
    "prefill_passes",
    "preempted",
    "preempted_tokens",
    "turns",
    "opens",
    "forks",
    "mounts",
    "rewinds",
)


@dataclass(slots=True)
class Counters:
    """Plain counts; one token is counted under exactly one of the first five.

    Attributes:
        prefilled: given tokens that went through the model for the first time.
        reused: given tokens that an earlier prompt had left in the pools.
        re_prefilled: tokens that had been in the pools and were evicted or given back by a pause.
        decoded: sampled tokens, each counted when it was fed first.
        replayed: tokens stepped through again to rebuild a state; their pages stayed.
        preempted: times that a turn paused because pages ran out.
        preempted_tokens: those of `re_prefilled` that a pause cost.
        bytes_copied: bytes of keys, values and states that each primitive copied.
        seconds: wall-clock time in each kind of call.
    """

    prefilled: int = 0
    reused: int = 0
    re_prefilled: int = 0
    decoded: int = 0
    replayed: int = 0
    decode_steps: int = 0
    prefill_passes: int = 0
    preempted: int = 0
    preempted_tokens: int = 0
    turns: int = 0
    opens: int = 0
    forks: int = 0
    mounts: int = 0
    rewinds: int = 0
    bytes_copied: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PRIMITIVES, 0))
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time of a block to `seconds[what]`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - begin

    @property
    def hit_rate(self) -> float:
        """reused / (reused + prefilled), tokens that were prefilled again counted as prefilled."""
        given = self.reused + self.prefilled + self.re_prefilled
        return self.reused / given if given else 0.0

    def report(self) -> dict[str, Any]:
        """Give all of it as plain values."""
        return {
            **{name: getattr(self, name) for name in NUMBERS},
            "hit_rate": self.hit_rate,
            "bytes_copied": dict(self.bytes_copied),
            "seconds": dict(self.seconds),
        }
