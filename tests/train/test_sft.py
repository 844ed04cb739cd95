"""Warm start: rows from a seed and a number, and the likelihood of owned tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octopus_trl import prepare_model, score_traces
from octopus_trl.errors import ConfigError
from octopus_trl.eval.seal_join_backend import load_world
from octopus_trl.eval.seal_join_mixture import SOURCES, SealJoinMixture
from octopus_trl.eval.seal_join_tokenizer import build_tokenizer
from octopus_trl.models.decay import initialise_decay
from octopus_trl.trace import Trace
from octopus_trl.train import sft
from octopus_trl.train.sft import (
    OctopusSFTConfig,
    OctopusSFTTrainer,
    RowDataset,
)
from tests.tiny import random_trace, tiny_hybrid

ROOT = Path(__file__).parents[2]


def draw(rng: np.random.Generator, progress: float) -> Trace:
    trace = random_trace(int(rng.integers(1 << 20)))
    trace.meta["source"] = "late" if progress >= 0.5 else "early"
    return trace


def draw_one_of_two(rng: np.random.Generator, progress: float) -> Trace:
    trace = random_trace(int(rng.integers(2)))
    trace.meta["source"] = "early"
    return trace


def dataset(**changes: Any) -> RowDataset:
    return RowDataset(draw, **{"num_rows": 6, "pack_tokens": 1500, "seed": 0, **changes})


def config(folder: Path, **changes: Any) -> OctopusSFTConfig:
    values = {
        "output_dir": str(folder),
        "max_steps": 6,
        "pack_tokens": 1500,
        "per_device_train_batch_size": 1,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    return OctopusSFTConfig(**{**values, **changes})


def test_a_row_depends_on_the_seed_and_its_number_alone() -> None:
    one, other = dataset(), dataset()
    for index in (4, 0, 4):
        a, b = one[index].row, other[index].row
        assert a.packed.tokens.tolist() == b.packed.tokens.tolist()
        assert a.targets.tolist() == b.targets.tolist()
    assert dataset(seed=1)[0].row.packed.tokens.tolist() != one[0].row.packed.tokens.tolist()
    assert one[0].sources == ["early"]
    assert one[5].sources == ["late"]


def test_a_trace_that_fits_no_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="pack_tokens=5"):
        dataset(pack_tokens=5)[0]


def test_the_loss_is_the_mean_likelihood_of_owned_tokens(tmp_path: Path) -> None:
    model = prepare_model(tiny_hybrid(seed=0))
    rows = dataset()
    trainer = OctopusSFTTrainer(model, config(tmp_path), train_dataset=rows)
    item = rows[0]
    with torch.no_grad():
        loss = trainer.compute_loss(model, {"row": item})
        scores = score_traces(model, item.row.traces)
    owned = [
        scores[index][segment.id]
        for index, trace in enumerate(item.row.traces)
        for segment in trace.segments
        if segment.kind == "action"
    ]
    wanted = -torch.cat(owned)
    wanted = wanted[torch.isfinite(wanted)].mean()
    assert float(loss) == pytest.approx(float(wanted), abs=1e-5)


def test_a_step_opens_its_lean_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    @contextmanager
    def noted(model: Any, *, fused: bool) -> Iterator[None]:
        seen.append(fused)
        yield

    monkeypatch.setattr(sft, "lean_layers", noted)
    args = config(tmp_path, max_steps=2, fused_layers=True)
    model = prepare_model(tiny_hybrid(0))
    OctopusSFTTrainer(model, args, train_dataset=dataset()).train()
    assert seen == [True, True]


def test_training_lowers_the_loss_and_logs_each_source(tmp_path: Path) -> None:
    model = prepare_model(tiny_hybrid(seed=0))
    args = config(tmp_path, max_steps=12, learning_rate=3e-3)
    few = RowDataset(draw_one_of_two, num_rows=12, pack_tokens=1500, seed=0)
    trainer = OctopusSFTTrainer(model, args, train_dataset=few)
    trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.1
    assert {"nll/early", "likely/early"} <= set(trainer.state.log_history[0])


def test_a_run_ends_in_good_order_when_its_time_is_up(tmp_path: Path) -> None:
    model = prepare_model(tiny_hybrid(seed=0))
    args = config(tmp_path, max_steps=50, stop_after_s=0.0)
    trainer = OctopusSFTTrainer(model, args, train_dataset=dataset(num_rows=50))
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_half_written_checkpoint_is_passed_over_and_the_run_goes_on_bit_for_bit(
    tmp_path: Path,
) -> None:
    settings = {"max_steps": 2, "pack_tokens": 600, "save_strategy": "steps", "save_steps": 1}

    def trainer() -> OctopusSFTTrainer:
        model = prepare_model(tiny_hybrid(seed=0))
        rows = dataset(num_rows=2, pack_tokens=600)
        return OctopusSFTTrainer(model, config(tmp_path, **settings), train_dataset=rows)

    straight = trainer()
    straight.train()
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2
    for name in ("loss", "grad_norm"):
        seen, wanted = (
            [entry[name] for entry in each.state.log_history if name in entry]
            for each in (resumed, straight)
        )
        assert seen == wanted
    for value, wanted in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(value, wanted)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"pack_tokens": 0}, "pack_tokens=0"),
        ({"push_attempts": 0}, "push_attempts=0"),
        ({"push_wait_s": -1.0}, "push_wait_s=-1.0"),
        ({"per_device_train_batch_size": 2}, "a row is already a batch"),
        ({"max_steps": -1}, "max_steps=-1"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_a_wrong_setting_names_value_and_rule(
    tmp_path: Path, change: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ConfigError, match=rule):
        config(tmp_path, **change)


def test_decay_starts_between_forgetting_in_a_few_tokens_and_never() -> None:
    model = tiny_hybrid(seed=0)
    initialise_decay(model, seed=0)
    layers = [module for module in model.modules() if hasattr(module, "A_log")]
    assert layers
    for layer in layers:
        rate = layer.A_log.exp() * torch.nn.functional.softplus(layer.dt_bias)
        kept = torch.exp(-rate).detach()
        assert 0.19 < float(kept.min()) <= float(kept.max()) < 0.9995


@pytest.fixture(scope="module")
def world() -> Any:
    return load_world(ROOT / "data" / "seal_join", snippet_tokens=0)


@pytest.mark.parametrize("name", ["curriculum_1", "curriculum_2", "curriculum_3", "curriculum_4"])
def test_each_curriculum_draws_valid_traces_of_its_sources(world: Any, name: str) -> None:
    stages = json.loads((ROOT / f"recipes/tiny-hybrid/sft/{name}.json").read_text())
    mixture = SealJoinMixture(world, build_tokenizer(), stages)
    rng = np.random.default_rng(0)
    for progress in (0.0, 0.6, 0.99):
        stage = next(stage for stage in stages if progress < stage["until"])
        for _ in range(6):
            trace = mixture(rng, progress).check()
            assert stage.get(trace.meta["source"], 0) > 0
            assert trace.num_owned > 0


@pytest.mark.parametrize(
    "stages",
    [
        [],
        [{"until": 0.5, "expert": 1.0}],
        [{"until": 1.0}],
        [{"until": 1.0, "expert": -1.0}],
        [{"until": 1.0, "expart": 1.0}],
        [{"expert": 1.0}],
    ],
)
def test_a_curriculum_that_cannot_run_is_refused(world: Any, stages: list[Any]) -> None:
    with pytest.raises(ConfigError, match="curriculum"):
        SealJoinMixture(world, build_tokenizer(), stages)


def test_every_source_is_one_that_the_mixture_can_draw(world: Any) -> None:
    rng = np.random.default_rng(1)
    for source in SOURCES:
        trace = SealJoinMixture(world, build_tokenizer(), [{"until": 1.0, source: 1.0}])(rng, 0.0)
        assert trace.check().meta["source"] == source
