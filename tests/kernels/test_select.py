"""One selector decides between reference and kernel, and says what is missing."""

from __future__ import annotations

import pytest
import torch

from octopus_trl.errors import ConfigError
from octopus_trl.kernels import conv, delta_rule, select

OPERATIONS = [
    "causal_conv",
    "gated_delta_rule",
    "gated_delta_step",
    "dag_attention",
    "masked_attention",
    "merge_attention",
    "token_logps",
    "write_slots",
    "gather_slots",
    "sample",
]


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), torch.device("cuda", 0)])
def test_every_operation_is_found(op: str, device: torch.device | str) -> None:
    assert select(op, device).__name__ == op


@pytest.mark.parametrize("op", OPERATIONS)
def test_cpu_tensors_take_the_reference(op: str) -> None:
    assert select(op, "cpu").__module__.startswith("octopus_trl.maths.")


def test_cuda_tensors_take_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTOPUS_KERNELS", raising=False)
    assert select("dag_attention", "cuda:1").__module__ == "octopus_trl.kernels.attention"


def test_the_environment_forces_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTOPUS_KERNELS", "maths")
    assert select("dag_attention", "cuda").__module__ == "octopus_trl.maths.attention"


def test_an_unknown_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTOPUS_KERNELS", "fast")
    with pytest.raises(ConfigError, match="'fast', must be"):
        select("dag_attention", "cpu")


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ConfigError, match="op is 'softmax'"):
        select("softmax", "cpu")


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 1, 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for find in (conv._fla, delta_rule._fla):
        find.cache_clear()
    one, bounds = torch.zeros(1, 1), torch.tensor([0, 1])
    with pytest.raises(ConfigError, match="pip install flash-linear-attention"):
        conv.causal_conv(one, weight=one, bias=None, tail=x[..., :0], cu_seqlens=bounds)
    state = torch.zeros(1, 1, 1, 1)
    with pytest.raises(ConfigError, match="pip install flash-linear-attention"):
        delta_rule.gated_delta_step(x, k=x, v=x, g=one, beta=one, state=state)


@pytest.mark.parametrize(
    ("capability", "triton", "tilelang", "wrong"),
    [
        ((9, 0), "3.6.0", False, True),
        ((9, 0), "3.6.0+git1234", True, False),
        ((9, 0), "3.7.1", False, False),
        ((9, 0), "3.3.1", False, False),
        ((8, 0), "3.6.0", False, False),
    ],
)
def test_a_backward_known_to_be_wrong_is_recognised(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    triton: str,
    tilelang: bool,
    wrong: bool,
) -> None:
    found = object() if tilelang else None
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    fake = type("Triton", (), {"__version__": triton})
    monkeypatch.setattr(delta_rule, "import_module", lambda name: fake)
    assert delta_rule._backward_is_wrong() is wrong
