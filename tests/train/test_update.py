"""One update: the gradient of the objective, however it is cut into rows, steps and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu

from octopus_trl import score_traces
from octopus_trl.errors import ConfigError
from octopus_trl.kernels import select
from octopus_trl.maths import objective
from octopus_trl.models import lean_layers
from octopus_trl.train import scoring
from octopus_trl.train.config import OctopusGRPOConfig
from octopus_trl.train.rows import longest_path
from octopus_trl.train.trainer import OctopusGRPOTrainer
from tests.tiny import tiny_hybrid
from tests.train.runs import (
    SETTINGS,
    Gradients,
    adapter,
    alternating,
    asked_rows,
    difference,
    logged,
    make_trainer,
    replayed,
    tokenizer,
    trained,
)


def gradients(out: Path, rows: int = 2, **settings: Any) -> tuple[Any, list[Any]]:
    keep = Gradients()
    trainer = make_trainer(out, None, asked_rows(rows), callbacks=[keep], **settings)
    trainer.train()
    return trainer, keep.steps


@pytest.fixture(scope="module")
def one_row(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with replayed():
        return gradients(tmp_path_factory.mktemp("one_row"))


def test_gradient_is_that_of_the_objective_over_separately_scored_traces(
    one_row: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, None, asked_rows(2))
    with replayed():
        batch = trainer._generate_and_score_completions(
            [row for row in asked_rows(2) for _ in range(2)]
        )
    trees = [
        (trace, batch["advantages"][index, rollout].item())
        for index, group in enumerate(batch["groups"])
        for rollout, trace in enumerate(group)
    ]
    assert [advantage for _, advantage in trees] == [2.0, -2.0, 2.0, -2.0]
    trainer.model.train()
    total = torch.zeros(())
    for trace, advantage in trees:
        (scores,) = score_traces(trainer.model, [trace])
        own = [s.id for s in trace.segments if s.kind == "action"]
        logps = torch.cat([scores[index] for index in own])
        sampled = torch.tensor([p for index in own for p in trace.segments[index].logps or []])
        weight = objective.truncated_importance_weights(logps, sampling_logps=sampled, cap=2.0)
        total = total - (advantage * weight * logps).mean() / len(trees)
    total.backward()
    named = trainer.model.named_parameters()
    expected = {name: p.grad for name, p in named if p.grad is not None}
    assert difference(one_row[1][0], expected) < 2e-5


@pytest.mark.parametrize("cap", [450, 900])
def test_gradient_does_not_depend_on_the_number_of_rows(
    one_row: Any, tmp_path: Path, cap: int
) -> None:
    with replayed():
        trainer, steps = gradients(tmp_path, max_row_tokens=cap)
    assert difference(steps[0], one_row[1][0]) < 2e-5
    for name in ("loss", "importance_weight/mean", "rollout_kl/mean", "reward"):
        assert logged(trainer, name)[0] == pytest.approx(logged(one_row[0], name)[0], rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 1,
        },
    ],
    ids=["one-generation", "two-generations"],
)
def test_gradient_does_not_depend_on_accumulation(
    one_row: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    with replayed():
        _, steps = gradients(tmp_path, **settings)
    assert difference(steps[0], one_row[1][0]) < 2e-5


def test_gradient_checkpointing_changes_no_gradient(one_row: Any, tmp_path: Path) -> None:
    with replayed():
        _, steps = gradients(tmp_path, gradient_checkpointing=True)
    assert difference(steps[0], one_row[1][0]) < 2e-5


@pytest.mark.parametrize("fused", [True, False])
def test_an_update_opens_its_lean_layers(
    one_row: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """On the references of the kernels; an adapter within its product is another order of sums."""
    ran: list[str] = []

    def noted(op: str, device: torch.device) -> Any:
        ran.append(op)
        return select(op, device)

    monkeypatch.setattr(lean_layers, "takes", lambda x: True)
    monkeypatch.setattr(lean_layers, "select", noted)
    with replayed():
        trainer, steps = gradients(tmp_path, fused_layers=fused)
    assert set(ran) == (
        {"packed_rms_norm", "packed_gated_norm", "packed_swiglu"} if fused else set()
    )
    assert difference(steps[0], one_row[1][0]) <= (2e-5 if fused else 0.0)
    ran.clear()
    trainer.model(input_ids=torch.arange(5)[None])
    assert ran == []


@pytest.mark.parametrize("value", [1.0, None], ids=["equal", "none"])
def test_rewards_that_teach_nothing_move_nothing(tmp_path: Path, value: float | None) -> None:
    def reward(completions: Any, **kwargs: Any) -> list[float | None]:
        return [value] * len(completions)

    keep = Gradients()
    trainer = make_trainer(tmp_path, None, asked_rows(2), reward=reward, callbacks=[keep])
    before = trained(trainer)
    with replayed():
        trainer.train()
    assert all(not gradient.any() for gradient in keep.steps[0].values())
    assert difference(trained(trainer), before) == 0.0
    assert logged(trainer, "loss") == [0.0]
    assert logged(trainer, "frac_reward_zero_std") == [1.0]


def test_one_rollout_without_a_reward_leaves_the_others_their_baseline(tmp_path: Path) -> None:
    def reward(completions: Any, traces: Any, **kwargs: Any) -> list[float | None]:
        return [[None, 1.0, 0.0, 0.0][trace.meta["rollout"]] for trace in traces]

    trainer = make_trainer(tmp_path, None, asked_rows(1), reward=reward, num_generations=4)
    with replayed():
        batch = trainer._generate_and_score_completions(asked_rows(1) * 4)
    assert batch["advantages"].tolist() == [[0.0, 2.0, -1.0, -1.0]]
    assert [trace.reward for trace in batch["groups"][0]] == [None, 1.0, 0.0, 0.0]


def test_a_tree_that_fits_no_row_is_left_out_and_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with replayed():
        trainer = make_trainer(tmp_path, None, asked_rows(1), num_generations=4)
        batch = trainer._generate_and_score_completions(asked_rows(1) * 4)
        paths = [longest_path(trace) for trace in batch["groups"][0]]
        trainer.args.max_path_tokens = max(paths) - 1
        rows = trainer._rows(trainer._trees(batch), trainer._meters["train"])
    assert sum(row.num_trees for row in rows) == sum(path < max(paths) for path in paths)
    assert f"a path of {max(paths)} tokens" in capfd.readouterr().err
    assert trainer._meters["train"].totals("packing/left_out") == (4 - rows[0].num_trees, 4)


@pytest.mark.parametrize("value", [0.0, 0.3])
def test_reference_is_the_model_without_its_adapter(tmp_path: Path, value: float) -> None:
    trainer = make_trainer(tmp_path, None, asked_rows(2), beta=0.1)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(value)
    with replayed():
        trainer.train()
    kl = logged(trainer, "kl")[0]
    assert kl == pytest.approx(0.0, abs=1e-10) if value == 0.0 else kl > 1e-4


def test_dropout_is_off_while_scoring_and_the_ratio_starts_at_the_old_policy(
    tmp_path: Path,
) -> None:
    trainer = make_trainer(
        tmp_path,
        None,
        asked_rows(2),
        peft_config=adapter(lora_dropout=0.5),
        per_device_train_batch_size=2,
        steps_per_generation=2,
    )
    rows = [row for row in asked_rows(2) for _ in range(2)]
    trainer.model.train()
    with replayed():
        first = trainer._generate_and_score_completions(rows)["old_logps"]
        again = trainer._generate_and_score_completions(rows)["old_logps"]
    assert trainer.model.training
    for left, right in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_a_reused_generation_is_clipped_against_the_policy_that_drew_it(tmp_path: Path) -> None:
    with replayed():
        trainer, _ = gradients(
            tmp_path, num_iterations=3, max_steps=3, learning_rate=0.05, epsilon=0.01
        )
    clipped = logged(trainer, "clip_ratio/region_mean")
    assert clipped[0] == 0.0
    assert clipped[2] > 0.0


def test_dropped_and_detached_mounts_change_the_update(one_row: Any, tmp_path: Path) -> None:
    found = []
    for name in ("detach_mounts", "drop_mounts"):
        with replayed():
            found.append(gradients(tmp_path / name, **{name: True})[1][0])
    assert difference(found[0], one_row[1][0]) > 1e-4
    assert difference(found[1], found[0]) > 1e-4


def test_full_fine_tuning_moves_every_parameter(tmp_path: Path) -> None:
    with replayed():
        trainer, steps = gradients(tmp_path, peft_config=None)
    assert set(steps[0]) == {name for name, _ in trainer.model.named_parameters()}
    assert all(gradient.any() for gradient in steps[0].values())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rollout_func": print}, "rollout_func is not run"),
        ({"environment_factory": print}, "environment_factory is not run"),
    ],
)
def test_arguments_that_are_not_run_are_refused(
    tmp_path: Path, arguments: dict[str, Any], says: str
) -> None:
    from octopus_trl.train.trainer import OctopusGRPOTrainer

    with pytest.raises(ConfigError, match=says):
        OctopusGRPOTrainer(None, alternating, **arguments)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"text": "x"}], "one must be prompt or question"),
        ([{"question": "x"}], "has 1 questions, one generation takes 2"),
    ],
)
def test_a_data_set_without_questions_is_one_clear_error(
    tmp_path: Path, rows: list[dict[str, Any]], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        make_trainer(tmp_path, None, rows)


def test_full_fine_tuning_with_a_reference_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"beta=0.1 with full fine-tuning"):
        make_trainer(tmp_path, None, asked_rows(2), peft_config=None, beta=0.1)


def test_trees_without_an_advantage_are_measured_and_move_nothing(
    one_row: Any, tmp_path: Path
) -> None:
    def reward(completions: Any, **kwargs: Any) -> list[float]:
        return [float(completion == "q0 0") for completion in completions]

    with replayed():
        _, alone = gradients(tmp_path / "alone", rows=1, per_device_train_batch_size=2)
        trainer, mixed = gradients(tmp_path / "mixed", reward=reward)
    half = {name: gradient / 2 for name, gradient in alone[0].items()}
    assert difference(mixed[0], half) < 2e-5
    for name in ("rollout_kl/mean", "importance_weight/mean", "entropy_estimate"):
        assert logged(trainer, name)[0] == pytest.approx(logged(one_row[0], name)[0], rel=1e-4)


def test_gradient_with_tiled_mlps_is_that_of_whole_rows(one_row: Any, tmp_path: Path) -> None:
    with replayed():
        trainer, steps = gradients(tmp_path, mlp_tile_tokens=100)
    mlps = [module for name, module in trainer.model.named_modules() if name.endswith(".mlp")]
    assert {mlp.octopus_tile_tokens for mlp in mlps} == {100}
    assert difference(steps[0], one_row[1][0]) < 2e-5


def test_a_model_that_was_trained_in_tiles_has_none_where_its_next_run_asks_for_none(
    tmp_path: Path,
) -> None:
    model = tiny_hybrid(0, vocab_size=1024)
    mlps = [layer.mlp for layer in model.model.layers]
    for tokens in (100, None, 7):
        OctopusGRPOTrainer(
            model,
            reward_funcs=alternating,
            args=OctopusGRPOConfig(
                **{**SETTINGS, "output_dir": str(tmp_path), "mlp_tile_tokens": tokens}
            ),
            train_dataset=asked_rows(2),
            processing_class=tokenizer(),
            tools=None,
        )
        assert {mlp.octopus_tile_tokens for mlp in mlps} == {tokens}


def test_gradient_with_offloaded_activations_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []

    class Counted(save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: moved.append(tensor.nbytes) or pack(tensor)  # type: ignore[func-returns-value]

    monkeypatch.setattr(scoring, "save_on_cpu", Counted)
    with replayed():
        _, here = gradients(tmp_path / "here", gradient_checkpointing=True)
        assert not moved
        trainer, there = gradients(
            tmp_path / "there", gradient_checkpointing=True, activation_offloading=True
        )
    assert len(moved) >= trainer.model.config.num_hidden_layers
    assert here[0].keys() == there[0].keys()
    assert all(torch.equal(there[0][name], grad) for name, grad in here[0].items())


def test_offloading_without_checkpointing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set gradient_checkpointing: true"):
        make_trainer(
            tmp_path,
            None,
            asked_rows(2),
            gradient_checkpointing=False,
            activation_offloading=True,
        )
