"""Settings: what is refused says what to use instead, and the agent gets its own."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, TrlParser

from octopus_trl.agent.config import RolloutConfig
from octopus_trl.errors import ConfigError
from octopus_trl.train.config import AGENT_FIELDS, REFUSED, OctopusGRPOConfig, own_fields


def config(**settings: Any) -> OctopusGRPOConfig:
    return OctopusGRPOConfig(
        **{"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none", **settings}
    )


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("use_vllm", True, "our own engine"),
        ("use_transformers_continuous_batching", True, "our engine batches"),
        ("generation_kwargs", {"top_p": 0.9}, "eval_"),
        ("loss_type", "dapo", "loss_type: grpo"),
        ("scale_rewards", "group", "scale_rewards: none"),
        ("scale_rewards", True, "scale_rewards: none"),
        ("importance_sampling_level", "sequence", "per token"),
        ("top_p", 0.9, "eval_top_p"),
        ("top_k", 20, "eval_top_k"),
        ("min_p", 0.1, "eval_min_p"),
        ("repetition_penalty", 1.1, "temperature alone"),
        ("fsdp", "full_shard", "ZeRO"),
        ("max_completion_length", 1024, "max_new_tokens"),
        ("remove_unused_columns", True, "answers"),
    ],
)
def test_a_field_that_is_not_run_is_refused_with_what_to_use_instead(
    field: str, value: Any, instead: str
) -> None:
    with pytest.raises(ConfigError, match=instead) as error:
        config(**{field: value})
    assert str(error.value).startswith(f"{field}={value!r}")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_generations": 1}, "num_generations=1: must be at least 2"),
        ({"page_size": 0}, "page_size=0: must be at least 1"),
        ({"num_pages": 0}, "num_pages=0"),
        ({"num_pages": 99, "page_size": 16, "window": 2048}, "hold 1584 tokens"),
        ({"temperature": 0.0}, "temperature=0.0: must be above 0"),
        ({"importance_weight_cap": 0.0}, "importance_weight_cap"),
        ({"detach_mounts": True, "drop_mounts": True}, "set one"),
        ({"max_path_tokens": 200, "max_row_tokens": 100}, "max_path_tokens=200"),
        ({"mount_layers": "all"}, "mount_layers='all'"),
        ({"trace_every": -1}, "trace_every"),
        ({"window": 3}, "window=3"),
        ({"exchange": "splice", "position": "reencode"}, "exchange='splice'"),
        ({"eval_top_p": 0.0}, "top_p=0.0"),
        ({"disabled_tools": ["frok"]}, "frok"),
        ({"epsilon": -1}, "epsilon=-1: must lie in [0, 1)"),
        ({"epsilon": 1.0}, "epsilon=1.0: must lie in [0, 1)"),
        ({"epsilon": float("nan")}, "epsilon=nan"),
        ({"epsilon_high": -0.1}, "epsilon_high=-0.1: must be at least 0"),
        ({"beta": -1.0}, "beta=-1.0"),
        ({"temperature": float("inf")}, "temperature=inf: must be above 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"importance_weight_cap": float("inf")}, "importance_weight_cap=inf"),
        ({"num_iterations": 0}, "num_iterations=0: must be at least 1"),
        ({"steps_per_generation": 0}, "steps_per_generation=0: must be at least 1"),
        ({"learning_rate": -1e-3}, "learning_rate=-0.001"),
        ({"reward_weights": [float("inf")]}, "reward_weights=[inf]"),
        ({"credit": "branch"}, "credit='branch': must be one of outcome, leave_one_branch_out"),
        ({"credit_estimator": "guess"}, "must be one of score, resample"),
        ({"credit_weight": float("nan")}, "credit_weight=nan"),
        ({"token_count": "leaf"}, "must be one of owner, per_leaf"),
        ({"old_logps": "sampled"}, "must be one of recompute, rollout"),
        ({"importance_weight_level": "tree"}, "must be one of token, sequence"),
        ({"push_attempts": 0}, "push_attempts=0"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0: must be at least 1"),
        ({"gradient_accumulation_steps": -1}, "gradient_accumulation_steps=-1"),
        ({"dataloader_num_workers": -1}, "dataloader_num_workers=-1"),
        ({"adam_beta1": 2.0}, "adam_beta1=2.0: must lie in [0, 1)"),
        ({"adam_epsilon": -1.0}, "adam_epsilon=-1.0: must be at least 0"),
        ({"weight_decay": float("nan")}, "weight_decay=nan"),
        ({"seed": -1}, "seed=-1: must lie in 0..4294967295"),
        ({"data_seed": 2**32}, "data_seed=4294967296"),
        ({"max_steps": -1, "num_train_epochs": 0.0}, "num_train_epochs=0"),
        ({"peak_tflops": 0.0}, "peak_tflops=0.0"),
        (
            {
                "credit": "leave_one_branch_out",
                "credit_estimator": "resample",
                "deterministic": False,
            },
            "needs the logical clock",
        ),
    ],
)
def test_a_value_outside_its_range_is_one_clear_error(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**settings)
    assert says in str(error.value)


@pytest.mark.parametrize(("size", "group", "fix"), [(4, 8, 8), (12, 8, 8), (6, 4, 4)])
def test_a_batch_size_that_tears_a_group_is_refused_with_one_that_does_not(
    size: int, group: int, fix: int
) -> None:
    with pytest.raises(ConfigError, match=rf"set {fix} ") as error:
        config(per_device_train_batch_size=size, num_generations=group)
    assert f"per_device_train_batch_size={size}" in str(error.value)


def test_an_evaluation_batch_that_tears_a_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="per_device_eval_batch_size=3"):
        config(
            num_generations=2,
            per_device_eval_batch_size=3,
            eval_strategy="steps",
            eval_steps=1,
            per_device_train_batch_size=2,
        )


def test_every_refused_field_is_a_field_and_its_default_is_allowed() -> None:
    ours = config()
    for name, (allowed, _) in REFUSED.items():
        value = getattr(ours, name)
        assert any(value is each or value == each for each in allowed), name


def test_agent_settings_have_the_names_and_defaults_of_the_rollout_config() -> None:
    theirs = {each.name: each.default for each in fields(RolloutConfig)}
    ours = {each.name: each.default for each in fields(OctopusGRPOConfig)}
    assert {name: ours[name] for name in AGENT_FIELDS} == {n: theirs[n] for n in AGENT_FIELDS}
    elsewhere = {"temperature", "top_p", "top_k", "min_p", "step", "template_kwargs"}
    assert set(theirs) == {*AGENT_FIELDS, *elsewhere, "disabled_tools"}


def test_training_samples_by_temperature_alone_and_evaluation_by_its_own_fields() -> None:
    ours = config(temperature=0.7, eval_temperature=0.0, eval_top_p=0.5, eval_top_k=3)
    training, evaluating = ours.rollout_config(step=4), ours.rollout_config(training=False)
    assert (training.temperature, training.top_p, training.top_k, training.step) == (0.7, 1, 0, 4)
    assert (evaluating.temperature, evaluating.top_p, evaluating.top_k) == (0.0, 0.5, 3)


@pytest.mark.parametrize("given", ["3,7", [3, 7], ["3", "7"]])
def test_mount_layers_are_read_from_text_and_lists(given: Any) -> None:
    found: Any = config(mount_layers=given).mount_layers
    assert found == [3, 7]


def test_own_fields_have_text_unit_and_symbol() -> None:
    rows = own_fields()
    own = {each.name for each in fields(OctopusGRPOConfig)} - {
        each.name for each in fields(GRPOConfig)
    }
    assert {name for name, *_ in rows} == own
    assert all(text and unit and symbol for _, _, text, unit, symbol in rows)


def test_a_recipe_is_read_and_an_unknown_key_is_an_error(tmp_path: Path) -> None:
    recipe = tmp_path / "config.yaml"
    text = "output_dir: o\nuse_cpu: true\nbf16: false\nreport_to: none\nmount_layers: [3]\n"
    recipe.write_text(text + "disabled_tools: [rewind]\nwindow: 128\n")
    parser = TrlParser((OctopusGRPOConfig,))
    (parsed,) = parser.parse_args_and_config(["--config", str(recipe), "--num_pages", "9"])
    assert (parsed.mount_layers, parsed.disabled_tools) == ([3], ["rewind"])
    assert (parsed.window, parsed.num_pages) == (128, 9)
    recipe.write_text(text + "windw: 128\n")
    with pytest.raises(ValueError, match="windw"):
        TrlParser((OctopusGRPOConfig,)).parse_args_and_config(["--config", str(recipe)])
