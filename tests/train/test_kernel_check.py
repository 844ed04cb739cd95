"""A run starts only on kernels that give the reference's results and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octopus_trl import prepare_model
from octopus_trl.errors import ConfigError
from octopus_trl.maths import attention, delta_rule
from octopus_trl.train.kernel_check import check_attention, check_gated_delta, check_kernels
from tests.tiny import tiny_hybrid

SIZES: dict[str, Any] = {
    "key_heads": 2,
    "value_heads": 4,
    "key_dim": 8,
    "value_dim": 6,
    "device": torch.device("cpu"),
    "dtype": torch.float32,
}


class Scaled(torch.autograd.Function):
    """Pass a value on unchanged and its gradient 5 % too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.05


def test_the_chunked_reference_passes() -> None:
    check_gated_delta(delta_rule.gated_delta_rule, **SIZES)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_one_wrong_gradient_stops_the_run_and_names_the_fix(name: str) -> None:
    def wrong(q: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        given["q"] = q
        given[name] = Scaled.apply(given[name])
        return delta_rule.gated_delta_rule(**given)

    with pytest.raises(ConfigError, match=f"gradient of {name} is off by .*tilelang") as caught:
        check_gated_delta(wrong, **SIZES)
    assert "OCTOPUS_KERNELS=maths" in str(caught.value)


def test_a_run_that_starts_from_nothing_is_seen() -> None:
    def forgets(q: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        given["initial_state"] = given["initial_state"] * 0
        return delta_rule.gated_delta_rule(q, **given)

    with pytest.raises(ConfigError, match="output is off by"):
        check_gated_delta(forgets, **SIZES)


def test_nan_does_not_pass() -> None:
    def broken(q: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
        o, state = delta_rule.gated_delta_rule(q, **given)
        return o, state * float("nan")

    with pytest.raises(ConfigError, match="final state is off by nan"):
        check_gated_delta(broken, **SIZES)


def test_attention_that_drops_a_mount_is_seen() -> None:
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "dim": 16}
    sizes |= {"device": torch.device("cpu"), "dtype": torch.float32}
    check_attention(attention.dag_attention, **sizes)

    def blind(q: Tensor, *, plan: Any, **named: Any) -> Tensor:
        return attention.dag_attention(q, plan=plan.without_mounts(), **named)

    with pytest.raises(ConfigError, match="packed attention: output is off"):
        check_attention(blind, **sizes)


def test_the_check_draws_from_no_generator_of_the_run() -> None:
    before = torch.get_rng_state()
    check_gated_delta(delta_rule.gated_delta_rule, **SIZES)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_cpu_run_says_that_it_takes_the_references() -> None:
    model = prepare_model(tiny_hybrid())
    lines = check_kernels(model, torch.device("cpu"), torch.float32)
    assert lines == ["packed pass on the references of maths/, device cpu"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_of_this_machine_pass(dtype: torch.dtype) -> None:
    sizes: dict[str, Any] = {
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "head_dim": 64,
    }
    model = prepare_model(tiny_hybrid(**sizes))
    lines = check_kernels(model, torch.device("cuda", 0), dtype)
    assert len(lines) == 2
