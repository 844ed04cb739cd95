"""A figure with its interval: shares by Wilson, means and ratios by bootstrap over examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octopus_trl.errors import ConfigError
from octopus_trl.eval.paired import RESAMPLES, bootstrap_interval

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
    low, high = (centre - half) / (1 + spread), (centre + half) / (1 + spread)
    return low if successes else 0.0, high if successes < trials else 1.0  # there rounding is off


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, its 95 % interval and the number of examples behind it.

    Attributes:
        value: None where it is not defined, as a ratio over nothing.
        interval: None where the value is, where a bootstrap sample leaves it undefined, or where
            there is one example alone to draw from.
    """

    value: float | None
    interval: tuple[float, float] | None
    n: int

    def as_json(self) -> dict[str, Any]:
        """Give it as a JSON object."""
        interval = None if self.interval is None else list(self.interval)
        return {"value": self.value, "interval_95": interval, "n": self.n}


def share(outcomes: Sequence[bool]) -> Estimate:
    """Give the share of examples that are true, with Wilson's interval."""
    num = len(outcomes)
    if not num:
        return Estimate(None, None, 0)
    right = sum(map(bool, outcomes))
    return Estimate(right / num, wilson_interval(right, num), num)


def mean(values: Sequence[float]) -> Estimate:
    """Give the mean over examples, with the percentile bootstrap over them."""
    if not len(values):
        return Estimate(None, None, 0)
    interval = bootstrap_interval(values) if len(values) > 1 else None
    return Estimate(float(np.mean(values)), interval, len(values))


def share_by_example(parts: Sequence[int], wholes: Sequence[int]) -> Estimate:
    """Give Σ parts / Σ wholes of counts that an example has several of, as turns of an episode.

    Bootstrap over examples, as `ratio`. Where none or all of the counts are parts, nothing that is
    drawn differs: then Wilson's interval over the examples that have a count at all.
    """
    figure = ratio(parts, wholes)
    if figure.value not in (0.0, 1.0):
        return figure
    num = sum(whole > 0 for whole in wholes)
    return Estimate(figure.value, wilson_interval(num * int(figure.value), num), figure.n)


def ratio(parts: Sequence[float], wholes: Sequence[float], *, seed: int = 0) -> Estimate:
    """Give Σ parts / Σ wholes over examples, with the percentile bootstrap over them.

    An example brings its part and its whole together, so that what belongs to one example (turns of
    an episode, tokens of a probe) is drawn or left as one. Where samples' wholes are not all on one
    side of 0 the ratio runs through infinity between them and has no interval.

    Raises:
        ConfigError: the two are not of one length.
    """
    top, bottom = (np.asarray(each, dtype=np.float64) for each in (parts, wholes))
    if top.shape != bottom.shape:
        raise ConfigError(f"{len(top)} parts of {len(bottom)} wholes: one of each an example")
    num = len(top)
    if not num or bottom.sum() == 0:
        return Estimate(None, None, num)
    value = float(top.sum() / bottom.sum())
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(num, np.full(num, 1 / num), size=RESAMPLES)
    sums = counts @ bottom
    if num == 1 or sums.min() * sums.max() <= 0:
        return Estimate(value, None, num)
    low, high = np.quantile((counts @ top) / sums, [0.025, 0.975])
    return Estimate(value, (float(low), float(high)), num)
