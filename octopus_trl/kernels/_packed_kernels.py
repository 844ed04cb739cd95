"""Bodies of the kernels of `packed_layers`: norms, and the gate of an MLP, forward and backward.

Rounding happens where autograd over the modules rounds: `x.to(pointer's type)` and back stands for
a tensor of the model's dtype that never reaches memory here.
"""

from __future__ import annotations

from octopus_trl.kernels._triton import tl, triton
from octopus_trl.kernels.gates import gated_value
from octopus_trl.kernels.norms import gated_unit


@triton.jit
def norm_forward(
    x: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    x_stride: tl.tensor,
    rows: tl.tensor,
    dim: tl.tensor,
    eps: tl.tensor,
    constant: tl.tensor,
    WEIGHT: tl.constexpr,
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
    unit = value * tl.rsqrt(tl.sum(value * value, 1) / dim + eps)[:, None]
    if WEIGHT:
        factor = tl.load(weight + column, mask=column < dim, other=0.0).to(tl.float32)[None, :]
        if ZERO_CENTERED:
            result = unit * (1.0 + factor)
        else:
            result = factor * unit.to(dtype).to(tl.float32)
    else:
        result = unit * constant
    out = row[:, None] * dim + column[None, :]
    tl.store(y + out, result.to(dtype), mask=inside)


@triton.jit
def norm_backward(
    x: tl.tensor,
    weight: tl.tensor,
    grad: tl.tensor,
    grad_x: tl.tensor,
    sums: tl.tensor,
    x_stride: tl.tensor,
    rows: tl.tensor,
    dim: tl.tensor,
    eps: tl.tensor,
    constant: tl.tensor,
    WEIGHT: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    SUMS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.arange(0, BLOCK)
    real = column < dim
    dtype = grad_x.dtype.element_ty
    if WEIGHT:
        factor = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)[None, :]
        if ZERO_CENTERED:
            factor = 1.0 + factor
    else:
        factor = constant
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
def gated_forward(
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
    dtype: tl.constexpr = y.dtype.element_ty
    value = tl.load(o + row[:, None] * o_stride + column[None, :], mask=inside, other=0.0)
    gate = tl.load(z + row[:, None] * z_stride + column[None, :], mask=inside, other=0.0)
    factor = tl.load(weight + column, mask=column < dim, other=0.0)[None, :]
    value = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / dim + eps)[:, None]
    result = gated_unit(value, inverse, gate, factor, dtype)
    tl.store(y + row[:, None] * dim + column[None, :], result.to(dtype), mask=inside)


@triton.jit
def gated_backward(
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
def swiglu_forward(
    gate: tl.tensor, up: tl.tensor, y: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    opened = tl.load(gate + at, mask=inside, other=0.0)
    other = tl.load(up + at, mask=inside, other=0.0)
    tl.store(y + at, gated_value(opened, other), mask=inside)


@triton.jit
def swiglu_backward(
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
