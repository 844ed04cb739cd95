"""Figures of recorded episodes and of probes: the public place of every metric.

The counts of an evaluation are defined here; the mechanism's metrics have a module a noun:
`mechanism` (likelihood on probes), `hijacking` (turns that were drawn), `extra_kv` (storage) and
`mount_kl` (rollout against training).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octopus_trl.errors import ConfigError
from octopus_trl.eval.extra_kv import extra_kv
from octopus_trl.eval.hijacking import hijack_share
from octopus_trl.eval.intervals import (
    Estimate,
    mean,
    ratio,
    share,
    share_by_example,
    wilson_interval,
)
from octopus_trl.eval.mechanism import (
    argmax_agreement,
    hijack_choice,
    identifier_recall,
    policy_drift,
    retained_information,
)
from octopus_trl.eval.mount_kl import mount_kl
from octopus_trl.trace import Trace

__all__ = [
    "Estimate",
    "argmax_agreement",
    "extra_kv",
    "hijack_choice",
    "hijack_share",
    "identifier_recall",
    "is_valid_turn",
    "mean",
    "mount_kl",
    "policy_drift",
    "ratio",
    "retained_information",
    "share",
    "share_by_example",
    "summarise",
    "turns_of",
    "wilson_interval",
]


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
