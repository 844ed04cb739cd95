"""Causal convolution against one window at a time, with tails, empty runs and poisoned rows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octopus_trl.maths.conv import causal_conv

LENGTHS = [5, 0, 1, 2, 3, 200, 63, 64, 65]
CHANNELS = 7


def make(
    lengths: list[int],
    width: int,
    dtype: torch.dtype = torch.float64,
    channels: int = CHANNELS,
) -> tuple[dict[str, Tensor], Tensor]:
    runs, rows = len(lengths), sum(lengths)
    shapes = {
        "x": (rows, channels),
        "weight": (channels, width),
        "bias": (channels,),
        "tail": (runs, channels, width - 1),
    }
    inputs = {
        name: torch.randn(*shape, dtype=dtype, requires_grad=True) for name, shape in shapes.items()
    }
    return inputs, torch.tensor([0, *lengths]).cumsum(0)


def naive(inputs: dict[str, Tensor], bounds: list[int]) -> tuple[Tensor, Tensor]:
    """Slide one window at a time over tail and run."""
    weight = inputs["weight"]
    width = weight.shape[1]
    rows, tails = [], []
    for run, (low, high) in enumerate(pairwise(bounds)):
        history = torch.cat([inputs["tail"][run].t(), inputs["x"][low:high]])
        for row in range(high - low):
            window = history[row : row + width]
            rows.append(F.silu((window * weight.t()).sum(0) + inputs["bias"]))
        tails.append(history[len(history) - (width - 1) :].t())
    return torch.stack(rows), torch.stack(tails)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_every_row_is_its_window(width: int) -> None:
    inputs, cu_seqlens = make(LENGTHS, width)
    y, tail = causal_conv(**inputs, cu_seqlens=cu_seqlens)
    expected, expected_tail = naive(inputs, cu_seqlens.tolist())
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=0)
    assert torch.equal(tail, expected_tail)


@pytest.mark.parametrize("lengths", [[5, 0, 1, 2], [1], [3, 3]])
def test_gradients_reach_rows_taps_bias_and_tail(lengths: list[int]) -> None:
    inputs, cu_seqlens = make(lengths, 4)
    torch.autograd.gradcheck(
        lambda x, weight, bias, tail: causal_conv(
            x, weight=weight, bias=bias, tail=tail, cu_seqlens=cu_seqlens
        ),
        list(inputs.values()),
    )


def test_matches_the_convolution_of_transformers() -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn

    inputs, cu_seqlens = make([200], 4, torch.float32)
    inputs["tail"] = torch.zeros(1, CHANNELS, 3)
    y, _ = causal_conv(**inputs, cu_seqlens=cu_seqlens)
    expected = causal_conv1d_fn(
        inputs["x"].t()[None], inputs["weight"], inputs["bias"], activation="silu"
    )
    torch.testing.assert_close(y, expected[0].t(), atol=1e-6, rtol=0)


def test_a_run_cut_anywhere_continues_bit_by_bit() -> None:
    # Whole vector registers a row: the last few elements of a tensor take another exp.
    inputs, whole = make([64], 4, torch.float32, channels=32)
    y, tail = causal_conv(**inputs, cu_seqlens=whole)
    for cut in (1, 2, 3, 4, 63):
        carried, parts = inputs["tail"], []
        for part in inputs["x"].split([cut, 64 - cut]):
            bounds = torch.tensor([0, len(part)])
            out, carried = causal_conv(
                part, **{**_without_x(inputs), "tail": carried}, cu_seqlens=bounds
            )
            parts.append(out)
        assert torch.equal(torch.cat(parts), y)
        assert torch.equal(carried, tail)


def test_a_sibling_never_moves_a_run() -> None:
    inputs, cu_seqlens = make([37, 51, 40], 4, torch.float32)
    y, tail = causal_conv(**inputs, cu_seqlens=cu_seqlens)
    poisoned = {name: value.detach().clone() for name, value in inputs.items()}
    poisoned["x"][37:88] = float("nan")
    poisoned["tail"][1] = float("nan")
    poisoned["x"].requires_grad_()
    moved, moved_tail = causal_conv(**poisoned, cu_seqlens=cu_seqlens)
    others = [*range(37), *range(88, 128)]
    assert torch.equal(moved[others], y[others])
    assert torch.equal(moved_tail[[0, 2]], tail[[0, 2]])
    (moved_grad,) = torch.autograd.grad(moved[others].sum(), poisoned["x"])
    (grad,) = torch.autograd.grad(y[others].sum(), inputs["x"])
    assert torch.equal(moved_grad[others], grad[others])
    assert torch.equal(grad[37:88], torch.zeros(51, CHANNELS))


def test_bfloat16_is_rounded_once() -> None:
    inputs, cu_seqlens = make([65, 3], 4, torch.float32)
    half = {name: value.detach().bfloat16() for name, value in inputs.items()}
    wide = {name: value.float() for name, value in half.items()}
    y, tail = causal_conv(**half, cu_seqlens=cu_seqlens)
    expected, _ = causal_conv(**wide, cu_seqlens=cu_seqlens)
    assert y.dtype == tail.dtype == torch.bfloat16
    assert torch.equal(y, expected.bfloat16())


def test_no_rows_leave_the_tail() -> None:
    inputs, _ = make([0, 0], 4)
    y, tail = causal_conv(**inputs, cu_seqlens=torch.tensor([0, 0, 0]))
    assert y.shape == (0, CHANNELS)
    assert torch.equal(tail, inputs["tail"])


def _without_x(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if name != "x"}


def test_rows_past_the_last_run_and_runs_past_the_last_row_change_nothing() -> None:
    inputs, bounds = make([1, 0, 65, 2], 4)
    rows, runs = int(bounds[-1]), len(bounds) - 1
    want, want_tail = causal_conv(**inputs, cu_seqlens=bounds)
    padded = dict(inputs)
    padded["x"] = torch.cat([inputs["x"], torch.full((9, CHANNELS), float("nan")).double()])
    padded["tail"] = torch.cat([inputs["tail"], torch.zeros(3, CHANNELS, 3).double()])
    more = torch.cat([bounds, bounds[-1:].expand(3)])
    found, found_tail = causal_conv(**padded, cu_seqlens=more)
    assert torch.equal(found[:rows], want)
    assert torch.equal(found_tail[:runs], want_tail)
    assert not found_tail[runs:].any()
