"""Root-mean-square norms in Triton, one program a row (or a head).

Rounding happens where the reference rounds: `x.to(pointer's type)` and back stands for a tensor of
the model's dtype that never reaches memory here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octopus_trl.kernels._triton import begin, early, tl, triton
from octopus_trl.maths import norms as maths


def rms_norm(
    x: Tensor,
    *,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the residual stream and norm each row, as ``maths.norms.rms_norm``.

    Args:
        x, residual: [R, d], rows of any stride (float64 takes the reference).
        weight: [d].

    Returns:
        y and h, [R, d] in the dtype of x; h is x itself where there is no residual.
    """
    if x.dtype == torch.float64 or x.shape[0] == 0:
        return maths.rms_norm(
            x, weight=weight, eps=eps, zero_centered=zero_centered, residual=residual
        )
    rows, dim = x.shape
    y = torch.empty(rows, dim, dtype=x.dtype, device=x.device)
    h = x if residual is None else torch.empty_like(y)
    other = x if residual is None else residual
    block = triton.next_power_of_2(dim)
    _rms_norm[(rows,)](
        x,
        other,
        weight,
        y,
        h,
        x.stride(0),
        other.stride(0),
        dim,
        eps,
        HAS_RESIDUAL=residual is not None,
        ZERO_CENTERED=zero_centered,
        BLOCK=block,
        **early(x.device, rows),
        num_warps=min(8, max(1, block // 512)),
    )
    return y, h


def gated_rms_norm(o: Tensor, *, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm each head and gate it by SiLU, as ``maths.norms.gated_rms_norm``.

    Args:
        o: [R, HV, V] contiguous (float64 takes the reference); z: [R, HV * V], rows of any stride.
        weight: [V].

    Returns:
        [R, HV * V] in the dtype of o.
    """
    if o.dtype == torch.float64 or o.shape[0] == 0:
        return maths.gated_rms_norm(o, z=z, weight=weight, eps=eps)
    rows, heads, dim = o.shape
    y = torch.empty(rows, heads * dim, dtype=o.dtype, device=o.device)
    _gated_rms_norm[(heads, rows)](
        o.contiguous(),
        z,
        weight,
        y,
        z.stride(0),
        dim,
        eps,
        BLOCK=triton.next_power_of_2(dim),
        **early(o.device, rows),
        num_warps=1,
    )
    return y


@triton.jit
def gated_unit(
    o: tl.tensor, inverse: tl.tensor, z: tl.tensor, weight: tl.tensor, dtype: tl.constexpr
) -> tl.tensor:
    """Give ``round(o / rms) * w * silu(z)`` in float32, rounded as the module does."""
    unit = (o * inverse).to(dtype).to(tl.float32)
    scaled = (weight.to(tl.float32) * unit).to(weight.dtype).to(tl.float32)
    gate = z.to(tl.float32)
    return scaled * (gate * tl.sigmoid(gate))


@triton.jit
def _rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    h: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    dim: tl.tensor,
    eps: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < dim
    dtype = y.dtype.element_ty
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        before = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        rounded = (value + before.to(tl.float32)).to(dtype)
        tl.store(h + row * dim + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    unit = value * tl.rsqrt(tl.sum(value * value, 0) / dim + eps)
    if ZERO_CENTERED:
        result = unit * (1.0 + factor)
    else:
        result = factor * unit.to(dtype).to(tl.float32)
    tl.store(y + row * dim + column, result.to(dtype), mask=inside)


@triton.jit
def _gated_rms_norm(
    o: tl.tensor,
    z: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    z_stride: tl.tensor,
    dim: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin(EARLY)
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < dim
    at = (row * tl.num_programs(0) + head) * dim + column
    value = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + row * z_stride + head * dim + column, mask=inside, other=0.0)
    factor = tl.load(weight + column, mask=inside, other=0.0)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / dim + eps)
    result = gated_unit(value, inverse, gate, factor, y.dtype.element_ty)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)
