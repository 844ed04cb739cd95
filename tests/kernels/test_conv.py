"""The convolution on CUDA against the reference in float64 (marked gpu)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octopus_trl.kernels._chunks import chunk_table, keep_chunk_indices, most_chunks
from octopus_trl.kernels.conv import causal_conv
from octopus_trl.maths import conv as maths

pytestmark = pytest.mark.gpu

LENGTHS = [1, 0, 2, 3, 4, 63, 64, 65, 200, 0, 1]
CHANNELS = 192


def make(dtype: torch.dtype) -> tuple[dict[str, Any], torch.Tensor]:
    shapes = {
        "x": (sum(LENGTHS), CHANNELS),
        "weight": (CHANNELS, 4),
        "bias": (CHANNELS,),
        "tail": (len(LENGTHS), CHANNELS, 3),
    }
    inputs: dict[str, Any] = {
        name: torch.randn(*shape).to("cuda", dtype).requires_grad_()
        for name, shape in shapes.items()
    }
    return inputs, torch.tensor([0, *LENGTHS], device="cuda").cumsum(0)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("biased", [False, True])
def test_values_and_every_gradient_equal_float64(
    dtype: torch.dtype, limit: float, biased: bool
) -> None:
    inputs, cu_seqlens = make(dtype)
    if not biased:
        inputs["bias"] = None
    wide = {
        name: None if value is None else value.detach().cpu().double().requires_grad_()
        for name, value in inputs.items()
    }
    results = []
    for conv, named, bounds in (
        (causal_conv, inputs, cu_seqlens),
        (maths.causal_conv, wide, cu_seqlens.cpu()),
    ):
        torch.manual_seed(1)
        y, tail = conv(**named, cu_seqlens=bounds)
        weights = [torch.randn(x.shape, dtype=torch.float64).to(x) for x in (y, tail)]
        loss = (y * weights[0]).sum() + (tail * weights[1]).sum()
        given = [value for value in named.values() if value is not None]
        results.append([y, tail, *torch.autograd.grad(loss, given)])
    for fast, exact in zip(*results, strict=True):
        error = (fast.detach().cpu().double() - exact).norm() / exact.norm()
        assert float(error) < limit


def test_a_run_cut_anywhere_continues() -> None:
    inputs, _ = make(torch.bfloat16)
    x = inputs.pop("x")[:200]
    inputs["tail"] = inputs["tail"][:1]
    whole, tail = causal_conv(x, **inputs, cu_seqlens=torch.tensor([0, 200], device="cuda"))
    for cut in (1, 2, 3, 64, 199):
        carried, parts = inputs["tail"], []
        for part in x.split([cut, 200 - cut]):
            bounds = torch.tensor([0, len(part)], device="cuda")
            named = {**inputs, "tail": carried}
            out, carried = causal_conv(part, **named, cu_seqlens=bounds)
            parts.append(out)
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(carried, tail)


@pytest.mark.parametrize("lengths", [[1], [63], [64, 1], [5, 0, 65]], ids=str)
def test_padded_to_a_size_a_run_keeps_its_bits_whatever_stride_the_rows_have(
    lengths: list[int],
) -> None:
    """Rows of no run hold NaN, and further chunks lie past the end, as in a captured pass."""
    inputs, _ = make(torch.bfloat16)
    num, runs = sum(lengths), len(lengths)
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    more = torch.cat([bounds, bounds[-1:].expand(4)])
    x, tail = inputs.pop("x")[:num], inputs.pop("tail")[:runs]
    wide = x.new_full((128, CHANNELS + 64), float("nan"))
    wide[:num, :CHANNELS] = x
    table = chunk_table(more.cpu().numpy(), most_chunks(128, runs + 4))
    keep_chunk_indices(more, torch.from_numpy(table).cuda())
    with torch.no_grad():
        want, want_tail = causal_conv(x, **inputs, tail=tail, cu_seqlens=bounds)
        found, found_tail = causal_conv(
            wide[:, :CHANNELS],
            **inputs,
            tail=torch.cat([tail, tail.new_zeros(4, *tail.shape[1:])]),
            cu_seqlens=more,
        )
    assert torch.equal(found[:num], want)
    assert torch.equal(found_tail[:runs], want_tail)
    assert not found_tail[runs:].any()
