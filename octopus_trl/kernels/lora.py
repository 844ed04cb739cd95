"""Low-rank adapters over a fused group of projections in Triton: two launches a group."""

from __future__ import annotations

import torch
from torch import Tensor

from octopus_trl.kernels._stream import MAX_ROWS, Tiling, multiply
from octopus_trl.kernels._triton import begin, early, tl, triton
from octopus_trl.maths import lora as maths

_SHRINK = Tiling(outputs=16, depth=128, parts=8, warps=4, stages=3)  # few outputs: split the depth
_OUTPUTS = 128  # output columns of a program that expands
_RANKS = 64  # ranks of one product


def lora_shrink(x: Tensor, *, a: Tensor) -> Tensor:
    """Project the input onto the ranks of every adapter, as ``maths.lora.lora_shrink``.

    Args:
        x: [R, d], rows of any stride; more than `MAX_ROWS` rows, and float64, take the reference.
        a: [Σr, d], in the dtype of x.

    Returns:
        [R, Σr] in the dtype of x.
    """
    if x.dtype == torch.float64 or not 0 < len(x) <= MAX_ROWS:
        return maths.lora_shrink(x, a=a)
    return multiply(x, a, _SHRINK)


def lora_expand(y: Tensor, *, h: Tensor, b: Tensor, starts: Tensor) -> Tensor:
    """Add what the adapters give to the group's outputs, in place, as ``maths.lora.lora_expand``.

    Args:
        y: [R, N], rows of any stride, changed (float64 takes the reference); h: [R, Σr], rows of
            any stride, may lie beside y in one tensor.
        b: [N, r] contiguous, starts: [N] integers.

    Returns:
        y.

    Cost: a tile of columns is multiplied once for each adapter that it touches, so adapters whose
    ranges are multiples of 128 columns wide pay nothing twice.
    """
    if y.dtype == torch.float64 or y.shape[0] == 0:
        return maths.lora_expand(y, h=h, b=b, starts=starts)
    rows, num_outputs = y.shape
    block = min(64, max(16, triton.next_power_of_2(rows)))
    ranks = min(_RANKS, max(16, triton.next_power_of_2(b.shape[1])))
    _lora_expand[(triton.cdiv(num_outputs, _OUTPUTS), triton.cdiv(rows, block))](
        y,
        h,
        b,
        starts,
        rows,
        num_outputs,
        h.shape[1],
        b.shape[1],
        y.stride(0),
        h.stride(0),
        ROWS=block,
        OUTPUTS=_OUTPUTS,
        RANKS=ranks,
        **early(y.device, rows),
        num_warps=8 if block > 32 else 4,
    )
    return y


@triton.jit
def _lora_expand(
    y: tl.tensor,
    h: tl.tensor,
    b: tl.tensor,
    starts: tl.tensor,
    rows: tl.tensor,
    num_outputs: tl.tensor,
    num_ranks: tl.tensor,
    rank: tl.tensor,
    y_stride: tl.tensor,
    h_stride: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin(EARLY)
    NONE: tl.constexpr = 1 << 30
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    first = tl.load(starts + output, mask=output < num_outputs, other=-1).to(tl.int32)
    adapted = first >= 0
    given = (row < rows)[:, None]
    start = tl.min(tl.where(adapted, first, NONE), 0)
    if start < NONE:
        sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
        while start < NONE:
            mine = first == start
            for low in tl.range(0, rank, RANKS):
                j = low + tl.arange(0, RANKS)
                inside = j < rank
                left = tl.load(
                    h + row[:, None] * h_stride + start + j[None, :],
                    mask=given & (start + j < num_ranks)[None, :],
                    other=0.0,
                )
                right = tl.load(
                    b + output[None, :] * rank + j[:, None],
                    mask=mine[None, :] & inside[:, None],
                    other=0.0,
                )
                sums = tl.dot(left, right, sums, input_precision="ieee")
            start = tl.min(tl.where(first > start, first, NONE), 0)
        at = y + row[:, None] * y_stride + output[None, :]
        some = given & adapted[None, :]
        before = tl.load(at, mask=some, other=0.0).to(tl.float32)
        added = sums.to(y.dtype.element_ty).to(tl.float32)
        tl.store(at, (before + added).to(y.dtype.element_ty), mask=some)
