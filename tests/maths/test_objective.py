"""The objective, by hand-made numbers and by the invariances that training relies on."""

from __future__ import annotations

import math

import pytest
import torch

from octopus_trl.errors import ConfigError
from octopus_trl.maths.objective import (
    branch_credits,
    clipped_surrogate,
    group_advantages,
    is_clipped,
    k3_kl,
    outcome_reward,
    rollout_training_kl,
    tree_loss,
    truncated_importance_weights,
)

NAN = float("nan")


def test_outcome_becomes_plus_or_minus_one() -> None:
    assert torch.equal(outcome_reward(torch.tensor([0.0, 1.0])), torch.tensor([-1.0, 1.0]))
    assert bool(outcome_reward(torch.tensor([NAN])).isnan().all())


def test_an_advantage_is_the_reward_less_the_mean_of_the_others() -> None:
    rewards = torch.randn(3 * 5, dtype=torch.float64)
    advantages = group_advantages(rewards, group_size=5)
    for index, reward in enumerate(rewards):
        group = index // 5 * 5
        others = [rewards[other] for other in range(group, group + 5) if other != index]
        assert advantages[index].item() == pytest.approx(float(reward - sum(others) / 4), abs=1e-12)


@pytest.mark.parametrize("value", [0.1, -1.0, 1e9 / 3])
def test_equal_rewards_give_exactly_nothing(value: float) -> None:
    advantages = group_advantages(torch.full((7,), value), group_size=7)
    assert torch.equal(advantages, torch.zeros(7))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, -1.0, NAN, -1.0], [2.0, -1.0, 0.0, -1.0]),
        ([NAN, 1.0, NAN, NAN], [0.0, 0.0, 0.0, 0.0]),
        ([NAN, NAN, NAN, NAN], [0.0, 0.0, 0.0, 0.0]),
        ([0.0, 0.0, NAN, 1.0], [-0.5, -0.5, 0.0, 1.0]),
    ],
)
def test_a_missing_reward_is_not_a_zero(rewards: list[float], expected: list[float]) -> None:
    assert group_advantages(torch.tensor(rewards), group_size=4).tolist() == expected


@pytest.mark.parametrize(("number", "size"), [(4, 1), (5, 2), (3, 4)])
def test_a_group_that_cannot_be_compared_is_refused(number: int, size: int) -> None:
    with pytest.raises(ConfigError, match="group_size"):
        group_advantages(torch.zeros(number), group_size=size)


def test_the_ratio_stops_paying_past_the_clip() -> None:
    ratios = torch.tensor([0.5, 0.9, 1.0, 1.1, 2.0] * 2, dtype=torch.float64)
    advantages = torch.tensor([1.0] * 5 + [-1.0] * 5, dtype=torch.float64)
    logps = ratios.log().requires_grad_()
    named = {
        "old_logps": torch.zeros(10, dtype=torch.float64),
        "advantages": advantages,
        "epsilon_low": 0.2,
        "epsilon_high": 0.3,
    }
    loss = clipped_surrogate(logps, **named)  # type: ignore[arg-type]
    expected = [-0.5, -0.9, -1.0, -1.1, -1.3, 0.8, 0.9, 1.0, 1.1, 2.0]
    assert loss.tolist() == pytest.approx(expected)
    (grad,) = torch.autograd.grad(loss.sum(), logps)
    low, high = is_clipped(logps, **named)  # type: ignore[arg-type]
    assert torch.equal(grad == 0, low | high)
    assert low.tolist() == [False] * 5 + [True] + [False] * 4
    assert high.tolist() == [False] * 4 + [True] + [False] * 5


def test_the_first_step_is_the_policy_gradient() -> None:
    logps = torch.randn(7, dtype=torch.float64, requires_grad=True)
    advantages = torch.randn(7, dtype=torch.float64)
    loss = clipped_surrogate(
        logps,
        old_logps=logps,
        advantages=advantages,
        epsilon_low=0.2,
        epsilon_high=0.2,
    )
    (grad,) = torch.autograd.grad(loss.sum(), logps)
    torch.testing.assert_close(grad, -advantages, atol=1e-15, rtol=0)


def test_k3_is_zero_at_equality_and_positive_elsewhere() -> None:
    logps = torch.randn(50, dtype=torch.float64)
    assert torch.equal(k3_kl(logps, ref_logps=logps), torch.zeros(50, dtype=torch.float64))
    assert bool((k3_kl(logps, ref_logps=logps + 1e-3) > 0).all())


def test_k3_averages_to_the_divergence() -> None:
    p, r = torch.rand(2, 13, dtype=torch.float64).softmax(-1)
    estimate = (p * k3_kl(p.log(), ref_logps=r.log())).sum()
    assert estimate.item() == pytest.approx(float((p * (p / r).log()).sum()), abs=1e-12)


def test_importance_weights_are_capped_constants() -> None:
    old = torch.tensor([0.0, 1.0, -1.0], requires_grad=True)
    weights = truncated_importance_weights(old, sampling_logps=torch.zeros(3), cap=2.0)
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-1)])
    assert not weights.requires_grad


def test_a_trunk_counts_once_and_a_long_tree_as_much_as_a_short_one() -> None:
    per_token = torch.tensor([1.0, 2.0, 3.0, 10.0])
    loss = tree_loss(
        per_token,
        tree_index=torch.tensor([0, 0, 0, 2]),
        num_owned=torch.tensor([3, 0, 1]),
        num_trees=3,
    )
    assert loss.item() == pytest.approx((2.0 + 0.0 + 10.0) / 3)


def test_the_loss_does_not_depend_on_how_tokens_are_packed() -> None:
    per_token = torch.randn(31, dtype=torch.float64)
    tree_index = torch.randint(0, 5, (31,))
    num_owned = torch.bincount(tree_index, minlength=5)
    whole = tree_loss(per_token, tree_index=tree_index, num_owned=num_owned, num_trees=5)
    order = torch.randperm(31)
    parts = [
        tree_loss(per_token[part], tree_index=tree_index[part], num_owned=num_owned, num_trees=5)
        for part in order.split(7)
    ]
    assert float(sum(parts)) == pytest.approx(float(whole), abs=1e-14)


def test_no_owned_tokens_give_a_loss_of_zero_with_a_gradient() -> None:
    per_token = torch.zeros(0, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    loss = tree_loss(per_token, tree_index=none, num_owned=torch.tensor([0]), num_trees=1)
    loss.backward()
    assert loss.item() == 0
    assert per_token.grad is not None


def test_rollout_training_kl_keeps_its_digits() -> None:
    rollout = -torch.rand(1000)
    train = rollout + 1e-5 * torch.randn(1000)
    mean, largest = rollout_training_kl(train, rollout_logps=rollout)
    difference = train.double() - rollout.double()
    assert mean.item() == pytest.approx(float((difference**2 / 2).mean()), rel=1e-4)
    assert largest.item() == float(difference.abs().max())
    assert mean.dtype == torch.float64


def test_nothing_compared_is_not_agreement() -> None:
    mean, largest = rollout_training_kl(torch.zeros(0), rollout_logps=torch.zeros(0))
    assert math.isnan(mean.item())
    assert math.isnan(largest.item())


def test_branch_credits_sum_to_zero_and_a_lone_branch_gets_none() -> None:
    changes = torch.tensor([3.0, -5.0, 0.25])
    found = branch_credits(changes, weight=0.1, limit=1.0)
    assert found.tolist() == pytest.approx([0.1 * (x - 0.25 / 3) for x in (1.0, -1.0, 0.25)])
    assert found.sum().item() == pytest.approx(0.0, abs=1e-12)
    free = branch_credits(changes, weight=0.1)
    assert free.tolist() == pytest.approx([0.1 * (x + 1.75 / 3) for x in (3.0, -5.0, 0.25)])
    assert branch_credits(torch.tensor([7.0]), weight=0.1).tolist() == [0.0]
    assert branch_credits(torch.empty(0), weight=0.1).tolist() == []


def test_a_change_that_is_no_number_counts_as_none() -> None:
    changes = torch.tensor([float("nan"), 1.0])
    assert branch_credits(changes, weight=1.0).tolist() == [-0.5, 0.5]


def test_one_weight_a_tree_is_the_capped_product_of_its_tokens() -> None:
    tree_index = torch.tensor([0, 0, 1, 0])
    difference = torch.tensor([0.1, 0.2, -0.5, -0.4], dtype=torch.float64)
    found = truncated_importance_weights(
        difference, sampling_logps=torch.zeros(4), cap=0.9, tree_index=tree_index, num_trees=2
    )
    expected = [min(math.exp(-0.1), 0.9), math.exp(-0.5)]
    assert found.tolist() == pytest.approx([expected[tree] for tree in tree_index])


def test_one_weight_a_tree_leaves_almost_no_tree_where_trees_are_long() -> None:
    draws = torch.Generator().manual_seed(0)
    trees, length, noise = 64, 20_000, 0.02
    difference = noise * torch.randn(trees * length, generator=draws, dtype=torch.float64)
    tree_index = torch.arange(trees).repeat_interleave(length)

    def effective_share(weights: torch.Tensor) -> float:
        return (weights.sum() ** 2 / (weights**2).sum() / len(weights)).item()

    nothing = torch.zeros_like(difference)
    by_token = truncated_importance_weights(difference, sampling_logps=nothing, cap=1e9)
    by_tree = truncated_importance_weights(
        difference, sampling_logps=nothing, cap=1e9, tree_index=tree_index, num_trees=trees
    )
    assert effective_share(by_token) > 0.999
    assert effective_share(by_tree) < 0.1
