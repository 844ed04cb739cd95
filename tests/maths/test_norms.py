"""Norms of a decode step: the bits of transformers' modules, and the formulas in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from octopus_trl.maths.norms import gated_rms_norm, rms_norm
from tests.tolerances import FLOAT64

DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-6


def filled(module: Any, dtype: torch.dtype) -> Any:
    """Give a norm weights that are neither its initial ones nor small."""
    torch.nn.init.normal_(module.weight, 0.5)
    return module.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dim", [1, 63, 96])
def test_rows_equal_the_modules_bit_by_bit(
    dtype: torch.dtype, with_residual: bool, zero_centered: bool, dim: int
) -> None:
    module = filled((Qwen3_5RMSNorm if zero_centered else Qwen3RMSNorm)(dim, EPS), dtype)
    x = torch.randn(5, dim, dtype=dtype)
    residual = torch.randn(5, dim, dtype=dtype) if with_residual else None
    y, h = rms_norm(
        x, weight=module.weight, eps=EPS, zero_centered=zero_centered, residual=residual
    )
    stream = x if residual is None else residual + x
    assert torch.equal(h, stream)
    assert torch.equal(y, module(stream))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_heads_equal_the_module_bit_by_bit(dtype: torch.dtype) -> None:
    module = filled(Qwen3_5RMSNormGated(12, eps=EPS), dtype)
    o, z = torch.randn(5, 3, 12, dtype=dtype), torch.randn(5, 36, dtype=dtype)
    y = gated_rms_norm(o, z=z, weight=module.weight, eps=EPS)
    assert torch.equal(y, module(o, z.view(5, 3, 12)).view(5, 36))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_float64_stays_float64(zero_centered: bool) -> None:
    x, residual, z = (torch.randn(7, 24, dtype=torch.float64) for _ in range(3))
    weight = torch.randn(24, dtype=torch.float64)
    y, h = rms_norm(x, weight=weight, eps=1e-3, zero_centered=zero_centered, residual=residual)
    factor = weight + zero_centered
    for row in range(7):
        total = x[row] + residual[row]
        want = total / (total.square().sum() / 24 + 1e-3).sqrt() * factor
        torch.testing.assert_close(y[row], want, atol=FLOAT64, rtol=0)
        torch.testing.assert_close(h[row], total, atol=0, rtol=0)
    heads = gated_rms_norm(x.view(7, 2, 12), z=z, weight=weight[:12], eps=1e-3)
    for row in range(7):
        for head in range(2):
            at = slice(12 * head, 12 * head + 12)
            o, gate = x[row, at], z[row, at]
            want = o / (o.square().sum() / 12 + 1e-3).sqrt() * weight[:12] * gate * gate.sigmoid()
            torch.testing.assert_close(heads[row, at], want, atol=FLOAT64, rtol=0)
