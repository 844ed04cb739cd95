"""Adapters and the product of few rows in Triton against their references.

The same bodies run interpreted on a CPU (small sizes) and compiled on a GPU; the sizes of a real
layer are marked gpu.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from octopus_trl.maths import gates as gates_maths
from octopus_trl.maths import linear as linear_maths
from octopus_trl.maths import lora as lora_maths
from tests.kernels.interpreter import mend_loop_bounds

pytest.importorskip("triton", reason="needs Triton: pip install 'triton>=3.6,<3.8'")
from octopus_trl.kernels import _pass_tuning, _stream, _stream_tuning, gates, linear, lora
from octopus_trl.kernels._pass_tuning import PassTuning
from octopus_trl.kernels._stream import Tiling

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
    close(linear.skinny_linear(x, weight=weight), exact, limit)


def test_a_product_that_was_measured_streams_and_no_other(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """The table decides by depth, outputs with room for adapters' rows, and rows."""
    cut = _stream.Tiling(outputs=16, depth=16, parts=2, warps=4, stages=2)
    monkeypatch.setattr(_stream_tuning, "_TABLE", {(40, 50): {4: cut, 8: None}})
    monkeypatch.setattr(_pass_tuning, "_TABLE", {})
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


def test_a_pass_may_leave_no_product_to_another_library(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """A measured tiling goes before the general one, and only up to the rows of the line."""
    cut = Tiling(outputs=16, depth=16, parts=2, warps=4, stages=2)
    monkeypatch.setattr(_stream_tuning, "_TABLE", {(40, 50): {1: None, 8: cut}})
    line = PassTuning(early=False, streams=True, gated=False)
    monkeypatch.setattr(_pass_tuning, "_TABLE", {4: line})
    assert _stream_tuning.tuned(1, 40, 50) == _stream.tiling(1, 50, 40)
    assert _stream_tuning.tuned(4, 40, 50) is cut
    assert _stream_tuning.tuned(4, 40, 60) == _stream.tiling(4, 60, 40)
    assert _stream_tuning.tuned(5, 40, 50) is cut
    assert _stream_tuning.tuned(5, 40, 60) is None
    x, weight = torch.randn(4, 40, device=device).half(), torch.randn(60, 40, device=device).half()
    streamed = _stream.multiply(x, weight, _stream.tiling(4, 60, 40))
    assert torch.equal(linear.skinny_linear(x, weight=weight), streamed)


def test_passes_of_the_table_have_rows_that_the_streaming_kernel_takes() -> None:
    lines = _pass_tuning._TABLE
    assert list(lines) == sorted(lines)
    assert max(lines) <= _stream.MAX_ROWS
    assert not any(_pass_tuning.pass_tuning(max(lines) + 1))


CUTS = [
    Tiling(outputs=16, depth=16, parts=1, warps=4, stages=2),
    Tiling(outputs=32, depth=16, parts=4, warps=4, stages=2),  # shares of 2, 2, 1, 0 tiles
    Tiling(outputs=16, depth=32, parts=2, warps=4, stages=3),  # shares of 2 and 1
]

FEW = [(1, torch.float32), (16, torch.float16), (33, torch.float32), (64, torch.float16)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(("rows", "dtype"), FEW)
def test_tiles_and_parts_past_the_ends_of_a_matrix_add_nothing(
    rows: int, cut: Tiling, dtype: torch.dtype, device: torch.device
) -> None:
    for outputs, dim in ((35, 67), (3, 5)):
        x = torch.full((rows, dim + 3), float("nan"), device=device, dtype=dtype)[:, :dim]
        x.copy_(torch.randn(rows, dim))
        weight = torch.randn(outputs, dim, device=device).to(dtype)
        want = _stream.multiply(x, weight, cut)
        exact = x.cpu().double() @ weight.cpu().double().T
        close(want, exact, 2e-6 if dtype == torch.float32 else 2e-3)
    assert not bool(_stream._counters(device, 1).any())


def check_gate(
    rows: int, inner: int, dim: int, cut: Tiling, dtype: torch.dtype, device: torch.device
) -> None:
    """Compare a product with its gate to the two launches, bit by bit."""
    x = torch.randn(rows, dim, device=device)
    weight = torch.randn(2 * inner, dim, device=device) / dim**0.5
    if device.type == "cpu":
        # NumPy's sums depend on a line's place in a tile: make them exact.
        x, weight = (4 * x).round() / 4, (64 * weight).round() / 64
    x, weight = x.to(dtype), weight.to(dtype)
    want = gates.swiglu(_stream.multiply(x, weight, cut))
    assert torch.equal(_stream.multiply(x, weight, cut, gated=True), want)
    exact = gates_maths.swiglu(x.cpu().double() @ weight.cpu().double().T)
    close(want, exact, {torch.float32: 2e-6, torch.float16: 2e-3}.get(dtype, 2e-2))


@pytest.mark.parametrize(("rows", "dtype"), FEW)
def test_gate_and_up_in_one_product_have_the_bits_of_two_launches(
    rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_gate(rows, 1, 5, CUTS[0], dtype, device)
    check_gate(rows, 35, 67, CUTS[2]._replace(parts=1), dtype, device)
    check_gate(rows, 16, 64, CUTS[0]._replace(outputs=32), dtype, device)


def test_gate_and_up_are_one_launch_where_the_table_says_so_and_the_sums_are_whole(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(
        _pass_tuning, "_TABLE", {4: PassTuning(early=False, streams=True, gated=True)}
    )
    split = Tiling(outputs=16, depth=16, parts=2, warps=4, stages=2)
    monkeypatch.setattr(_stream_tuning, "_TABLE", {(40, 60): {4: split}})
    gated: list[tuple[int, ...]] = []

    def multiply(x: Tensor, weight: Tensor, cut: Tiling, **options: bool) -> Tensor:
        gated.extend([(len(x), len(weight))] if options.get("gated") else [])
        return _stream.multiply(x, weight, cut, **options)

    monkeypatch.setattr(linear, "multiply", multiply)
    for rows, outputs in ((1, 50), (4, 50), (4, 60), (5, 50)):
        x = torch.randn(rows, 40, device=device).half()
        weight = torch.randn(outputs, 40, device=device).half() / 6
        want = gates.swiglu(linear.skinny_linear(x, weight=weight))
        assert torch.equal(linear.gated_linear(x, weight=weight), want)
        exact = linear_maths.gated_linear(x.cpu().double(), weight=weight.cpu().double())
        close(want, exact, 2e-3)
    assert gated == [(1, 50), (4, 50)]


def test_parts_of_the_depth_add_up_and_leave_the_counters_at_zero(device: torch.device) -> None:
    x, weight = torch.randn(2, 70, device=device), torch.randn(33, 70, device=device)
    exact = linear_maths.skinny_linear(x.cpu().double(), weight=weight.cpu().double())
    cut = _stream.Tiling(outputs=16, depth=16, parts=4, warps=4, stages=2)
    for _ in range(2):
        close(_stream.multiply(x, weight, cut), exact, 1e-6)
    assert not bool(_stream._counters(device, 1).any())


def test_counters_that_grow_leave_those_of_captured_graphs_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_stream, "_arrived", {})
    device = torch.device("cpu")
    few = _stream._counters(device, 10)
    alive, address = weakref.ref(few), few.data_ptr()
    assert _stream._counters(device, len(few)) is few
    del few
    many = _stream._counters(device, 5000)
    assert len(many) >= 5000
    assert _stream._counters(device, 10) is many
    kept = alive()
    assert kept is not None
    assert kept.data_ptr() == address


def test_how_a_matrix_is_cut_covers_its_depth_and_its_parts_ignore_the_rows() -> None:
    measured = [(2560, 9216), (2560, 4096), (18432, 2560), (12352, 2560), (8, 100)]
    odd = [(1024, 3584), (896, 896), (2048, 5632), (1152, 6912), (64, 1080), (64, 8191)]
    for outputs, dim in measured + odd:
        cuts = [_stream.tiling(rows, outputs, dim) for rows in (1, 16, 17, 33, 64)]
        shares = set()
        for cut in cuts:
            steps = -(-dim // cut.depth)
            assert 1 <= cut.parts <= steps
            share = -(-steps // cut.parts) * cut.depth if cut.parts > 1 else dim
            shares.add((cut.parts, share))
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
@pytest.mark.parametrize("rows", [1, 16, 33, 64])
def test_gate_and_up_of_a_real_layer_have_the_bits_of_two_launches(rows: int) -> None:
    device = torch.device("cuda")
    for inner in (9216, 9728, 77):
        cut = _stream.tiling(rows, 2 * inner, 2560)._replace(parts=1)
        check_gate(rows, inner, 2560, cut, torch.bfloat16, device)


@pytest.mark.gpu
def test_products_are_the_same_each_time() -> None:
    x = torch.randn(16, 9216, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(2560, 9216, device="cuda", dtype=torch.bfloat16)
    first = linear.skinny_linear(x, weight=weight)
    for _ in range(50):
        assert torch.equal(linear.skinny_linear(x, weight=weight), first)
