"""Norms and the gate of an MLP over the rows of a packed pass in Triton, forward and backward.

One read of the inputs and one write of the result each way: nothing but inputs is kept for the
backward pass, which computes the rest again. Rounding happens where autograd over the modules
rounds, except that the gradient of a weight is summed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octopus_trl.kernels._triton import tl, triton
from octopus_trl.maths import packed_layers as maths

_TILE = 4096  # elements of a program
_WARPS = 8
_SUMS = 512  # programs that each sum a part of a weight's gradient


def packed_rms_norm(x: Tensor, *, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """Norm each row, as ``maths.packed_layers.packed_rms_norm``.

    Args:
        x: [..., d], rows evenly spaced or else copied (float64 takes the reference).
        weight: [d], gets a gradient where it needs one.

    Returns:
        [..., d] contiguous in the dtype of x.
    """
    if x.dtype == torch.float64 or x.numel() == 0:
        return maths.packed_rms_norm(x, weight=weight, eps=eps, zero_centered=zero_centered)
    y: Tensor = _RMSNorm.apply(_rows(x), weight, eps, zero_centered)
    return y.view(x.shape)


def packed_gated_norm(o: Tensor, *, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm each row and gate it, as ``maths.packed_layers.packed_gated_norm``.

    Args:
        o, z: [R, d], rows evenly spaced or else copied (float64 takes the reference).
        weight: [d], gets a gradient where it needs one.

    Returns:
        [R, d] contiguous in the dtype of o.
    """
    if o.dtype == torch.float64 or o.numel() == 0:
        return maths.packed_gated_norm(o, z=z, weight=weight, eps=eps)
    y: Tensor = _GatedNorm.apply(_rows(o), _rows(z), weight, eps)
    return y


def packed_swiglu(gate: Tensor, *, up: Tensor) -> Tensor:
    """Gate one product by SiLU of the other, as ``maths.packed_layers.packed_swiglu``.

    Args:
        gate, up: [..., F] of one dtype (float64 takes the reference).

    Returns:
        [..., F] contiguous.
    """
    if gate.dtype == torch.float64 or gate.numel() == 0:
        return maths.packed_swiglu(gate, up=up)
    y: Tensor = _SwiGLU.apply(gate.contiguous(), up.contiguous())
    return y


def _rows(x: Tensor) -> Tensor:
    """Give [R, d] whose rows are contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _blocks(dim: int) -> dict[str, int]:
    """Sizes of a program: some rows of the next power of two columns."""
    block = triton.next_power_of_2(dim)
    return {"ROWS": max(1, _TILE // block), "BLOCK": block}


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        rows, dim = x.shape
        y = torch.empty(rows, dim, dtype=x.dtype, device=x.device)
        sizes = _blocks(dim)
        _norm_forward[(triton.cdiv(rows, sizes["ROWS"]),)](
            x,
            weight,
            y,
            x.stride(0),
            rows,
            dim,
            eps,
            ZERO_CENTERED=zero_centered,
            **sizes,
            num_warps=_WARPS,
        )
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.zero_centered = eps, zero_centered
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, dim = x.shape
        grad = grad.contiguous()
        grad_x = torch.empty(rows, dim, dtype=x.dtype, device=x.device)
        sizes = _blocks(dim)
        sums, programs = _weight_sums(ctx.needs_input_grad[1], weight, rows, sizes["ROWS"])
        _norm_backward[(programs,)](
            x,
            weight,
            grad,
            grad_x,
            sums,
            x.stride(0),
            rows,
            dim,
            ctx.eps,
            ZERO_CENTERED=ctx.zero_centered,
            SUMS=ctx.needs_input_grad[1],
            **sizes,
            num_warps=_WARPS,
        )
        grad_weight = sums.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, dim = o.shape
        y = torch.empty(rows, dim, dtype=o.dtype, device=o.device)
        sizes = _blocks(dim)
        _gated_forward[(triton.cdiv(rows, sizes["ROWS"]),)](
            o, z, weight, y, o.stride(0), z.stride(0), rows, dim, eps, **sizes, num_warps=_WARPS
        )
        ctx.save_for_backward(o, z, weight)
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        o, z, weight = ctx.saved_tensors
        rows, dim = o.shape
        grad = grad.contiguous()
        grad_o = torch.empty(rows, dim, dtype=o.dtype, device=o.device)
        grad_z = torch.empty(rows, dim, dtype=z.dtype, device=z.device)
        sizes = _blocks(dim)
        sums, programs = _weight_sums(ctx.needs_input_grad[2], weight, rows, sizes["ROWS"])
        _gated_backward[(programs,)](
            o,
            z,
            weight,
            grad,
            grad_o,
            grad_z,
            sums,
            o.stride(0),
            z.stride(0),
            rows,
            dim,
            ctx.eps,
            SUMS=ctx.needs_input_grad[2],
            **sizes,
            num_warps=_WARPS,
        )
        grad_weight = sums.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return grad_o, grad_z, grad_weight, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        y = torch.empty_like(gate)
        size = gate.numel()
        grid = (triton.cdiv(size, _TILE),)
        _swiglu_forward[grid](gate, up, y, size, BLOCK=_TILE, num_warps=_WARPS)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad = grad.contiguous()
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        size = gate.numel()
        _swiglu_backward[(triton.cdiv(size, _TILE),)](
            gate, up, grad, grad_gate, grad_up, size, BLOCK=_TILE, num_warps=_WARPS
        )
        return grad_gate, grad_up


def _weight_sums(needed: bool, weight: Tensor, rows: int, rows_each: int) -> tuple[Tensor, int]:
    """Give the buffer [P, d] float32 for P programs, and P: one a tile where nothing is summed."""
    tiles = triton.cdiv(rows, rows_each)
    if not needed:
        return weight, tiles
    programs = min(tiles, _SUMS)
    shape = (programs, weight.shape[0])
    return torch.empty(shape, dtype=torch.float32, device=weight.device), programs


@triton.jit
def _norm_forward(
    x: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    x_stride: tl.tensor,
    rows: tl.tensor,
    dim: tl.tensor,
    eps: tl.tensor,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < dim)[None, :]
    dtype = y.dtype.element_ty
    at = row[:, None] * x_stride + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < dim, other=0.0).to(tl.float32)[None, :]
    unit = value * tl.rsqrt(tl.sum(value * value, 1) / dim + eps)[:, None]
    if ZERO_CENTERED:
        result = unit * (1.0 + factor)
    else:
        result = factor * unit.to(dtype).to(tl.float32)
    out = row[:, None] * dim + column[None, :]
    tl.store(y + out, result.to(dtype), mask=inside)


@triton.jit
def _norm_backward(
    x: tl.tensor,
    weight: tl.tensor,
    grad: tl.tensor,
    grad_x: tl.tensor,
    sums: tl.tensor,
    x_stride: tl.tensor,
    rows: tl.tensor,
    dim: tl.tensor,
    eps: tl.tensor,
    ZERO_CENTERED: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    real = column < dim
    dtype = grad_x.dtype.element_ty
    factor = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)[None, :]
    if ZERO_CENTERED:
        factor = 1.0 + factor
    if SUMS:
        total = tl.zeros((BLOCK,), dtype=tl.float32)
    first = tl.program_id(0) * ROWS
    for start in range(first, rows, tl.num_programs(0) * ROWS):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & real[None, :]
        at = row[:, None] * x_stride + column[None, :]
        out = row[:, None] * dim + column[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(grad + out, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value, 1) / dim + eps)[:, None]
        unit = value * inverse
        inner = given * factor
        if ZERO_CENTERED:
            seen = unit
        else:
            seen = unit.to(dtype).to(tl.float32)
            inner = inner.to(dtype).to(tl.float32)
        if SUMS:
            total += tl.sum(given * seen, 0)
        mean = (tl.sum(inner * unit, 1) / dim)[:, None]
        tl.store(grad_x + out, (inverse * (inner - unit * mean)).to(dtype), mask=inside)
    if SUMS:
        tl.store(sums + tl.program_id(0) * dim + column, total, mask=real)


@triton.jit
def _gated_forward(
    o: tl.tensor,
    z: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    o_stride: tl.tensor,
    z_stride: tl.tensor,
    rows: tl.tensor,
    dim: tl.tensor,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < dim)[None, :]
    dtype = y.dtype.element_ty
    wide = weight.dtype.element_ty
    value = tl.load(o + row[:, None] * o_stride + column[None, :], mask=inside, other=0.0)
    gate = tl.load(z + row[:, None] * z_stride + column[None, :], mask=inside, other=0.0)
    factor = tl.load(weight + column, mask=column < dim, other=0.0).to(tl.float32)[None, :]
    value = value.to(tl.float32)
    gate = gate.to(tl.float32)
    unit = value * tl.rsqrt(tl.sum(value * value, 1) / dim + eps)[:, None]
    scaled = (factor * unit.to(dtype).to(tl.float32)).to(wide).to(tl.float32)
    result = scaled * (gate * tl.sigmoid(gate))
    tl.store(y + row[:, None] * dim + column[None, :], result.to(dtype), mask=inside)


@triton.jit
def _gated_backward(
    o: tl.tensor,
    z: tl.tensor,
    weight: tl.tensor,
    grad: tl.tensor,
    grad_o: tl.tensor,
    grad_z: tl.tensor,
    sums: tl.tensor,
    o_stride: tl.tensor,
    z_stride: tl.tensor,
    rows: tl.tensor,
    dim: tl.tensor,
    eps: tl.tensor,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    real = column < dim
    dtype = grad_o.dtype.element_ty
    wide = weight.dtype.element_ty
    factor = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)[None, :]
    if SUMS:
        total = tl.zeros((BLOCK,), dtype=tl.float32)
    first = tl.program_id(0) * ROWS
    for start in range(first, rows, tl.num_programs(0) * ROWS):
        row = tl.cast(start, tl.int64) + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & real[None, :]
        out = row[:, None] * dim + column[None, :]
        value = tl.load(o + row[:, None] * o_stride + column[None, :], mask=inside, other=0.0)
        gate = tl.load(z + row[:, None] * z_stride + column[None, :], mask=inside, other=0.0)
        given = tl.load(grad + out, mask=inside, other=0.0).to(tl.float32)
        value = value.to(tl.float32)
        gate = gate.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value, 1) / dim + eps)[:, None]
        unit = value * inverse
        seen = unit.to(dtype).to(tl.float32)
        scaled = (factor * seen).to(wide).to(tl.float32)
        opened = tl.sigmoid(gate)
        slope = given * scaled * (opened * (1.0 + gate * (1.0 - opened)))
        tl.store(grad_z + out, slope.to(grad_z.dtype.element_ty), mask=inside)
        back = (given * (gate * opened)).to(wide).to(tl.float32)
        if SUMS:
            total += tl.sum(back * seen, 0)
        inner = (back * factor).to(dtype).to(tl.float32)
        mean = (tl.sum(inner * unit, 1) / dim)[:, None]
        tl.store(grad_o + out, (inverse * (inner - unit * mean)).to(dtype), mask=inside)
    if SUMS:
        tl.store(sums + tl.program_id(0) * dim + column, total, mask=real)


@triton.jit
def _swiglu_forward(
    gate: tl.tensor, up: tl.tensor, y: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    dtype = y.dtype.element_ty
    wide = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    active = (wide * tl.sigmoid(wide)).to(dtype).to(tl.float32)
    tl.store(y + at, (active * other).to(dtype), mask=inside)


@triton.jit
def _swiglu_backward(
    gate: tl.tensor,
    up: tl.tensor,
    grad: tl.tensor,
    grad_gate: tl.tensor,
    grad_up: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    dtype = grad_gate.dtype.element_ty
    wide = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(wide)
    active = (wide * opened).to(dtype).to(tl.float32)
    back = (given * other).to(dtype).to(tl.float32)
    tl.store(grad_up + at, (given * active).to(dtype), mask=inside)
    slope = opened * (1.0 + wide * (1.0 - opened))
    tl.store(grad_gate + at, (back * slope).to(dtype), mask=inside)
