"""What the engine did since it was made: tokens, calls, seconds, bytes copied."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from octopus_trl.engine.copies import CopyMeter
from octopus_trl.engine.cursor import Cursor

PRIMITIVES = ("fork", "mount", "rewind")
COPIES = (*PRIMITIVES, "rerotate")  # a mount under that rule copies, and is counted apart
# Why a token that was not drawn went through the model -> the number that counts it.
REASONS = {
    "first_seen": "prefilled",
    "reencoded": "prefilled",
    "stale": "prefilled",
    "evicted": "re_prefilled",
    "paused": "re_prefilled",
    "branch": "branched",
    "spliced": "replayed",
    "no_state": "replayed",
    "state_dropped": "replayed",
}
NUMBERS = (
    "prefilled",
    "reused",
    "re_prefilled",
    "decoded",
    "replayed",
    "branched",
    "context_tokens",
    "decode_steps",
    "prefill_passes",
    "preempted",
    "turns",
    "opens",
    "forks",
    "mounts",
    "rewinds",
    "rerotated",
)


class Timed:
    """Adds the time of a block to a number of seconds; made for one block."""

    __slots__ = ("_begin", "_seconds", "_what")

    def __init__(self, seconds: defaultdict[str, float], what: str) -> None:
        self._seconds, self._what = seconds, what

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._what] += time.perf_counter() - self._begin


class Copying:
    """Adds the bytes copied in a block to a primitive's; made for one block."""

    __slots__ = ("_before", "_counters", "_meter", "_primitive")

    def __init__(self, counters: Counters, primitive: str) -> None:
        self._counters, self._primitive = counters, primitive
        self._meter: CopyMeter | None = None

    def __enter__(self) -> None:
        self._before = self._counters.bytes_moved
        if self._counters.audited:
            self._meter = CopyMeter()
            self._meter.__enter__()

    def __exit__(self, *error: object) -> None:
        copied = self._counters.bytes_moved - self._before
        if self._meter is not None:
            self._meter.__exit__(*error)
            copied = self._meter.num_bytes
        if copied:
            self._counters.bytes_copied[self._primitive] += copied


@dataclass(slots=True)
class Counters:
    """Plain counts.

    Attributes:
        prefilled: given tokens that went through the model for the first time.
        reused: prompt tokens that an earlier prompt had left in the pools.
        re_prefilled: tokens that had been in the pools and were evicted or given back by a pause.
        decoded: sampled tokens, each counted when it was fed first.
        replayed: tokens stepped through again to rebuild a state, or to let a reader's state take
            the same steps; their pages stayed.
        branched: of `reused`, those stepped through to make the state where two prompts part; once
            a place, so the third prompt that parts there finds it.
        misses: tokens of `prefilled`, `re_prefilled`, `branched` and `replayed` by reason:
            `first_seen` text, spans that a reader prefilled again (`reencoded`), text that was kept
            under older weights or before a sleep (`stale`), prompts `evicted`, turns that were
            `paused`, the `branch` of two prompts, spans that a reader's state stepped through
            (`spliced`), boundaries that never had a state (`no_state`) or had lost it
            (`state_dropped`).
        context_tokens: tokens that turns began after, prompt and earlier turns included: what flat
            re-prefill of every turn would put through the model. An opened prompt counts when it is
            opened, later text when it is fed, the rest of the chain when the turn draws first.
        preempted: times that a turn paused because pages ran out.
        rerotated: tokens whose keys were copied and moved for a reader.
        bytes_moved: bytes of states that were copied to host memory and back.
        bytes_copied: of those, the ones copied inside fork, mount and rewind; bytes of pages that
            copies for `position: rerotate` filled are under that name.
        audited: count in `bytes_copied` what tensor operations write instead, whoever asks for
            them, which costs more than the primitives themselves.
        seconds: wall-clock time in each kind of call.
    """

    prefilled: int = 0
    reused: int = 0
    re_prefilled: int = 0
    decoded: int = 0
    replayed: int = 0
    branched: int = 0
    context_tokens: int = 0
    decode_steps: int = 0
    prefill_passes: int = 0
    preempted: int = 0
    turns: int = 0
    opens: int = 0
    forks: int = 0
    mounts: int = 0
    rewinds: int = 0
    rerotated: int = 0
    bytes_moved: int = 0
    audited: bool = False
    misses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    bytes_copied: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COPIES, 0))
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def timed(self, what: str) -> Timed:
        """Add the time of a block to `seconds[what]`."""
        return Timed(self.seconds, what)

    def copying(self, primitive: str) -> Copying:
        """Add the bytes that are copied in a block to `bytes_copied[primitive]`."""
        return Copying(self, primitive)

    def miss(self, reason: str, count: int) -> None:
        """Count tokens that went through the model without being drawn."""
        self.misses[reason] += count
        number = REASONS[reason]
        setattr(self, number, getattr(self, number) + count)

    def extended(self, cursor: Cursor, count: int) -> None:
        """Count text that was appended to a cursor between turns."""
        self.miss("first_seen", count)
        self.context_tokens += count
        cursor._counted += count

    def reencoded(self, count: int) -> None:
        """Count a span's text that a reader prefilled again."""
        self.miss("reencoded", count)
        self.context_tokens += count

    def moved(self, count: int, num_bytes: int) -> None:
        """Count keys and values that were copied for a reader at another position."""
        self.rerotated += count
        self.bytes_copied["rerotate"] += num_bytes

    def began(self, cursor: Cursor, given: int) -> None:
        """Count the context of a turn that draws its first token, `given` tokens fed with it."""
        self.context_tokens += cursor.num_tokens - cursor._counted + given
        cursor._counted = 0

    @property
    def hit_rate(self) -> float:
        """Share of `context_tokens` that did not go through the model: reused / (reused + computed)
        over turns (DESIGN §4), computed being the sum of `misses`.
        """
        computed = sum(self.misses.values())
        total = self.context_tokens
        return max(0.0, 1.0 - computed / total) if total else 0.0

    def report(self) -> dict[str, Any]:
        """Give all of it as plain values."""
        return {
            **{name: getattr(self, name) for name in NUMBERS},
            "hit_rate": self.hit_rate,
            "misses": dict(self.misses),
            "bytes_copied": dict(self.bytes_copied),
            "seconds": dict(self.seconds),
        }
