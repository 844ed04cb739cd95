"""Models with routed experts train as others do; what a packed pass leaves out is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from octopus_trl import prepare_model
from octopus_trl.errors import ConfigError
from octopus_trl.models import spec_of
from octopus_trl.train import flops
from tests.tiny import tiny_dense_moe, tiny_hybrid_moe
from tests.train import runs
from tests.train.runs import forced, logged, make_trainer, questions, small_world, trained

# Adapters on the mixers: PEFT warns about the rank of fused experts that no name reaches.
MIXERS = runs.adapter(target_modules=["q_proj", "v_proj", "in_proj_qkv", "out_proj"])


def trainer_of(folder: Path, **settings: Any) -> tuple[Any, Any, Any]:
    backend = small_world(folder / "world")
    rows = questions(backend.world, 1)
    with mock.patch.object(runs, "tiny_hybrid", tiny_hybrid_moe):
        trainer = make_trainer(
            folder / "out",
            backend,
            rows,
            per_device_train_batch_size=2,
            peft_config=MIXERS,
            learning_rate=0.01,
            **settings,
        )
    return trainer, backend, rows


def test_a_balance_loss_that_would_be_left_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=0.001 \(the model's own\)"):
        trainer_of(tmp_path)
    with pytest.raises(ConfigError, match="router_aux_loss_coef=0.01"):
        trainer_of(tmp_path / "asked", router_aux_loss_coef=0.01)


def test_episodes_of_a_model_with_experts_are_drawn_and_trained_alike(tmp_path: Path) -> None:
    trainer, backend, rows = trainer_of(tmp_path, router_aux_loss_coef=0.0)
    before = trained(trainer)
    with forced(backend.world, rows):
        trainer.train()
    for place in ("mean", "mounted"):
        (value,) = logged(trainer, f"rollout_kl/{place}")
        assert 0 <= value <= 1e-8
    moved = trained(trainer)
    assert all(not torch.equal(moved[name], value) for name, value in before.items())


@pytest.mark.parametrize("build", [tiny_hybrid_moe, tiny_dense_moe])
def test_of_the_experts_the_share_that_a_token_meets_is_counted(build: Any) -> None:
    model = prepare_model(build(0), mount_layers=[3])
    counted = flops.ModelFlops.of(model, spec_of(model))
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.lm_head]
    experts = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    assert experts
    routed = sum(m.gate_up_proj[:2].numel() + m.down_proj[:2].numel() for m in experts)
    assert counted.linear == sum(m.weight.numel() for m in linears) + routed
    assert counted.trained == counted.linear
