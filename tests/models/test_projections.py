"""Projections of one input as one product: the same numbers, the same parameters, undone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from octopus_trl.errors import ConfigError
from octopus_trl.models.projections import Projections
from tests.tiny import tiny_dense, with_lora

NAMES = ("q_proj", "k_proj", "v_proj")


def layers(model: Any, index: int = 0) -> list[tuple[str, Any]]:
    """Three projections of one input, of unequal widths."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    attention = model.model.layers[index].self_attn
    return [(name, getattr(attention, name)) for name in NAMES]


def apart(model: Any, x: Tensor) -> Tensor:
    return torch.cat([module(x) for _, module in layers(model)], dim=-1)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 48)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_one_product_gives_what_the_layers_give(
    x: Tensor, share: bool, merge: bool, adapted: bool
) -> None:
    model = with_lora(tiny_dense()) if adapted else tiny_dense()
    with torch.no_grad():
        want = apart(model, x)
        projections = Projections(layers(model), share=share, merge=merge)
        torch.testing.assert_close(projections(x), want, atol=1e-6, rtol=0)
        torch.testing.assert_close(apart(model, x), want, atol=0, rtol=0)
        plain = projections.plain
        assert (plain is not None) == (merge if adapted else share)
        if plain is not None:
            assert torch.equal(x @ plain.T, projections(x))


def test_biases_are_added() -> None:
    linears = [nn.Linear(8, 3), nn.Linear(8, 5, bias=False), nn.Linear(8, 4)]
    x = torch.randn(2, 8)
    with torch.no_grad():
        projections = Projections([("", linear) for linear in linears])
        want = torch.cat([linear(x) for linear in linears], dim=-1)
        torch.testing.assert_close(projections(x), want)
        assert projections.plain is None
        linears[2].bias.add_(1)
        projections.refresh()
        want[:, 8:] += 1
        torch.testing.assert_close(projections(x), want)


@pytest.mark.parametrize("adapted", [False, True])
def test_parameters_keep_their_identity_names_and_bits_and_get_their_storage_back(
    adapted: bool, tmp_path: Any
) -> None:
    model = with_lora(tiny_dense()) if adapted else tiny_dense()
    parameters = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    projections = Projections(layers(model))
    shared = {p.untyped_storage().data_ptr() for name, p in parameters.items() if q_k_or_v(name)}
    assert len(shared) == 1
    assert {name: id(p) for name, p in model.named_parameters()} == {
        name: id(p) for name, p in parameters.items()
    }
    save_file(model.state_dict(), tmp_path / "all.safetensors")
    for state in (model.state_dict(), load_file(tmp_path / "all.safetensors")):
        assert all(torch.equal(state[name], value) for name, value in before.items())
    projections.undo()
    owned = {p.untyped_storage().data_ptr() for name, p in parameters.items() if q_k_or_v(name)}
    assert len(owned) == 3
    assert all(torch.equal(p, before[name]) for name, p in parameters.items())


def q_k_or_v(name: str) -> bool:
    inner = "layers.0.self_attn" in name and "lora" not in name
    return inner and any(f".{word}" in name for word in NAMES)


def test_an_optimizer_step_is_seen_at_the_same_address(x: Tensor) -> None:
    model = tiny_dense()
    projections = Projections(layers(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before, address = projections(x).detach().clone(), projections.signature()
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer.step()
    with torch.no_grad():
        assert (projections(x) - before).abs().max() > 0.1
        torch.testing.assert_close(projections(x), apart(model, x), atol=1e-6, rtol=0)
    assert projections.signature() == address


@pytest.mark.parametrize("merge", [False, True])
def test_trained_adapters_are_seen_after_a_refresh_at_the_same_address(
    x: Tensor, merge: bool
) -> None:
    model = with_lora(tiny_dense())
    projections = Projections(layers(model), merge=merge)
    address = projections.signature()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.05)
        projections.refresh()
        torch.testing.assert_close(projections(x), apart(model, x), atol=1e-6, rtol=0)
    assert projections.signature() == address


def test_ranks_may_differ_and_some_layers_may_have_no_adapter(x: Tensor) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        rank_pattern={"v_proj": 5},
        init_lora_weights=False,
    )
    model = get_peft_model(tiny_dense(), config).eval()
    with torch.no_grad():
        projections = Projections(layers(model))
        torch.testing.assert_close(projections(x), apart(model, x), atol=1e-6, rtol=0)


def test_a_flat_buffer_of_somebody_else_is_left_alone(x: Tensor) -> None:
    model = tiny_dense()
    weights = [module.weight for _, module in layers(model)]
    flat = torch.cat([w.detach().flatten() for w in weights])
    for weight, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
        weight.data = part.view_as(weight)
    addresses = [w.data_ptr() for w in weights]
    projections = Projections(layers(model))
    assert [w.data_ptr() for w in weights] == addresses
    flat.mul_(2)  # its owner's update
    with torch.no_grad():
        torch.testing.assert_close(projections(x), apart(model, x), atol=1e-6, rtol=0)


def test_weights_that_moved_away_are_noticed() -> None:
    model = tiny_dense()
    projections = Projections(layers(model))
    assert projections.holds()
    weight = layers(model)[1][1].weight
    weight.data = weight.data.clone()
    assert not projections.holds()


def test_a_second_user_of_the_model_finds_the_weights_as_they_lie(x: Tensor) -> None:
    model = tiny_dense()
    one = Projections(layers(model))
    other = Projections(layers(model))
    assert one.signature() == other.signature()
    # With adapters the rows of A lie below: the first user notices and builds anew.
    adapted = with_lora(model)
    third = Projections(layers(adapted))
    assert not one.holds()
    with torch.no_grad():
        torch.testing.assert_close(third(x), apart(adapted, x), atol=1e-6, rtol=0)


def test_a_copied_model_is_its_own() -> None:
    model = tiny_dense()
    Projections(layers(model))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        layers(twin)[0][1].weight.zero_()
    assert layers(model)[0][1].weight.abs().min() > 0


def test_other_kinds_of_layers_are_named_in_the_error() -> None:
    from peft import LoraConfig, get_peft_model

    with pytest.raises(ConfigError, match=r"gate is a Conv1d"):
        Projections([("gate", nn.Conv1d(1, 1, 1))])
    model = get_peft_model(tiny_dense(), LoraConfig(target_modules=["q_proj"], use_dora=True))
    with pytest.raises(ConfigError, match=r"q_proj: adapter 'default' is no plain LoRA"):
        Projections(layers(model))


def test_a_saved_checkpoint_is_whole_and_loads_elsewhere(tmp_path: Any) -> None:
    model = tiny_dense()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for index in range(2):
        Projections(layers(model, index))
    model.save_pretrained(tmp_path / "stock")
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    loaded = type(model).from_pretrained(tmp_path / "stock")
    state = torch.load(tmp_path / "plain.pt", weights_only=True)
    for name, value in before.items():
        assert torch.equal(loaded.get_parameter(name), value)
        assert torch.equal(state[name], value)
