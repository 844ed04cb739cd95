"""Intervals by bootstrap, and the paired comparison of two evaluations of the same questions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octopus_trl.errors import ConfigError

RESAMPLES = 10_000


def bootstrap_interval(
    values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Give the 95 % percentile bootstrap interval of a mean (Efron 1979).

    Means of `resamples` samples of n values drawn with replacement; their 2.5 % and 97.5 %
    quantiles. The same seed gives the same interval.

    Raises:
        ConfigError: no value.
    """
    if not len(values):
        raise ConfigError("an interval needs at least one value, got 0")
    sample = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    block = max(1, 4_000_000 // len(sample))  # values drawn at once, so that memory stays small
    for lo in range(0, resamples, block):
        hi = min(lo + block, resamples)
        drawn = generator.integers(len(sample), size=(hi - lo, len(sample)))
        means[lo:hi] = sample[drawn].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def compare(
    first: Mapping[str, float], second: Mapping[str, float], *, seed: int = 0
) -> dict[str, Any]:
    """Compare two runs question by question.

    Args:
        first, second: score of each question, by id; only questions in both count.

    Returns:
        n, both means, difference second − first with its paired bootstrap interval, questions
        gained and lost (higher and lower in second), p (two-sided sign test over those), and how
        many questions only one run has.
    Raises:
        ConfigError: no question is in both.
    """
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise ConfigError("the two runs share no graded question: compare runs of one benchmark")
    steps = [second[name] - first[name] for name in shared]
    gained, lost = sum(step > 0 for step in steps), sum(step < 0 for step in steps)
    return {
        "n": len(shared),
        "first": sum(first[name] for name in shared) / len(shared),
        "second": sum(second[name] for name in shared) / len(shared),
        "difference": sum(steps) / len(steps),
        "interval_95": list(bootstrap_interval(steps, seed=seed)),
        "gained": gained,
        "lost": lost,
        "p": sign_test(gained, lost),
        "only_first": len(first.keys() - second.keys()),
        "only_second": len(second.keys() - first.keys()),
    }


def sign_test(gained: int, lost: int) -> float:
    """Give the two-sided p of `gained` against `lost` under equal odds (exact McNemar).

    p = min(1, 2 P[X <= min(gained, lost)]), X ~ Binomial(gained + lost, 1/2); 1 where both are 0.

    >>> sign_test(5, 0), sign_test(2, 2)
    (0.0625, 1.0)
    """
    total, least = gained + lost, min(gained, lost)
    tail = sum(math.comb(total, count) for count in range(least + 1))
    return float(min(1.0, 2 * tail / 2**total))
