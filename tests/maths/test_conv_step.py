"""The convolution of a decode step is the packed one on runs of one row."""

from __future__ import annotations

import pytest
import torch

from octopus_trl.maths.conv import causal_conv, causal_conv_step


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("with_bias", [False, True])
def test_one_row_of_every_run_equals_the_packed_convolution_bitwise(
    dtype: torch.dtype, width: int, with_bias: bool
) -> None:
    runs, channels = 5, 6
    x = torch.randn(runs, channels, dtype=dtype)
    weight = torch.randn(channels, width, dtype=dtype)
    bias = torch.randn(channels, dtype=dtype) if with_bias else None
    tail = torch.randn(runs, channels, width - 1, dtype=dtype)
    y, new_tail = causal_conv_step(x, weight=weight, bias=bias, tail=tail)
    want_y, want_tail = causal_conv(
        x, weight=weight, bias=bias, tail=tail, cu_seqlens=torch.arange(runs + 1)
    )
    assert torch.equal(y, want_y)
    assert torch.equal(new_tail, want_tail)
