"""The loss of one packed row, and what is measured on the way.

Per owned token t of tree i with ratio r_t = exp(logp_t − old_t), weight w_t, count m_t and
advantage A_t = A_i + credit of its thread:

    l_t = −w_t · min(r_t A_t, clip(r_t, 1 − ε_low, 1 + ε_high) A_t) + β · k3(t)        (paper Eq. 9)
    loss = (1/N) Σ_i (1/Z_i) Σ_{t in i} m_t l_t,    Z_i = Σ_{t in i} m_t

over the N trees of the whole batch, however they are packed. m_t is 1; the ablations count a token
once for each leaf below it, or a rewound one not at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octopus_trl.maths import objective as maths
from octopus_trl.train.meter import Meter
from octopus_trl.train.rows import WHERE, Floats, LossRow

KL = "rollout_kl"  # training against rollout log-probs, mean of e^d − 1 − d
MEANS = (
    f"{KL}/mean",
    *(f"{KL}/{where}" for where in WHERE),
    f"{KL}/after_rewind",
    "kl",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "importance_weight/mean",
    "importance_weight/capped",
    "ratio/mean",
    "advantage/mean",
    "advantage/abs",
    "tree/z",
    "entropy_estimate",
    "packing/row_tokens",
    "packing/left_out",
)
PEAKS = (f"{KL}/max_abs", "importance_weight/max", "ratio/max", "advantage/max_abs", "tree/z_max")


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Numbers of the objective (DESIGN §5).

    Attributes:
        beta: weight of the k3 divergence from the reference.
        epsilon_low, epsilon_high: the ratio is clipped to [1 − low, 1 + high].
        weight_cap: cap of the truncated importance weights, None for none.
        correct_kl: multiply the k3 term by the ratio, TRL's `use_bias_correction_kl`.
        weigh_trees: one importance weight a tree instead of one a token, see
            `maths.objective.truncated_importance_weights` for why that fails on long trees.
        old_is_rollout: the ratio divides by the log-probs as drawn, so the trainer's own are
            compared with them as they are now, drift since the generation included.
    """

    beta: float
    epsilon_low: float
    epsilon_high: float
    weight_cap: float | None
    correct_kl: bool
    weigh_trees: bool = False
    old_is_rollout: bool = False


def row_loss(
    logps: Tensor, row: LossRow, settings: LossSettings, *, num_trees: int, meter: Meter
) -> Tensor:
    """Give a row's part of the mean over `num_trees` trees, differentiable in `logps` [M].

    A row without owned tokens gives exactly 0 and a gradient of exactly 0.
    """
    device = logps.device
    old = logps.detach()
    if row.old_logps is not None:
        given = _tensor(row.old_logps, logps)
        old = torch.where(given.isfinite(), given, old)  # no record: as if drawn now
    sampled = torch.from_numpy(row.sampling_logps).to(device)
    tree_of_token = torch.from_numpy(row.tree_of_token).to(device)
    counts = _tensor(row.counts, logps)
    advantages = _tensor(row.advantages, logps)[tree_of_token] + _tensor(row.credits, logps)

    per_token = maths.clipped_surrogate(
        logps,
        old_logps=old,
        advantages=advantages,
        epsilon_low=settings.epsilon_low,
        epsilon_high=settings.epsilon_high,
    )
    weights = None
    if settings.weight_cap is not None:
        trees = tree_of_token if settings.weigh_trees else None
        weights = _importance_weights(old, sampled, settings.weight_cap, trees, row.num_trees)
        per_token = per_token * weights
    kl = None
    if settings.beta != 0.0 and row.ref_logps is not None:
        kl = maths.k3_kl(logps, ref_logps=_tensor(row.ref_logps, logps))
        if settings.correct_kl:
            kl = kl * torch.exp(logps - old)
        per_token = per_token + settings.beta * kl
    if row.num_owned.any():
        _measure(meter, row, settings, logps.detach(), old, sampled, advantages, weights, kl)
    else:
        per_token = per_token * 0.0
    return maths.tree_loss(
        per_token * counts,
        tree_index=tree_of_token,
        num_owned=_tensor(row.normalisers, logps),
        num_trees=num_trees,
    )


def measure_rollout_kl(meter: Meter, logps: Tensor, sampled: Tensor, row: LossRow) -> None:
    """Add d = train − rollout of each owned token, apart by what it saw and where it stands.

    Args:
        logps, sampled: [M]; NaN where nothing was recorded.
    """
    known = torch.isfinite(sampled).cpu().numpy()
    masks = {"mean": known, "after_rewind": known & row.after_rewind}
    masks |= {name: known & (row.where == index) for index, name in enumerate(WHERE)}
    for name, mask in masks.items():
        if not mask.any():
            continue
        at = torch.from_numpy(mask).to(logps.device)
        mean, largest = maths.rollout_training_kl(logps[at], rollout_logps=sampled[at])
        meter.add(f"{KL}/{name}", mean.item() * mask.sum(), mask.sum())
        if name == "mean":
            meter.peak(f"{KL}/max_abs", largest.item())
            meter.add("entropy_estimate", -sampled[at].sum().item(), mask.sum())


def _measure(
    meter: Meter,
    row: LossRow,
    settings: LossSettings,
    logps: Tensor,
    old: Tensor,
    sampled: Tensor,
    advantages: Tensor,
    weights: Tensor | None,
    kl: Tensor | None,
) -> None:
    count = len(row.targets)
    measure_rollout_kl(meter, logps if settings.old_is_rollout else old, sampled, row)
    ratio = (logps - old).exp()
    meter.add("ratio/mean", ratio.sum().item(), count)
    meter.peak("ratio/max", ratio.max().item())
    meter.add("advantage/mean", advantages.sum().item(), count)
    meter.add("advantage/abs", advantages.abs().sum().item(), count)
    meter.peak("advantage/max_abs", advantages.abs().max().item())
    meter.add("tree/z", row.normalisers.sum(), row.num_trees)
    meter.peak("tree/z_max", row.normalisers.max())
    low, high = maths.is_clipped(
        logps,
        old_logps=old,
        advantages=advantages,
        epsilon_low=settings.epsilon_low,
        epsilon_high=settings.epsilon_high,
    )
    meter.add("clip_ratio/low_mean", low.sum().item(), count)
    meter.add("clip_ratio/high_mean", high.sum().item(), count)
    meter.add("clip_ratio/region_mean", (low | high).sum().item(), count)
    if weights is not None and settings.weight_cap is not None:
        meter.add("importance_weight/mean", weights.sum().item(), count)
        meter.add("importance_weight/capped", (weights >= settings.weight_cap).sum().item(), count)
        meter.peak("importance_weight/max", weights.max().item())
    if kl is not None:
        meter.add("kl", kl.detach().sum().item(), count)


def _importance_weights(
    old: Tensor, sampled: Tensor, cap: float, tree_index: Tensor | None, num_trees: int
) -> Tensor:
    """Weigh tokens by min(p_old / p_sampled, cap); a token without a record weighs 1."""
    known = torch.isfinite(sampled)
    sampled = torch.where(known, sampled.to(old.dtype), old)
    return maths.truncated_importance_weights(
        old, sampling_logps=sampled, cap=cap, tree_index=tree_index, num_trees=num_trees
    )


def _tensor(values: Floats, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device, like.dtype)
