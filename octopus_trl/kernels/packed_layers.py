"""Norms, and the gate of an MLP, over the rows of a packed pass in Triton, forward and backward.

One read of the inputs and one write of the result each way: nothing but inputs is kept for the
backward pass, which computes the rest again. Rounding happens where autograd over the modules
rounds, except that the gradient of a weight is summed in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octopus_trl.kernels import _packed_kernels as bodies
from octopus_trl.kernels._triton import triton
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
    y: Tensor = _RMSNorm.apply(_rows(x), weight, eps, zero_centered, 1.0)
    return y.view(x.shape)


def packed_unit(x: Tensor, *, eps: float) -> Tensor:
    """Divide each row by its length, as ``maths.packed_layers.packed_unit``.

    Args:
        x: [..., d], rows evenly spaced or else copied (float64 takes the reference).

    Returns:
        [..., d] contiguous in the dtype of x.
    """
    if x.dtype == torch.float64 or x.numel() == 0:
        return maths.packed_unit(x, eps=eps)
    dim = x.shape[-1]
    y: Tensor = _RMSNorm.apply(_rows(x), None, eps / dim, True, dim**-0.5)
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
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool, factor: float
    ) -> Tensor:
        rows, dim = x.shape
        y = torch.empty(rows, dim, dtype=x.dtype, device=x.device)
        sizes = _blocks(dim)
        bodies.norm_forward[(triton.cdiv(rows, sizes["ROWS"]),)](
            x,
            x if weight is None else weight,
            y,
            x.stride(0),
            rows,
            dim,
            eps,
            factor,
            WEIGHT=weight is not None,
            ZERO_CENTERED=zero_centered,
            **sizes,
            num_warps=_WARPS,
        )
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.zero_centered, ctx.factor = eps, zero_centered, factor
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, dim = x.shape
        grad = grad.contiguous()
        grad_x = torch.empty(rows, dim, dtype=x.dtype, device=x.device)
        sizes = _blocks(dim)
        sums, programs = _weight_sums(ctx.needs_input_grad[1], grad_x, rows, sizes["ROWS"])
        bodies.norm_backward[(programs,)](
            x,
            x if weight is None else weight,
            grad,
            grad_x,
            sums,
            x.stride(0),
            rows,
            dim,
            ctx.eps,
            ctx.factor,
            WEIGHT=weight is not None,
            ZERO_CENTERED=ctx.zero_centered,
            SUMS=ctx.needs_input_grad[1],
            **sizes,
            num_warps=_WARPS,
        )
        grad_weight = sums.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, dim = o.shape
        y = torch.empty(rows, dim, dtype=o.dtype, device=o.device)
        sizes = _blocks(dim)
        bodies.gated_forward[(triton.cdiv(rows, sizes["ROWS"]),)](
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
        sums, programs = _weight_sums(ctx.needs_input_grad[2], grad_o, rows, sizes["ROWS"])
        bodies.gated_backward[(programs,)](
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
        bodies.swiglu_forward[grid](gate, up, y, size, BLOCK=_TILE, num_warps=_WARPS)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad = grad.contiguous()
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        size = gate.numel()
        bodies.swiglu_backward[(triton.cdiv(size, _TILE),)](
            gate, up, grad, grad_gate, grad_up, size, BLOCK=_TILE, num_warps=_WARPS
        )
        return grad_gate, grad_up


def _weight_sums(needed: bool, like: Tensor, rows: int, rows_each: int) -> tuple[Tensor, int]:
    """Give the buffer [P, d] float32 for P programs, and P: one a tile where nothing is summed."""
    tiles = triton.cdiv(rows, rows_each)
    if not needed:
        return like, tiles
    programs = min(tiles, _SUMS)
    return torch.empty(programs, like.shape[1], dtype=torch.float32, device=like.device), programs
