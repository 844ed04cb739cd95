"""The owner mask gives the exact gradient; the naive sum over leaves does not.

A policy small enough to enumerate every episode, in float64: the root samples a token, two children
continue it, and the root samples again after it has read both. Each token is drawn from a softmax
over two words whose logits depend on the words before it, so the expected reward and the likelihood
of every episode are known in closed form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from octopus_trl.maths import objective
from octopus_trl.trace import Segment, ThreadRecord, Trace
from octopus_trl.train.loss import MEANS, PEAKS, LossSettings, row_loss
from octopus_trl.train.meter import Meter
from octopus_trl.train.rows import TokenRule, Tree, build_row, leaves_below
from tests.tolerances import FLOAT64
from tests.train.test_loss import Alone

SETTINGS = LossSettings(
    beta=0.0, epsilon_low=0.2, epsilon_high=0.2, weight_cap=None, correct_kl=True
)
LEAF = TokenRule("per_leaf")


def episode(words: Sequence[int]) -> Trace:
    """Root, two children below its turn, and the root again after it has read both."""
    trunk, first, second, last = words
    segments = [
        Segment(0, 0, None, "prompt", [0]),
        Segment(1, 0, 0, "action", [trunk]),
        Segment(2, 1, 1, "tool", [0]),
        Segment(3, 1, 2, "action", [first]),
        Segment(4, 2, 1, "tool", [0]),
        Segment(5, 2, 4, "action", [second]),
        Segment(6, 0, 1, "tool", [0], [2, 3, 4, 5]),
        Segment(7, 0, 6, "action", [last]),
    ]
    threads = [
        ThreadRecord(0, None, head=7),
        ThreadRecord(1, 0, head=3),
        ThreadRecord(2, 0, head=5),
    ]
    return Trace("e", "p", threads=threads, segments=segments).place().check()


def token_logps(theta: Tensor, words: Sequence[int]) -> Tensor:
    """[4] log-probs of the sampled tokens under tables of logits: what each has seen is its row."""
    trunk, first, second, last = words
    seen = [0, 1 + trunk, 3 + trunk, 5 + 4 * trunk + 2 * first + second]
    rows = torch.log_softmax(theta[seen], dim=1)
    return rows[torch.arange(4), torch.tensor([trunk, first, second, last])]


def policy() -> Tensor:
    draws = torch.Generator().manual_seed(0)
    return torch.randn(13, 2, generator=draws, dtype=torch.float64).requires_grad_()


def every_episode() -> Iterator[tuple[tuple[int, ...], float]]:
    for index, words in enumerate(itertools.product((0, 1), repeat=4)):
        yield words, math.sin(3.0 * index + 1.0)


def loss_gradient(theta: Tensor, words: Sequence[int], reward: float, rule: TokenRule) -> Tensor:
    """Differentiate our loss of one episode, times minus Z so that token weights are comparable."""
    row = build_row([Tree(episode(words), reward)], mounts="live", tokens=rule)
    loss = row_loss(
        token_logps(theta, words), row, SETTINGS, num_trees=1, meter=Meter(MEANS, PEAKS)
    )
    (gradient,) = torch.autograd.grad(loss, theta)
    return -float(row.normalisers[0]) * gradient


def close(left: Tensor, right: Tensor) -> bool:
    return bool((left - right).abs().max() < FLOAT64)


def test_likelihoods_of_all_episodes_sum_to_one() -> None:
    theta = policy()
    total = sum(token_logps(theta, words).sum().exp() for words, _ in every_episode())
    assert torch.as_tensor(total).item() == pytest.approx(1.0, abs=FLOAT64)


def test_owner_counts_give_the_gradient_of_the_episodes_log_likelihood() -> None:
    theta = policy()
    for words, reward in every_episode():
        (exact,) = torch.autograd.grad(token_logps(theta, words).sum(), theta)
        assert close(loss_gradient(theta, words, reward, TokenRule()), reward * exact)


def test_the_naive_sum_over_leaves_is_no_multiple_of_it() -> None:
    theta = policy()
    for words, _ in every_episode():
        (exact,) = torch.autograd.grad(token_logps(theta, words).sum(), theta)
        naive = loss_gradient(theta, words, 1.0, LEAF)
        best = (naive * exact).sum() / (exact * exact).sum()
        assert not close(naive, best * exact)
        # The trunk's own row of logits counts three times, the leaves once.
        assert close(naive[0], 3 * exact[0])
        assert close(naive[1:], exact[1:])


def test_only_owner_counts_give_the_gradient_of_the_expected_reward() -> None:
    theta = policy()
    value = sum(reward * token_logps(theta, words).sum().exp() for words, reward in every_episode())
    (exact,) = torch.autograd.grad(torch.as_tensor(value), theta)
    sums = []
    for rule in (TokenRule(), LEAF):
        with torch.no_grad():
            chances = [token_logps(theta, words).sum().exp() for words, _ in every_episode()]
        parts = [loss_gradient(theta, words, reward, rule) for words, reward in every_episode()]
        sums.append(sum(p * g for p, g in zip(chances, parts, strict=True)))
    assert close(torch.as_tensor(sums[0]), exact)
    biased = torch.as_tensor(sums[1])
    assert not close(biased, (biased * exact).sum() / (exact * exact).sum() * exact)


def test_a_trunk_above_three_leaves_counts_three_times() -> None:
    trace = episode((0, 1, 0, 1))
    assert leaves_below(trace).tolist() == [3, 3, 1, 1, 1, 1, 1, 1]
    row = build_row([Tree(trace, 1.0)], mounts="live", tokens=LEAF)
    assert row.counts.tolist() == [3.0, 1.0, 1.0, 1.0]
    assert row.normalisers.tolist() == [6.0]


def rewound() -> Trace:
    """A turn, a dead end of three tokens below it, and a turn after the rewind."""
    segments = [
        Segment(0, 0, None, "prompt", [0]),
        Segment(1, 0, 0, "action", [1], logps=[-0.5]),
        Segment(2, 0, 1, "tool", [2]),
        Segment(3, 0, 2, "action", [3, 4, 5], logps=[-1.0, -1.0, -1.0]),
        Segment(4, 0, 1, "tool", [6]),
        Segment(5, 0, 4, "action", [7, 8], logps=[-0.5, -0.5]),
    ]
    return Trace("e", "p", threads=[ThreadRecord(0, None, head=5)], segments=segments).place()


def test_without_rewound_loss_a_dead_end_is_in_neither_sum_nor_count() -> None:
    row = build_row([Tree(rewound(), 1.0)], mounts="live", tokens=TokenRule(rewound_loss=False))
    assert row.counts.tolist() == [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    assert row.normalisers.tolist() == [3.0]
    logps = torch.tensor(row.sampling_logps, requires_grad=True)
    meter = Meter(MEANS, PEAKS)
    row_loss(logps, row, SETTINGS, num_trees=1, meter=meter).backward()
    assert logps.grad is not None
    np.testing.assert_allclose(logps.grad, [-1 / 3, 0, 0, 0, -1 / 3, -1 / 3])
    # What is not trained on is measured all the same.
    assert "rollout_kl/rewound" in meter.reduce(Alone())


def test_an_episode_that_is_all_dead_end_gives_zero_and_not_nan() -> None:
    trace = rewound()
    trace.segments = [s for s in trace.segments if s.id in (0, 2, 3)]
    for index, segment in enumerate(trace.segments):
        segment.id, segment.parent = index, index - 1 if index else None
    trace.threads[0].head = 0
    row = build_row([Tree(trace, 1.0)], mounts="live", tokens=TokenRule(rewound_loss=False))
    assert row.normalisers.tolist() == [0.0]
    logps = torch.tensor(row.sampling_logps, requires_grad=True)
    loss = row_loss(logps, row, SETTINGS, num_trees=1, meter=Meter(MEANS, PEAKS))
    loss.backward()
    assert (loss.item(), logps.grad.tolist()) == (0.0, [0.0] * 3)  # type: ignore[union-attr]


@pytest.mark.parametrize("rule", [TokenRule(), LEAF, TokenRule(rewound_loss=False)])
def test_advantages_that_are_equal_cancel_under_every_rule(rule: TokenRule) -> None:
    advantages = objective.group_advantages(torch.ones(2), group_size=2)
    trees = [Tree(rewound(), float(advantage)) for advantage in advantages]
    row = build_row(trees, mounts="live", tokens=rule)
    logps = torch.tensor(row.sampling_logps, requires_grad=True)
    row_loss(logps, row, SETTINGS, num_trees=2, meter=Meter(MEANS, PEAKS)).backward()
    assert not logps.grad.any()  # type: ignore[union-attr]
