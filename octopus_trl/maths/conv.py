"""Causal depthwise convolution over packed runs, with the tail of inputs that each run carries.

Axes: T rows (tokens), C channels, W taps, R runs. Row t of run r is convolved with the W - 1 inputs
before it; before the run's first row those are the columns of ``tail[r]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Elements of one block of rows: small enough that a block stays in the cache between its taps.
_BLOCK_ELEMENTS = 1 << 17


def causal_conv(
    x: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Convolve every run causally, continuing from its tail, and apply SiLU.

    ``y[t, c] = silu(bias[c] + sum_w weight[c, w] * x[t - (W - 1) + w, c])``, where inputs before
    the run come from its tail (README.md, Eq. 1).

    Args:
        x: [T, C] inputs before the convolution, the runs one after another.
        weight: [C, W], the last tap multiplies the current row.
        bias: [C] or None.
        tail: [R, C, W - 1] the inputs before each run, oldest first; zeros start a root.
        cu_seqlens: [R + 1] int64, run r owns rows ``cu_seqlens[r]:cu_seqlens[r + 1]``; a run may be
            empty, and rows past the last run belong to none: y is of no use there.

    Returns:
        y [T, C] in the dtype of x (computed in float32, or float64 when x is float64), and the new
        tail [R, C, W - 1] in the dtype of ``tail``: the last W - 1 inputs of each run, completed by
        the end of its old tail when the run is shorter. Gradients reach x, weight, bias and tail.

    Source: transformers ``causal_conv1d_fn`` and ``causal_conv1d_update``, per run.
    """
    rows, width = x.shape[0], weight.shape[1]
    if rows == 0:
        return x, tail
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    starts, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
    offsets = torch.arange(width - 1, device=x.device)
    old = tail.transpose(1, 2)  # [R, W-1, C]
    taps = weight.to(dtype)

    # Every row as if the whole pack were one run; the first W - 1 rows of each run are then
    # replaced, since they alone reach back beyond their run.
    y = _DepthwiseTaps.apply(x.to(dtype), taps)
    head_rows = starts + offsets
    inside = head_rows < ends
    heads = x[head_rows.clamp(max=rows - 1)].masked_fill(~inside[..., None], 0)  # [R, W-1, C]
    windows = torch.cat([old.to(dtype), heads.to(dtype)], dim=1)
    head_y = _DepthwiseTaps.apply(windows.flatten(0, 1), taps).view_as(windows)[:, width - 1 :]
    y = y.index_copy_(0, head_rows[inside], head_y[inside])
    if bias is not None:
        y = y + bias.to(dtype)

    last_rows = ends - (width - 1) + offsets
    kept = last_rows < starts
    shifted = (ends - starts + offsets).clamp(max=max(width - 2, 0))[..., None].expand_as(old)
    last = x[last_rows.clamp(min=0)].to(tail.dtype)
    new_tail = torch.where(kept[..., None], old.gather(1, shifted), last).transpose(1, 2)
    return F.silu(y).to(x.dtype), new_tail


def causal_conv_step(
    x: Tensor, *, weight: Tensor, bias: Tensor | None, tail: Tensor
) -> tuple[Tensor, Tensor]:
    """Convolve one more row of every run and apply SiLU (README.md, Eq. 1).

    Equal to `causal_conv` on runs of one row, bit by bit, at a fifth of the operations.

    Args:
        x: [R, C] the next input of each run.
        weight: [C, W], the last tap multiplies x.
        bias: [C] or None.
        tail: [R, C, W - 1] the inputs before, oldest first.

    Returns:
        y [R, C] in the dtype of x (computed in float32, or float64 when x is float64), and the new
        tail [R, C, W - 1] in the dtype of ``tail``.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    taps = weight.to(dtype).unbind(1)
    y = x.to(dtype) * taps[-1]
    for before, tap in zip(reversed(tail.to(dtype).unbind(2)), reversed(taps[:-1]), strict=True):
        y = torch.addcmul(y, before, tap)
    if bias is not None:
        y = y + bias.to(dtype)
    new_tail = torch.cat([tail, x.to(tail.dtype)[..., None]], dim=-1)[..., 1:]
    return F.silu(y).to(x.dtype), new_tail


class _DepthwiseTaps(torch.autograd.Function):
    """``y[t] = sum_s weight[:, W - 1 - s] * x[t - s]`` with zeros before row 0, block by block.

    A framework convolution spends most of its time moving [T, C] between layouts here; W fused
    multiply-adds over blocks that stay in the cache are several times faster in the backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        taps = weight.t().flip(0).contiguous()  # [W, C], tap s multiplies x[t - s]
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for low, high in _blocks(x):
            torch.mul(x[low:high], taps[0], out=y[low:high])
            for shift in range(1, len(taps)):
                first = max(low, shift)
                if first < high:
                    y[first:high].addcmul_(x[first - shift : high - shift], taps[shift])
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        taps = weight.t().flip(0).contiguous()
        rows = len(x)
        grad_x = torch.empty_like(grad_y, memory_format=torch.contiguous_format)
        grad_taps = torch.zeros_like(taps)
        for low, high in _blocks(x):
            if ctx.needs_input_grad[0]:
                torch.mul(grad_y[low:high], taps[0], out=grad_x[low:high])
                for shift in range(1, len(taps)):
                    last = min(high, rows - shift)
                    if low < last:
                        later = grad_y[low + shift : last + shift]
                        grad_x[low:last].addcmul_(later, taps[shift])
            if ctx.needs_input_grad[1]:
                for shift in range(len(taps)):
                    first = max(low, shift)
                    if first < high:
                        product = grad_y[first:high] * x[first - shift : high - shift]
                        grad_taps[shift] += product.sum(0)
        return (
            grad_x if ctx.needs_input_grad[0] else None,
            grad_taps.flip(0).t() if ctx.needs_input_grad[1] else None,
        )


def _blocks(x: Tensor) -> list[tuple[int, int]]:
    """Row ranges that cover x, one range on an accelerator."""
    rows = len(x)
    size = max(1, _BLOCK_ELEMENTS // max(1, x.shape[1])) if x.device.type == "cpu" else max(1, rows)
    return [(low, min(low + size, rows)) for low in range(0, rows, size)]
