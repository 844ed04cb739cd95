"""The loss of rows: independent of packing, zero where nothing is learnt, never NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from octopus_trl.maths import objective
from octopus_trl.train.loss import MEANS, PEAKS, LossSettings, row_loss
from octopus_trl.train.meter import Meter
from octopus_trl.train.rows import LossRow, Tree, build_row, empty_row
from tests.tiny import random_trace

SETTINGS = LossSettings(
    beta=0.0, epsilon_low=0.2, epsilon_high=0.3, weight_cap=2.0, correct_kl=True
)


class Alone:
    """An accelerator of one process."""

    num_processes = 1


def meter() -> Meter:
    return Meter(MEANS, PEAKS)


def trees(count: int = 4) -> list[Tree]:
    advantages = [1.0, -0.5, 2.0, -2.5]
    return [
        Tree(random_trace(seed, roots=1, prompt=range(9), logps=True), advantages[seed])
        for seed in range(count)
    ]


def logps_of(row: LossRow, shift: float = 0.1) -> torch.Tensor:
    values = row.sampling_logps + shift * np.sin(np.arange(len(row.targets)))
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def loss_of(row: LossRow, settings: LossSettings = SETTINGS, **options: Any) -> torch.Tensor:
    return row_loss(
        options.pop("logps", None) if "logps" in options else logps_of(row),
        row,
        settings,
        num_trees=options.pop("num_trees", row.num_trees),
        meter=options.pop("meter", meter()),
    )


def test_loss_is_the_mean_over_trees_of_the_mean_over_their_tokens() -> None:
    row = build_row(trees(), mounts="live")
    row.old_logps = row.sampling_logps.copy()
    found = loss_of(row, replace(SETTINGS, weight_cap=None))
    ratio = np.exp(logps_of(row).detach().numpy() - row.sampling_logps)
    expected = 0.0
    for index, tree in enumerate(trees()):
        r = ratio[row.tree_of_token == index]
        a = tree.advantage
        expected += np.mean(-np.minimum(r * a, np.clip(r, 0.8, 1.3) * a)) / 4
    assert found.item() == pytest.approx(expected, abs=1e-12)


def test_loss_does_not_depend_on_how_trees_are_packed() -> None:
    whole = build_row(trees(), mounts="live")
    parts = [build_row([tree], mounts="live") for tree in trees()]
    logps = logps_of(whole)
    split = logps.split(whole.num_owned.tolist())
    together = loss_of(whole, logps=logps)
    apart = sum(
        loss_of(row, logps=part, num_trees=4) for row, part in zip(parts, split, strict=True)
    )
    assert torch.equal(torch.autograd.grad(together, logps)[0] != 0, logps == logps)
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-12)


def test_on_policy_gradient_is_advantage_over_owned_tokens_and_trees() -> None:
    row = build_row(trees(), mounts="live")
    logps = logps_of(row, shift=0.0)
    loss_of(row, logps=logps).backward()
    expected = -row.advantages[row.tree_of_token] / row.num_owned[row.tree_of_token] / 4
    np.testing.assert_allclose(logps.grad.numpy(), expected, atol=1e-12)  # type: ignore[union-attr]


@pytest.mark.parametrize("advantage", [0.0, 1.0])
def test_an_empty_row_gives_zero_loss_and_zero_gradient(advantage: float) -> None:
    row = empty_row()
    row.advantages[:] = advantage
    logps = torch.tensor([-3.0], requires_grad=True)
    found = loss_of(row, logps=logps, num_trees=3)
    found.backward()
    assert (found.item(), logps.grad.tolist()) == (0.0, [0.0])  # type: ignore[union-attr]


def test_equal_rewards_give_a_gradient_of_exactly_zero() -> None:
    advantages = objective.group_advantages(torch.ones(4), group_size=4)
    some = [Tree(tree.trace, float(a)) for tree, a in zip(trees(), advantages, strict=True)]
    row = build_row(some, mounts="live")
    logps = logps_of(row)
    loss_of(row, logps=logps).backward()
    assert not logps.grad.any()  # type: ignore[union-attr]


def test_a_rollout_without_a_reward_moves_nothing_and_is_in_no_baseline() -> None:
    rewards = torch.tensor([float("nan"), 1.0, -1.0, float("nan")])
    advantages = objective.group_advantages(rewards, group_size=4)
    assert advantages.tolist() == [0.0, 2.0, -2.0, 0.0]
    nothing = objective.group_advantages(torch.full((4,), float("nan")), group_size=4)
    assert nothing.tolist() == [0.0] * 4


def test_importance_weights_are_capped_and_constant() -> None:
    row = build_row(trees(1), mounts="live")
    row.old_logps = row.sampling_logps + np.log(5.0)
    logps = torch.tensor(row.old_logps, requires_grad=True)
    seen = meter()
    found = loss_of(row, logps=logps, meter=seen)
    assert found.item() == pytest.approx(-2.0 * row.advantages[0])
    figures = seen.reduce(Alone())
    assert figures["importance_weight/mean"] == pytest.approx(2.0)
    assert figures["importance_weight/capped"] == 1.0


def test_tokens_without_a_recorded_log_prob_weigh_one_and_count_in_no_kl() -> None:
    trace = random_trace(0, roots=1, logps=False)
    row = build_row([Tree(trace, 1.0)], mounts="live")
    seen = meter()
    logps = torch.full((len(row.targets),), -2.0, dtype=torch.float64, requires_grad=True)
    assert loss_of(row, logps=logps, meter=seen).item() == pytest.approx(-1.0)
    assert "rollout_kl/mean" not in seen.reduce(Alone())


def test_reference_term_is_beta_times_k3() -> None:
    row = build_row(trees(1), mounts="live")
    row.ref_logps = row.sampling_logps - 0.4
    row.advantages[:] = 0.0
    logps = torch.tensor(row.sampling_logps, requires_grad=True)
    seen = meter()
    found = loss_of(row, replace(SETTINGS, beta=0.5), logps=logps, meter=seen)
    k3 = np.expm1(-0.4) + 0.4
    assert found.item() == pytest.approx(0.5 * k3)
    assert seen.reduce(Alone())["kl"] == pytest.approx(k3)


def test_rollout_kl_is_exact_for_tiny_differences_and_apart_by_place() -> None:
    row = build_row(trees(1), mounts="live")
    d = np.where(row.where == 1, 2e-6, 1e-6)
    logps = torch.tensor(row.sampling_logps + d, requires_grad=True)
    seen = meter()
    loss_of(row, logps=logps, meter=seen)
    figures = seen.reduce(Alone())
    assert figures["rollout_kl/unmounted"] == pytest.approx(0.5e-12, rel=1e-3)
    assert figures["rollout_kl/mounted"] == pytest.approx(2e-12, rel=1e-3)
    assert figures["rollout_kl/max_abs"] == pytest.approx(2e-6, rel=1e-3)


def test_clipped_tokens_are_counted_by_side() -> None:
    row = build_row(trees(2), mounts="live")
    row.old_logps = row.sampling_logps.copy()
    logps = torch.tensor(row.sampling_logps, dtype=torch.float64)
    logps[0] += 1.0  # advantage above 0
    logps[int(row.num_owned[0])] -= 1.0  # advantage below 0
    seen = meter()
    loss_of(row, logps=logps.requires_grad_(), meter=seen)
    figures = seen.reduce(Alone())
    count = len(row.targets)
    assert figures["clip_ratio/high_mean"] == pytest.approx(1 / count)
    assert figures["clip_ratio/low_mean"] == pytest.approx(1 / count)
    assert figures["clip_ratio/region_mean"] == pytest.approx(2 / count)
