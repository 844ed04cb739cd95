"""The objective: advantages within a group, clipped ratios, and the mean over trees.

Axes: N trees (episodes), M owned tokens of all trees of a row. A token is owned by the thread that
sampled it and counts once, whatever the number of leaves below it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octopus_trl.errors import ConfigError
from octopus_trl.shapes import Logps


def outcome_reward(outcome: Tensor) -> Tensor:
    """Map an outcome y in [0, 1] to the reward ``R = 2 y - 1`` in [-1, 1]; NaN stays NaN.

    >>> outcome_reward(torch.tensor([0.0, 0.25, 1.0]))
    tensor([-1.0000, -0.5000,  1.0000])
    """
    return 2 * outcome - 1


def group_advantages(rewards: Tensor, *, group_size: int) -> Tensor:
    """Subtract from each reward the mean of the others of its group (README.md, Eq. 11).

    Args:
        rewards: [N] float, the rollouts of one prompt adjacent; NaN where an episode has no
            reward, which is not the same as 0.
        group_size: rollouts per prompt, at least 2.

    Returns:
        [N] in the dtype of rewards, not divided by any deviation. An episode without a reward is
        left out of the baselines of the others and gets 0; so does one with nothing to compare
        with. Equal rewards give exactly 0.

    Raises:
        ConfigError: group_size is below 2, or N is not a multiple of it.

    >>> group_advantages(torch.tensor([1.0, -1.0, float("nan"), -1.0]), group_size=4)
    tensor([ 2., -1.,  0., -1.])
    """
    if group_size < 2 or rewards.numel() % group_size:
        raise ConfigError(
            f"group_size={group_size} with {rewards.numel()} rewards: must be at least 2 and "
            "divide their number, since an advantage is relative to the other rollouts of a prompt"
        )
    grouped = rewards.double().view(-1, group_size)
    valid = ~grouped.isnan()
    # Differences to one of the rewards, so that equal rewards cancel without rounding.
    best = grouped.masked_fill(~valid, -torch.inf).amax(1, keepdim=True)
    difference = torch.where(valid, grouped - best, 0)
    others = valid.sum(1, keepdim=True) - 1
    baseline = (difference.sum(1, keepdim=True) - difference) / others.clamp(min=1)
    comparable = valid & (others > 0)
    return torch.where(comparable, difference - baseline, 0).view(-1).to(rewards.dtype)


def clipped_surrogate(
    logps: Logps,
    *,
    old_logps: Tensor,
    advantages: Tensor,
    epsilon_low: float,
    epsilon_high: float,
) -> Tensor:
    """Give the loss of each token under a clipped ratio (paper Eq. 9), to be minimised.

    ``-min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)`` with ``r = exp(logps - old_logps)``.

    Args:
        logps, old_logps, advantages: [M]; only `logps` gets a gradient.
        epsilon_low, epsilon_high: how far the ratio may move, unitless.

    Returns:
        [M] losses.
    """
    ratio = (logps - old_logps.detach()).exp()
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def is_clipped(
    logps: Logps,
    *,
    old_logps: Tensor,
    advantages: Tensor,
    epsilon_low: float,
    epsilon_high: float,
) -> tuple[Tensor, Tensor]:
    """Mark the tokens whose gradient `clipped_surrogate` cuts, for metrics.

    Returns:
        Two [M] bool: below ``1 - epsilon_low`` at a negative advantage, and above
        ``1 + epsilon_high`` at a positive one.
    """
    ratio = (logps.detach() - old_logps).exp()
    low = (ratio < 1 - epsilon_low) & (advantages < 0)
    high = (ratio > 1 + epsilon_high) & (advantages > 0)
    return low, high


def k3_kl(logps: Logps, *, ref_logps: Tensor) -> Tensor:
    """Estimate KL(policy, reference) per token: ``e^d - 1 - d`` with ``d = ref_logps - logps``.

    Args:
        logps, ref_logps: [M] of tokens that the policy sampled.

    Returns:
        [M], never negative.

    Source: Schulman, Approximating KL divergence (2020), estimator k3.
    """
    difference = ref_logps - logps
    return difference.expm1() - difference


def truncated_importance_weights(
    old_logps: Tensor,
    *,
    sampling_logps: Tensor,
    cap: float,
    tree_index: Tensor | None = None,
    num_trees: int = 0,
) -> Tensor:
    """Weigh tokens by how much likelier the trainer finds them than the sampler did, up to a cap.

    ``min(exp(old_logps - sampling_logps), cap)``, a constant to the gradient. With `tree_index`
    every token of a tree gets the weight of the whole, ``min(exp(sum of its differences), cap)``.

    That is the unbiased ratio of a tree and useless on a long one: differences of standard
    deviation s make its logarithm wander by ``s sqrt(Z)``, so that of Z = 100,000 tokens with the
    s = 0.02 of bfloat16 one tree counts e^6 times another, most fall to 0 and the rest stand at the
    cap. The effective sample size ``exp(-s^2 Z)`` is 4e-18 of the trees, where the weights of
    single tokens keep ``exp(-s^2)``, all but all of it, at the price of a bias of first order in s.

    Args:
        old_logps: [M] of the trainer before any update on these episodes.
        sampling_logps: [M] recorded when they were sampled.
        cap: above 0, unitless.
        tree_index: [M] int64, tree of each of its tokens; None weighs tokens one by one.
        num_trees: trees that `tree_index` counts.

    Returns:
        [M] weights in (0, cap].
    """
    difference = (old_logps - sampling_logps).detach()
    if tree_index is not None:
        sums = difference.new_zeros(num_trees, dtype=torch.float64)
        sums.index_add_(0, tree_index, difference.double())
        difference = sums[tree_index].to(difference.dtype)
    return difference.exp().clamp(max=cap)


def branch_credits(changes: Tensor, *, weight: float, limit: float | None = None) -> Tensor:
    """Turn what each branch of one episode changed into an addition to its tokens' advantage.

    ``weight (change_b - mean over branches)`` (DESIGN §5, branch credit): the additions sum to 0,
    so a lone branch gets 0.

    Args:
        changes: [B] nats or reward that the episode has more with branch b than without it; one
            that is not a number counts as 0.
        weight: the paper's lambda, at least 0.
        limit: changes are clipped to [-limit, limit] first; None for no clip.

    Returns:
        [B] float64.

    >>> branch_credits(torch.tensor([3.0, 0.0]), weight=0.1, limit=1.0)
    tensor([ 0.0500, -0.0500], dtype=torch.float64)
    """
    known = changes.double().nan_to_num(nan=0.0)
    if limit is not None:
        known = known.clamp(-limit, limit)
    return weight * (known - known.mean()) if known.numel() else known


def tree_loss(
    per_token: Tensor, *, tree_index: Tensor, num_owned: Tensor, num_trees: int | Tensor
) -> Tensor:
    """Average token losses within each tree, then over trees (README.md, Eq. 12).

    ``(1 / num_trees) sum_i (1 / Z_i) sum_{t in tree i} per_token[t]``. The tokens may be any
    part of a batch: the values of its parts, whatever the split, add up to the value of the whole.

    Args:
        per_token: [M] losses of owned tokens.
        tree_index: [M] int64, tree of each token within `num_owned`.
        num_owned: [N] owned tokens Z_i of each whole tree, or the sum of its token weights; a tree
            without any adds nothing.
        num_trees: trees of the whole optimisation step over all parts and ranks.

    Returns:
        A scalar; 0, and still differentiable, for no tokens.
    """
    share = 1 / num_owned.to(per_token.dtype).clamp(min=1)
    return (per_token * share[tree_index]).sum() / num_trees


def rollout_training_kl(train_logps: Logps, *, rollout_logps: Tensor) -> tuple[Tensor, Tensor]:
    """Compare what the trainer and the sampler think of the same tokens, in float64.

    ``e^d - 1 - d`` with ``d = train_logps - rollout_logps``; through ``expm1``, because the terms
    cancel down to d squared.

    Args:
        train_logps, rollout_logps: [M].

    Returns:
        The mean over tokens and the largest ``|d|``, float64 scalars without gradient; NaN for no
        tokens, so that nothing compared never reads as agreement.
    """
    difference = train_logps.detach().double() - rollout_logps.detach().double()
    if difference.numel() == 0:
        nothing = difference.new_tensor(torch.nan)
        return nothing, nothing
    return (difference.expm1() - difference).mean(), difference.abs().max()
