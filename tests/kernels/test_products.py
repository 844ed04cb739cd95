"""Adapters and the product of few rows in Triton against their references.

The same bodies run interpreted on a CPU (small sizes) and compiled on a GPU; the sizes of a real
layer are marked gpu.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octopus_trl.maths import linear as linear_maths
from octopus_trl.maths import lora as lora_maths
from tests.kernels.interpreter import mend_loop_bounds

pytest.importorskip("triton", reason="needs Triton: pip install 'triton>=3.6,<3.8'")
from octopus_trl.kernels import _stream, _stream_tuning, linear, lora

mend_loop_bounds()

DTYPES = [torch.float32, torch.float16]  # bfloat16 products do not exist in the interpreter


def close(got: Tensor, exact: Tensor, limit: float) -> None:
    error = (got.cpu().double() - exact).norm() / exact.norm()
    assert float(error) < limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "dim"), [(65, 63), (3, 200)])
def test_few_rows_times_a_matrix_equal_float64(
    outputs: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(3, dim + 5, device=device).to(dtype)[:, :dim]
    weight = torch.randn(outputs, dim, device=device).to(dtype)
    exact = linear_maths.skinny_linear(x.cpu().double(), weight=weight.cpu().double())
    limit = 1e-6 if dtype == torch.float32 else 1e-3
    close(_stream.multiply(x, weight, _stream.tiling(3, outputs, dim)), exact, limit)
    close(linear.skinny_linear(x, weight=weight), exact, limit)  # BLAS: nobody measured it


def test_a_product_that_was_measured_streams_and_no_other(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The table decides by depth, outputs with room for adapters' rows, and rows."""
    cut = _stream.Tiling(outputs=16, depth=16, parts=2, warps=4, stages=2)
    monkeypatch.setattr(_stream_tuning, "_TABLE", {(40, 50): {4: cut, 8: None}})
    streamed: list[tuple[int, ...]] = []

    def multiply(x: Tensor, weight: Tensor, given: _stream.Tiling) -> Tensor:
        assert given is cut
        streamed.append((*x.shape, len(weight)))
        return _stream.multiply(x, weight, given)

    monkeypatch.setattr(linear, "multiply", multiply)
    for rows, dim, outputs in ((1, 40, 50), (4, 40, 53), (4, 40, 54), (4, 40, 49), (4, 41, 50)):
        for count in (rows, rows + 4, rows + 5):
            x = torch.randn(count, dim, device=device).half()
            weight = torch.randn(outputs, dim, device=device).half()
            exact = x.cpu().double() @ weight.cpu().double().T
            close(linear.skinny_linear(x, weight=weight), exact, 1e-3)
    assert streamed == [(1, 40, 50), (4, 40, 53)]


def test_parts_of_the_depth_add_up_and_leave_the_counters_at_zero(device: torch.device) -> None:
    x, weight = torch.randn(2, 70, device=device), torch.randn(33, 70, device=device)
    exact = linear_maths.skinny_linear(x.cpu().double(), weight=weight.cpu().double())
    cut = _stream.Tiling(outputs=16, depth=16, parts=4, warps=4, stages=2)
    for _ in range(2):
        close(_stream.multiply(x, weight, cut), exact, 1e-6)
    assert not bool(_stream._counters(device, 1).any())


def test_how_a_matrix_is_cut_covers_its_depth_and_its_parts_ignore_the_rows() -> None:
    for outputs, dim in [(2560, 9216), (2560, 4096), (18432, 2560), (12352, 2560), (8, 100)]:
        cuts = [_stream.tiling(rows, outputs, dim) for rows in (1, 16, 17, 33, 64)]
        shares = set()
        for cut in cuts:
            steps = -(-dim // cut.depth)
            assert 1 <= cut.parts <= steps
            shares.add((cut.parts, -(-steps // cut.parts) * cut.depth if cut.parts > 1 else dim))
        assert len(shares) == 1


def group(dtype: torch.dtype, device: torch.device, scale: int) -> dict[str, Tensor]:
    """Three projections side by side, the middle one without an adapter, of unequal ranks."""
    ranks, columns = (3 * scale, 4 * scale), (10 * scale, 7, 20 * scale)
    b = torch.randn(sum(columns), max(ranks), device=device).to(dtype)
    b[: columns[0], ranks[0] :] = 0
    starts = torch.full((sum(columns),), -1, dtype=torch.int32, device=device)
    starts[: columns[0]] = 0
    starts[-columns[2] :] = ranks[0]
    return {"b": b, "starts": starts}


def check_adapters(
    rows: int, dim: int, dtype: torch.dtype, device: torch.device, scale: int, limit: float
) -> None:
    named = group(dtype, device, scale)
    num_outputs, ranks = len(named["starts"]), 7 * scale
    a = torch.randn(ranks, dim, device=device).to(dtype) / dim**0.5
    x = torch.randn(rows, dim, device=device).to(dtype)
    h = lora.lora_shrink(x, a=a)
    close(h, lora_maths.lora_shrink(x.cpu().double(), a=a.cpu().double()), limit)
    # Outputs and ranks side by side in one product, as where A lies below the weights.
    product = torch.randn(rows, num_outputs + ranks, device=device).to(dtype)
    product[:, num_outputs:] = h
    y = product[:, :num_outputs]
    before = y.clone()
    exact = lora_maths.lora_expand(
        y.cpu().double(),
        h=h.cpu().double(),
        b=named["b"].cpu().double(),
        starts=named["starts"].cpu(),
    )
    assert lora.lora_expand(y, h=product[:, num_outputs:], **named) is y
    close(y, exact, limit)
    untouched = named["starts"] < 0
    assert torch.equal(y[:, untouched], before[:, untouched])
    assert torch.equal(product[:, num_outputs:], h)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_of_a_fused_group_equal_float64(dtype: torch.dtype, device: torch.device) -> None:
    check_adapters(3, 37, dtype, device, 1, 1e-6 if dtype == torch.float32 else 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 63, 64, 65])
@pytest.mark.parametrize("scale", [1, 7, 32])
def test_adapters_of_a_real_layer_equal_float64(rows: int, scale: int) -> None:
    check_adapters(rows, 2560, torch.bfloat16, torch.device("cuda"), scale, 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "dim"), [(2560, 9216), (2560, 4096), (18432, 2560), (77, 99)])
def test_a_row_has_the_same_bits_whatever_is_beside_it(outputs: int, dim: int) -> None:
    x = torch.randn(64, dim, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outputs, dim, device="cuda", dtype=torch.bfloat16) / dim**0.5

    def product(rows: int) -> Tensor:
        return _stream.multiply(x[:rows], weight, _stream.tiling(rows, outputs, dim))

    whole = product(64)
    close(whole, x.cpu().double() @ weight.cpu().double().T, 1e-2)
    for rows in (1, 2, 8, 16, 17, 33, 63):
        assert torch.equal(product(rows), whole[:rows])
    assert not bool(_stream._counters(x.device, 1).any())


@pytest.mark.gpu
def test_products_are_the_same_each_time() -> None:
    x = torch.randn(16, 9216, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2560, 9216, device="cuda", dtype=torch.bfloat16)
    first = linear.skinny_linear(x, weight=weight)
    for _ in range(50):
        assert torch.equal(linear.skinny_linear(x, weight=weight), first)
