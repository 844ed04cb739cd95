"""Which models are taken: every supported class has its tests, and what cannot run says why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, Qwen2Config

from octopus_trl import prepare_model
from octopus_trl.errors import ConfigError
from octopus_trl.models.backbone import RecurrentSizes
from octopus_trl.models.patch import BACKBONES
from octopus_trl.models.spec import attention_layers, read_spec
from tests.parity.conftest import FAMILIES
from tests.tiny import tiny_dense, tiny_hybrid, tiny_llama

SIZES = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 97}


def test_every_supported_class_is_a_family_of_the_parity_tests() -> None:
    built = {type(build()) for build, _ in FAMILIES.values()}
    assert built == {backbone.causal_lm for backbone in BACKBONES}


def test_an_unsupported_class_is_a_value_error_that_names_the_supported_ones() -> None:
    model = GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, bos_token_id=0, eos_token_id=0)
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no mixers here") as raised:
        prepare_model(model, mount_layers=[0])
    for backbone in BACKBONES:
        assert backbone.causal_lm.__name__ in str(raised.value)
    assert type(model) is GPT2LMHeadModel
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([], "at least one"),
        ([1, 1], "distinct"),
        ([4], "among \\[0, 1, 2, 3\\] of 4 layers"),
        ([-1], "among"),
        ([True], "among"),
        ([1.0], "among"),
        (["1"], "among"),
        (3, "must be a list of layer indices"),
        (None, "must be a list of layer indices"),
        ("all", 'must be "attention" or a list'),
        ("attention", "hand the reader its sibling's goal"),
    ],
)
def test_mount_layers_that_do_not_fit_a_dense_model_are_refused_with_the_reason(
    layers: Any, reason: str
) -> None:
    model = tiny_dense(0)
    kind = type(model)
    with pytest.raises(ConfigError, match=reason):
        prepare_model(model, mount_layers=layers)
    assert type(model) is kind


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_mount_layer_that_is_no_attention_layer_is_refused(layer: int) -> None:
    with pytest.raises(ConfigError, match=r"distinct attention layers, at least one, among \[3\]"):
        prepare_model(tiny_hybrid(0), mount_layers=[3, layer])


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**SIZES, sliding_window=16),
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1),
    ],
)
def test_a_sliding_window_is_refused_whether_the_config_names_kinds_or_not(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"layer \d is 'sliding_attention'.*siblings still read"):
        read_spec(config, [0], lambda config: RecurrentSizes((), ()))


def test_a_config_that_names_no_kinds_has_attention_throughout() -> None:
    assert attention_layers(tiny_llama(0, layers=6).config) == list(range(6))
    assert attention_layers(
        SimpleNamespace(layer_types=["linear_attention", "full_attention"])
    ) == [1]
