"""What the trainer stands on in TRL and transformers; an upgrade that moves it fails here first.

Each test is one assumption of `octopus_trl/train`: the methods that it overrides or calls, and the
rules by which TRL cuts and shuffles what they return.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict

# Overridden or called in octopus_trl/train: name -> parameters after self, in order.
SEAMS = {
    "_generate_and_score_completions": ["inputs"],
    "_prepare_inputs": ["generation_batch"],
    "_compute_loss": ["model", "inputs"],
    "compute_loss": ["model", "inputs", "return_outputs", "num_items_in_batch"],
    "training_step": ["model", "inputs", "num_items_in_batch"],
    "prediction_step": ["model", "inputs", "prediction_loss_only", "ignore_keys"],
    "_get_train_sampler": ["dataset"],
    "_save_checkpoint": ["model", "trial"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "_calculate_rewards": ["inputs", "prompts", "completions", "completion_ids_list"],
    "create_model_card": ["model_name", "dataset_name", "tags"],
    "log": ["logs", "start_time"],
}


@pytest.mark.parametrize(
    ("package", "minor"),
    [("trl", "1.16"), ("transformers", "5.24"), ("peft", "0.21"), ("accelerate", "1.15")],
)
def test_installed_minor_is_the_pinned_one(package: str, minor: str) -> None:
    assert version(package).startswith(f"{minor}.")


@pytest.mark.parametrize("name", sorted(SEAMS))
def test_trainer_method_keeps_its_parameters(name: str) -> None:
    found = list(inspect.signature(getattr(GRPOTrainer, name)).parameters)
    assert found == ["self", *SEAMS[name]]


def test_split_takes_its_row_count_from_the_first_value() -> None:
    batch = {
        "advantages": torch.arange(4.0),
        "traces": ["a", "b", "c", "d"],
        "num_items_in_batch": torch.tensor(7),
        "absent": None,
    }
    first, second = split_tensor_dict(batch, 2)
    assert first["advantages"].tolist() == [0.0, 1.0]
    assert second["traces"] == ["c", "d"]
    assert first["num_items_in_batch"] == second["num_items_in_batch"] == 7
    assert first["absent"] is None


def test_split_needs_a_tensor_first() -> None:
    with pytest.raises(AttributeError, match="shape"):
        split_tensor_dict({"traces": ["a", "b"], "advantages": torch.zeros(2)}, 2)


def test_split_drops_a_remainder_without_a_word() -> None:
    chunks = split_tensor_dict({"advantages": torch.arange(5.0)}, 2)
    assert sum(len(chunk["advantages"]) for chunk in chunks) == 4


def test_shuffle_permutes_tensors_and_lists_alike() -> None:
    torch.manual_seed(3)
    batch = {"advantages": torch.arange(8.0), "traces": list(range(8)), "scalar": torch.tensor(2)}
    shuffled = shuffle_sequence_dict(batch)
    assert shuffled["advantages"].tolist() == shuffled["traces"]
    assert sorted(shuffled["traces"]) == list(range(8))
    assert shuffled["scalar"] == 2


def test_config_fields_that_we_read_exist() -> None:
    fields = set(GRPOConfig.__dataclass_fields__)
    assert fields >= {
        "num_generations",
        "generation_batch_size",
        "steps_per_generation",
        "num_iterations",
        "beta",
        "epsilon",
        "epsilon_high",
        "loss_type",
        "scale_rewards",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_completion_length",
        "use_vllm",
        "use_transformers_continuous_batching",
        "generation_kwargs",
        "cache_implementation",
        "ds3_gather_for_generation",
        "shuffle_dataset",
    }


def test_two_generations_a_prompt_are_the_least() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        GRPOConfig(
            output_dir="unused", num_generations=1, use_cpu=True, bf16=False, report_to="none"
        )
