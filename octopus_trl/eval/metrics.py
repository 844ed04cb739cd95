"""Figures of recorded episodes: pure functions of traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from octopus_trl.errors import ConfigError
from octopus_trl.trace import Trace

Z_95 = 1.959963984540054  # two-sided 95 % quantile of the standard normal


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Give the 95 % Wilson score interval of a share.

    With p = s/n: (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n) (Wilson 1927).

    Raises:
        ConfigError: not 0 <= successes <= trials, or no trial.

    >>> low, high = wilson_interval(5, 10)
    >>> round(low, 3), round(high, 3)
    (0.237, 0.763)
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ConfigError(f"{successes} of {trials}: needs 0 <= successes <= trials, trials >= 1")
    share, spread = successes / trials, Z_95**2 / trials
    centre = share + spread / 2
    half = Z_95 * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return max(0.0, (centre - half) / (1 + spread)), min(1.0, (centre + half) / (1 + spread))


def turns_of(trace: Trace) -> tuple[int, int]:
    """Count an episode's turns: those whose every call was carried out, and all.

    A turn without a call, and one with a malformed or refused call, counts only among all.
    """
    turns = [event for event in trace.events if event.get("type") == "turn"]
    return sum(is_valid_turn(turn) for turn in turns), len(turns)


def is_valid_turn(event: dict[str, Any]) -> bool:
    """Whether a turn held calls and every one was carried out."""
    calls = event.get("calls", [])
    return bool(calls) and all(outcome == "ok" for _, outcome in calls)


def summarise(traces: Sequence[Trace]) -> dict[str, Any]:
    """Reduce episodes to the figures of an evaluation.

    Returns:
        n, accuracy with its 95 % interval, shares of episodes that forked, mounted and rewound,
        share of valid turns, and means an episode of threads, mounts and sampled tokens.
    Raises:
        ConfigError: no episode, or one without a reward.
    """
    if not traces:
        raise ConfigError("no episodes to summarise: the evaluation wrote none")
    if missing := [trace.episode_id for trace in traces if trace.reward is None]:
        raise ConfigError(f"{len(missing)} episodes have no reward, {missing[0]} first: grade them")
    num = len(traces)
    correct = sum(trace.reward == 1.0 for trace in traces)
    valid, turns = (sum(counts) for counts in zip(*map(turns_of, traces), strict=True))
    return {
        "n": num,
        "accuracy": correct / num,
        "interval_95": list(wilson_interval(correct, num)),
        "forked": _share(traces, "fork"),
        "mounted": sum(any(s.mounts for s in trace.segments) for trace in traces) / num,
        "rewound": _share(traces, "rewind"),
        "valid_turns": valid / turns if turns else 0.0,
        "threads": sum(len(trace.threads) for trace in traces) / num,
        "mounts": sum(bool(s.mounts) for trace in traces for s in trace.segments) / num,
        "sampled_tokens": sum(trace.num_owned for trace in traces) / num,
    }


def _share(traces: Sequence[Trace], kind: str) -> float:
    return sum(any(e.get("type") == kind for e in t.events) for t in traces) / len(traces)
