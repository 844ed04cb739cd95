"""Evaluation during training: figures of its own, and a training that does not notice it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octopus_trl.train.evaluation import kept_random_state
from tests.train.runs import (
    adapter,
    asked_rows,
    logged,
    make_trainer,
    replayed,
    trained,
)

# Turns of an untrained model on the real engine; dropout draws from the process's generator.
SMALL: dict[str, Any] = {
    "max_turns": 2,
    "max_new_tokens": 4,
    "window": 512,
    "reserve_tokens": 100,
    "num_pages": 100,
    "num_states": 32,
    "per_device_train_batch_size": 2,
    "max_steps": 3,
    "learning_rate": 0.02,
    "peft_config": adapter(lora_dropout=0.3),
    "importance_weight_cap": None,
}


def by_length(completions: Any, traces: Any, **kwargs: Any) -> list[float]:
    """Reward what differs between draws."""
    return [float(sum(t.segments[1].tokens) % 7) for t in traces]


def run(out: Path, **settings: Any) -> Any:
    trainer = make_trainer(out, None, asked_rows(3), reward=by_length, **{**SMALL, **settings})
    trainer.train()
    return trainer


def test_training_is_the_same_to_the_bit_with_and_without_evaluation(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone")
    with_it = run(
        tmp_path / "with",
        eval_rows=asked_rows(5)[3:],
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
    )
    assert len(logged(with_it, "eval_reward")) == 4
    expected = trained(alone)
    for name, value in trained(with_it).items():
        assert torch.equal(value, expected[name]), name
    for key in ("loss", "reward", "grad_norm", "rollout_kl/mean", "engine/prefilled"):
        assert logged(with_it, key) == logged(alone, key), key
    assert any(value > 0 for value in logged(alone, "grad_norm"))
    assert with_it._step == alone._step == 3
    assert with_it._policy.engine.policy_version == 3  # of the last evaluation


def test_evaluation_inside_a_buffered_generation_leaves_the_buffer_alone(tmp_path: Path) -> None:
    reuse: dict[str, Any] = {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 6}
    found = []
    for name, settings in (
        ("alone", {}),
        ("with", {"eval_rows": asked_rows(1), "eval_strategy": "steps", "eval_steps": 1}),
    ):
        trainer = make_trainer(
            tmp_path / name,
            None,
            asked_rows(4),
            per_device_train_batch_size=2,
            **reuse,
            **settings,  # type: ignore[arg-type]
        )
        with replayed():
            trainer.train()
        found.append(trainer)
    assert logged(found[0], "loss") == logged(found[1], "loss")
    assert logged(found[0], "ratio/max") == logged(found[1], "ratio/max")
    assert len(logged(found[1], "eval_loss")) == 6


def test_every_generator_of_the_process_is_put_back_also_after_an_error() -> None:
    def draw() -> tuple[float, float, float]:
        numbers = np.random.rand()  # noqa: NPY002
        return random.random(), float(numbers), torch.rand(()).item()

    def fail() -> None:
        with kept_random_state():
            draw()
            raise KeyError

    state = torch.random.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    expected = draw()
    torch.random.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])  # noqa: NPY002
    with pytest.raises(KeyError):
        fail()
    assert draw() == expected
