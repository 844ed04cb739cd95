"""Adapters: the set is shown, a name that matches nothing is an error."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from octopus_trl.errors import ConfigError
from octopus_trl.train.lora import PROJECTIONS, describe_adapter, settle_targets
from tests.tiny import tiny_dense, tiny_hybrid


def test_without_names_the_ten_projections_of_a_hybrid_are_adapted() -> None:
    model = tiny_hybrid()
    config = settle_targets(model, LoraConfig(r=2))
    assert set(config.target_modules or ()) == set(PROJECTIONS)
    shown = describe_adapter(get_peft_model(model, config))
    assert "in_proj_qkv x3" in shown
    assert "q_proj x1" in shown
    assert "parameters train" in shown


def test_without_names_a_dense_model_gets_those_that_it_has() -> None:
    config = settle_targets(tiny_dense(), LoraConfig(r=2))
    assert set(config.target_modules or ()) == set(PROJECTIONS) - {
        "in_proj_qkv",
        "in_proj_z",
        "out_proj",
    }


@pytest.mark.parametrize(
    "targets", [["q_proj", "in_proj_qvk"], r".*\.in_proj_qvk", ["proj"]], ids=str
)
def test_a_name_that_matches_nothing_is_named_with_those_that_exist(targets: Any) -> None:
    with pytest.raises(ConfigError, match="matches no module") as error:
        settle_targets(tiny_hybrid(), LoraConfig(r=2, target_modules=targets))
    assert "in_proj_qkv" in str(error.value)


@pytest.mark.parametrize(
    "targets", [["q_proj", "layers.3.self_attn.k_proj"], r".*q_proj", "all-linear"], ids=str
)
def test_names_and_patterns_that_match_are_kept(targets: Any) -> None:
    config = settle_targets(tiny_hybrid(), LoraConfig(r=2, target_modules=targets))
    kept = config.target_modules
    assert kept == (targets if isinstance(targets, str) else set(targets))


@pytest.mark.parametrize(
    ("setting", "words"),
    [({"r": 0}, "lora_r=0"), ({"lora_dropout": 1.0}, r"lora_dropout=1\.0")],
    ids=["rank", "dropout"],
)
def test_a_rank_or_a_dropout_out_of_range_is_refused(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settle_targets(tiny_hybrid(), LoraConfig(**setting))
