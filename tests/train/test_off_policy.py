"""Generations that outlive an update: ratios of 1 at first, then what hand computation gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octopus_trl import score_traces
from octopus_trl.maths import objective
from octopus_trl.train.rows import sampled_logps
from tests.train.runs import Gradients, asked_rows, difference, logged, make_trainer, replayed

REUSE: dict[str, Any] = {"num_iterations": 2, "learning_rate": 0.02, "epsilon": 0.2}


def owned(model: Any, trace: Any) -> torch.Tensor:
    """Score the sampled tokens of a trace, in the order of its segments."""
    (scores,) = score_traces(model, [trace])
    parts = [scores[s.id] for s in trace.segments if s.kind == "action"]
    return torch.cat(parts)


def run(out: Path, **settings: Any) -> tuple[Any, list[Any]]:
    keep = Gradients()
    trainer = make_trainer(out, None, asked_rows(2), callbacks=[keep], **{**REUSE, **settings})
    with replayed():
        trainer.train()
    return trainer, keep.steps


@pytest.mark.parametrize("source", ["recompute", "rollout"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_second_update_is_that_of_hand_computed_ratios_and_weights(
    tmp_path: Path, source: str, level: str
) -> None:
    settings: dict[str, Any] = {"old_logps": source, "importance_weight_level": level}
    trainer = make_trainer(tmp_path / "hand", None, asked_rows(2), max_steps=1, **REUSE, **settings)
    rows = [row for row in asked_rows(2) for _ in range(2)]
    trainer.model.train()
    with replayed():
        batch = trainer._generate_and_score_completions(rows)
        old = [owned(trainer.model, trace).detach() for group in batch["groups"] for trace in group]
        trainer.train()  # one update on the same episodes, which are those of step 0
    trees = [(trace, a) for g, row in zip(batch["groups"], batch["advantages"]) for trace, a in
             zip(g, row.tolist(), strict=True)]  # fmt: skip
    trainer.model.zero_grad()
    total = torch.zeros(())
    for (trace, advantage), before in zip(trees, old, strict=True):
        logps = owned(trainer.model, trace)
        sampled = torch.from_numpy(sampled_logps(trace)).to(logps.dtype)
        base = before if source == "recompute" else sampled
        log_weight = base - sampled
        if level == "sequence":
            log_weight = log_weight.sum().expand_as(log_weight)
        weight = log_weight.exp().clamp(max=2.0)
        ratio = (logps - base).exp()
        kept = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        total = total - (weight * kept).mean() / len(trees)
    total.backward()
    expected = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    _, steps = run(tmp_path / "run", max_steps=2, **settings)
    # Rows of both runs round differently; a token on the edge of the clip may fall either way.
    assert difference(steps[1], expected) < 1e-3


def test_ratios_are_one_before_the_first_update_and_move_after_it(tmp_path: Path) -> None:
    trainer, _ = run(tmp_path, max_steps=4)
    assert logged(trainer, "ratio/mean")[::2] == pytest.approx([1.0, 1.0], abs=1e-6)
    assert logged(trainer, "ratio/max")[::2] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert all(value > 1.001 for value in logged(trainer, "ratio/max")[1::2])


@pytest.mark.parametrize("source", ["recompute", "rollout"])
def test_halves_of_a_generation_taken_twice_are_clipped_the_second_time_and_weighted(
    tmp_path: Path, source: str
) -> None:
    settings = {"per_device_train_batch_size": 2, "steps_per_generation": 2, "epsilon": 0.01}
    trainer, steps = run(tmp_path, max_steps=4, old_logps=source, learning_rate=0.05, **settings)
    assert all(any(gradient.any() for gradient in step.values()) for step in steps)
    clipped = logged(trainer, "clip_ratio/region_mean")
    assert all(value > 0.0 for value in clipped[2:])
    weights = logged(trainer, "importance_weight/mean")
    if source == "recompute":
        # What the made-up log-probs of the rollout were is not what the model says.
        assert clipped[0] == 0.0
        assert all(value != pytest.approx(1.0, abs=1e-3) for value in weights)
    else:
        assert clipped[0] > 0.0
        assert weights == [1.0] * 4


def test_with_the_rollouts_own_log_probs_no_token_is_weighted(tmp_path: Path) -> None:
    trainer, _ = run(tmp_path, max_steps=2, old_logps="rollout")
    assert logged(trainer, "importance_weight/mean") == [1.0, 1.0]
    # What the trainer thinks differs from these made-up log-probs, and that is still measured.
    assert all(value > 0.1 for value in logged(trainer, "rollout_kl/mean"))


def test_steps_per_generation_splits_a_generation_over_updates_on_one_old_policy(
    tmp_path: Path,
) -> None:
    settings = {"per_device_train_batch_size": 2, "steps_per_generation": 2, "max_steps": 2}
    trainer, steps = run(tmp_path, **settings, num_iterations=1)
    assert len(steps) == 2
    assert logged(trainer, "ratio/max")[0] == pytest.approx(1.0, abs=1e-5)
    assert logged(trainer, "ratio/max")[1] > 1.0001


def test_a_trace_without_log_probs_is_trained_on_as_if_drawn_now(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, None, asked_rows(2), old_logps="rollout", **REUSE)
    trainer.model.train()
    rows = [row for row in asked_rows(2) for _ in range(2)]
    with replayed():
        batch = trainer._generate_and_score_completions(rows)
    trace = batch["groups"][0][0]
    for segment in trace.segments:
        segment.logps = None
    old = trainer._old_logps(batch)[0][0]
    assert len(old) == trace.num_owned
    assert bool(old.isnan().all())
    batch["old_logps"] = trainer._old_logps(batch)
    assert np.isfinite(trainer._compute_loss(trainer.model, batch).item())


def test_a_capped_weight_is_a_constant_to_the_gradient() -> None:
    old = torch.tensor([0.5, -0.5], requires_grad=True)
    weights = objective.truncated_importance_weights(old, sampling_logps=torch.zeros(2), cap=1.2)
    assert not weights.requires_grad
