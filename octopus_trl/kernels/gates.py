"""Gates of a decoder layer in Triton: one read of the inputs, one write of the product."""

from __future__ import annotations

import torch
from torch import Tensor

from octopus_trl.kernels._triton import begin, early, tl, triton
from octopus_trl.maths import gates as maths

_BLOCK = 1024  # elements of a program: small, so that a few rows fill the device


def swiglu(gate_up: Tensor) -> Tensor:
    """Gate the upper half of each row by SiLU of the lower half, as ``maths.gates.swiglu``.

    Args:
        gate_up: [R, 2 F], rows of any stride (float64 takes the reference).

    Returns:
        [R, F] in the dtype of `gate_up`.
    """
    if gate_up.dtype == torch.float64 or gate_up.shape[0] == 0:
        return maths.swiglu(gate_up)
    rows, dim = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(rows, dim, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(triton.cdiv(dim, _BLOCK), rows)](
        gate_up, y, gate_up.stride(0), dim, BLOCK=_BLOCK, **early(y.device, rows), num_warps=4
    )
    return y


def sigmoid_gate(x: Tensor, *, gate: Tensor) -> Tensor:
    """Gate the outputs of attention, as ``maths.gates.sigmoid_gate``.

    Args:
        x: [R, H, D] contiguous (float64 takes the reference).
        gate: [R, H, D], rows and heads of any stride.

    Returns:
        [R, H * D] in the dtype of x.
    """
    if x.dtype == torch.float64 or x.shape[0] == 0:
        return maths.sigmoid_gate(x, gate=gate)
    rows, heads, dim = x.shape
    y = torch.empty(rows, heads * dim, dtype=x.dtype, device=x.device)
    _sigmoid_gate[(triton.cdiv(heads * dim, _BLOCK), rows)](
        x.contiguous(),
        gate,
        y,
        gate.stride(0),
        gate.stride(1),
        heads * dim,
        dim,
        BLOCK=_BLOCK,
        **early(x.device, rows),
        num_warps=4,
    )
    return y


@triton.jit
def gated_value(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """Give ``silu(gate) * up`` in their dtype, rounded as the module does."""
    wide = gate.to(tl.float32)
    active = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    return (active * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _swiglu(
    gate_up: tl.tensor,
    y: tl.tensor,
    stride: tl.tensor,
    dim: tl.tensor,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin(EARLY)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = column < dim
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + dim + column, mask=inside, other=0.0)
    tl.store(y + row * dim + column, gated_value(gate, up), mask=inside)


@triton.jit
def _sigmoid_gate(
    x: tl.tensor,
    gate: tl.tensor,
    y: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    size: tl.tensor,
    dim: tl.tensor,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin(EARLY)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = column < size
    dtype = y.dtype.element_ty
    value = tl.load(x + row * size + column, mask=inside, other=0.0).to(tl.float32)
    at = row * row_stride + (column // dim) * head_stride + column % dim
    opened = tl.sigmoid(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(y + row * size + column, (value * opened.to(dtype).to(tl.float32)).to(dtype), inside)
