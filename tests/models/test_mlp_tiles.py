"""MLPs by tiles of tokens: the same results, less memory, and the model stays what it was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from octopus_trl import score_traces
from octopus_trl.errors import ConfigError
from octopus_trl.models.mlp_tiles import MLP_NAMES, tile_mlps
from tests.parity.conftest import FAMILIES, prepared
from tests.tiny import random_trace, tiny_dense, with_lora


def built(name: str) -> Any:
    build, layers = FAMILIES[name]
    return prepared(build(), layers)


def scored(model: Any, traces: list[Any]) -> torch.Tensor:
    found = [part for trace in score_traces(model, traces) for part in trace]
    return torch.cat([part for part in found if part.isfinite().all()])


def gradients(model: Any, traces: list[Any]) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    scored(model, traces).mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "tokens"),
    [*((name, 63) for name in FAMILIES), ("dense", 1), ("hybrid", 64), ("llama", 10_000)],
)
def test_scores_and_gradients_are_those_of_whole_rows(name: str, tokens: int) -> None:
    traces = [random_trace(seed) for seed in (0, 1)]
    model = built(name)
    want, want_grads = scored(model, traces).detach(), gradients(model, traces)
    tile_mlps(model, tokens)
    torch.testing.assert_close(scored(model, traces).detach(), want, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(scored(model, traces), want, atol=1e-5, rtol=1e-5)
    found = gradients(model, traces)
    assert found.keys() == want_grads.keys()
    for key, grad in want_grads.items():
        assert (found[key] - grad).norm() <= 1e-5 * grad.norm() + 1e-8, key
    tile_mlps(model, None)
    assert torch.equal(scored(model, traces).detach(), want)


@pytest.mark.parametrize("reentrant", [False, True])
def test_tiles_inside_checkpointed_layers_with_an_adapter(reentrant: bool) -> None:
    traces = [random_trace(2)]
    model = prepared(with_lora(tiny_dense(0), rank=4), (1, 2)).train()
    model.enable_input_require_grads()
    want = gradients(model, traces)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    tile_mlps(model, 50)
    found = gradients(model, traces)
    assert want.keys() == found.keys()
    assert want
    for key, grad in want.items():
        assert (found[key] - grad).norm() <= 1e-5 * grad.norm() + 1e-9, key


def test_only_rows_longer_than_a_tile_are_cut() -> None:
    model = built("dense")
    mlp = model.model.layers[0].mlp
    seen: list[int] = []
    mlp.gate_proj.register_forward_hook(lambda module, given, out: seen.append(out.shape[-2]))
    tile_mlps(model, 64)
    for length in (1, 63, 64, 65, 200):
        seen.clear()
        mlp(torch.randn(1, length, model.config.hidden_size))
        assert sum(seen) == length
        assert max(seen) <= 64
        assert len(seen) == -(-length // 64)


def test_a_tiled_model_keeps_its_names_and_is_copied_and_pickled() -> None:
    model, traces = built("hybrid"), [random_trace(3)]
    names, kind = list(model.state_dict()), repr(model)
    tile_mlps(model, 32)
    tile_mlps(model, 48)  # twice is once
    assert (list(model.state_dict()), repr(model)) == (names, kind)
    want = scored(model, traces)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(scored(other, traces), want)
        assert other.model.layers[0].mlp.octopus_tile_tokens == 48


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_tile_without_tokens_is_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        tile_mlps(built("dense"), tokens)


def test_a_model_without_a_known_mlp_is_refused() -> None:
    model = tiny_dense(0)
    for layer in model.model.layers:
        layer.other = layer.mlp
        del layer.mlp
    with pytest.raises(ConfigError, match=MLP_NAMES[0]):
        tile_mlps(model, 8)
