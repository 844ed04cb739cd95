"""Norms and SwiGLU of the packed pass in Triton, values and gradients against float64.

The same bodies run interpreted on a CPU (small sizes) and compiled on a GPU; the sizes of a real
layer are marked gpu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octopus_trl.maths import packed_layers as maths

pytest.importorskip("triton", reason="needs Triton: pip install 'triton>=3.6,<3.8'")
from octopus_trl.kernels import packed_layers as kernels
from tests.kernels.interpreter import mend_loop_bounds

mend_loop_bounds()

# The interpreter rounds bfloat16 toward zero, so narrow floats are float16 there.
DTYPES = [torch.float32, torch.float16]
GPU_DTYPES = [torch.float32, torch.bfloat16]
LIMIT = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # relative norm
ROWS = [1, 63, 64, 65]


def apart(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw rows that lie apart in a wider tensor, whose other columns are poisoned."""
    whole = torch.full((rows, width + 24), float("nan"), dtype=dtype, device=device)
    whole[:, 8 : 8 + width] = torch.randn(rows, width, device=device).to(dtype)
    return whole[:, 8 : 8 + width]


def results(call: Callable[..., Tensor], given: dict[str, Tensor], grad: Tensor) -> list[Tensor]:
    """Give a function's value and the gradients of all its tensors."""
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    out = call(*leaves.values())
    return [out, *torch.autograd.grad(out, [*leaves.values()], grad.to(out))]


def check(
    fast: Callable[..., Tensor], exact: Callable[..., Tensor], given: dict[str, Tensor]
) -> None:
    """Compare with float64, each tensor by the norm of its difference."""
    first = next(iter(given.values()))
    grad = torch.randn_like(first)
    found = results(fast, given, grad)
    wide = {name: x.double() for name, x in given.items()}
    for got, want in zip(found, results(exact, wide, grad), strict=True):
        assert got.isfinite().all()
        error = (got.double() - want).norm() / want.norm()
        assert error <= LIMIT[first.dtype], error


def check_norm(
    rows: int, dim: int, dtype: torch.dtype, device: torch.device, *, centered: bool
) -> None:
    given = {"x": apart(rows, dim, dtype, device), "weight": torch.randn(dim, device=device)}
    given["weight"] = given["weight"].to(dtype)
    options: dict[str, Any] = {"eps": 1e-6, "zero_centered": centered}
    check(
        lambda x, weight: kernels.packed_rms_norm(x, weight=weight, **options),
        lambda x, weight: maths.packed_rms_norm(x, weight=weight, **options),
        given,
    )


def check_unit(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    check(
        lambda x: kernels.packed_unit(x, eps=1e-6),
        lambda x: maths.packed_unit(x, eps=1e-6),
        {"x": apart(rows, dim, dtype, device)},
    )


def check_gated(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    given = {
        "o": apart(rows, dim, dtype, device),
        "z": apart(rows, dim, dtype, device),
        "weight": torch.randn(dim, device=device).to(dtype),
    }
    check(
        lambda o, z, weight: kernels.packed_gated_norm(o, z=z, weight=weight, eps=1e-6),
        lambda o, z, weight: maths.packed_gated_norm(o, z=z, weight=weight, eps=1e-6),
        given,
    )


def check_swiglu(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    check(
        lambda gate, up: kernels.packed_swiglu(gate, up=up),
        lambda gate, up: maths.packed_swiglu(gate, up=up),
        {name: apart(rows, dim, dtype, device) for name in ("gate", "up")},
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("centered", [True, False])
def test_the_norm_and_its_gradients_equal_the_reference(
    rows: int, dtype: torch.dtype, centered: bool, device: torch.device
) -> None:
    check_norm(rows, 65, dtype, device, centered=centered)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_length_one_and_their_gradients_equal_the_reference(
    rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_unit(rows, 65, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_the_gated_norm_and_its_gradients_equal_the_reference(
    rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_gated(rows, 12, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_swiglu_and_its_gradients_equal_the_reference(
    rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_swiglu(rows, 65, dtype, device)


def test_a_wide_row_is_one_program(device: torch.device) -> None:
    check_norm(3, 5000, torch.float32, device, centered=True)


def test_programs_that_sum_a_gradient_cover_every_row(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_SUMS", 2)
    monkeypatch.setattr(kernels, "_TILE", 256)
    check_norm(63, 65, torch.float32, device, centered=True)
    check_gated(65, 65, torch.float32, device)


def test_a_weight_that_is_frozen_gets_no_gradient(device: torch.device) -> None:
    x = torch.randn(5, 16, device=device, requires_grad=True)
    weight = torch.randn(16, device=device)
    norm = {"weight": weight, "eps": 1e-6}
    y = kernels.packed_rms_norm(x, zero_centered=True, **norm)  # type: ignore[arg-type]
    y = kernels.packed_gated_norm(y, z=x, **norm)  # type: ignore[arg-type]
    y.sum().backward()
    assert x.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_no_rows_give_no_rows(shape: tuple[int, ...], device: torch.device) -> None:
    x = torch.randn(shape, device=device, requires_grad=True)
    weight = torch.randn(16, device=device)
    norm = kernels.packed_rms_norm(x, weight=weight, eps=1e-6, zero_centered=False)
    y = kernels.packed_swiglu(norm, up=x)
    assert y.shape == x.shape
    y.sum().backward()


def test_leading_axes_and_strides_are_those_of_heads(device: torch.device) -> None:
    whole = torch.randn(1, 7, 3, 32, device=device)
    heads, weight = whole[..., :16], torch.randn(16, device=device)
    given: dict[str, Any] = {"weight": weight, "eps": 1e-6, "zero_centered": True}
    got = kernels.packed_rms_norm(heads, **given)
    torch.testing.assert_close(got, maths.packed_rms_norm(heads, **given), atol=1e-6, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("rows", [63, 20_001])
def test_layers_of_a_real_model(rows: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    check_norm(rows, 2560, dtype, device, centered=True)
    check_norm(rows, 256, dtype, device, centered=False)
    check_unit(rows, 128, dtype, device)
    check_gated(rows, 128, dtype, device)
    check_swiglu(rows // 8, 9216, dtype, device)


@pytest.mark.gpu
def test_a_bfloat16_row_comes_out_as_the_reference_rounds_it() -> None:
    """One bit may differ where the order of a sum decides a rounding."""
    x, z = (torch.randn(4097, 256, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(256, device="cuda").bfloat16()
    pairs = [
        (
            function(x, weight=weight, eps=1e-6, zero_centered=centered)
            for function in (kernels.packed_rms_norm, maths.packed_rms_norm)
        )
        for centered in (True, False)
    ]
    pairs.append(
        function(x, z=z, weight=weight, eps=1e-6)
        for function in (kernels.packed_gated_norm, maths.packed_gated_norm)
    )
    pairs.append(function(x, up=z) for function in (kernels.packed_swiglu, maths.packed_swiglu))
    for got, want in pairs:
        assert (got != want).float().mean() < 0.01
