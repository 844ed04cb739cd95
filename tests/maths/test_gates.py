"""Gates of a decode step against transformers' modules, bit by bit."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from octopus_trl.maths.gates import sigmoid_gate, swiglu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_swiglu_is_the_inside_of_the_mlp(dtype: torch.dtype) -> None:
    mlp = Qwen3MLP(Qwen3Config(hidden_size=8, intermediate_size=20)).to(dtype)
    x = torch.randn(3, 8, dtype=dtype)
    with torch.no_grad():
        gate_up = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], dim=-1)
        assert torch.equal(mlp.down_proj(swiglu(gate_up)), mlp(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sigmoid_gate_takes_gates_that_lie_between_queries(dtype: torch.dtype) -> None:
    x, both = torch.randn(3, 4, 6, dtype=dtype), torch.randn(3, 4, 12, dtype=dtype)
    gate = both[..., 6:]
    y = sigmoid_gate(x, gate=gate)
    assert torch.equal(y, x.reshape(3, -1) * torch.sigmoid(gate.reshape(3, -1)))
