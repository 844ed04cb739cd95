"""Figures of recorded episodes."""

from __future__ import annotations

import pytest

from octopus_trl.errors import ConfigError
from octopus_trl.eval.metrics import summarise, turns_of, wilson_interval
from octopus_trl.trace import Segment, ThreadRecord, Trace


def episode(reward: float | None, *, mounts: bool, calls: list[list[list[str]]]) -> Trace:
    segments = [
        Segment(0, 0, None, "prompt", [1, 2]),
        Segment(1, 0, 0, "action", [3, 4, 5]),
        Segment(2, 1, 1, "tool", [6]),
        Segment(3, 0, 1, "tool", [7], [2] if mounts else []),
    ]
    threads = [ThreadRecord(0, None, head=3), ThreadRecord(1, 0, head=2)]
    events = [{"type": "turn", "thread": 0, "calls": turn} for turn in calls]
    trace = Trace("e", "p", reward=reward, threads=threads, segments=segments, events=events)
    return trace.place().check()


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_the_interval_is_wilsons(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("successes", "trials"), [(1, 0), (-1, 3), (4, 3)])
def test_an_impossible_count_is_refused(successes: int, trials: int) -> None:
    with pytest.raises(ConfigError, match="trials"):
        wilson_interval(successes, trials)


def test_a_turn_counts_as_valid_only_if_every_call_was_carried_out() -> None:
    calls = [[["fork", "ok"], ["fork", "ok"]], [["open", "ok"], ["open", "refused"]], []]
    assert turns_of(episode(1.0, mounts=True, calls=calls)) == (1, 3)


def test_a_summary_counts_episodes_not_events() -> None:
    traces = [
        episode(1.0, mounts=True, calls=[[["fork", "ok"]]]),
        episode(0.0, mounts=False, calls=[[["fork", "ok"]], [["nope", "unknown"]]]),
    ]
    figures = summarise(traces)
    assert figures["n"] == 2
    assert figures["accuracy"] == figures["mounted"] == 0.5
    assert figures["valid_turns"] == pytest.approx(2 / 3)
    assert figures["sampled_tokens"] == 3


def test_an_ungraded_episode_is_refused() -> None:
    with pytest.raises(ConfigError, match="no reward"):
        summarise([episode(None, mounts=True, calls=[])])
    with pytest.raises(ConfigError, match="no episodes"):
        summarise([])
