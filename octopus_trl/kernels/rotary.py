"""Head norms, rotation and the write of keys and values in one Triton launch, one program a head.

A program reads its head twice, straight and with the two rotated halves exchanged, so that no
element has to move between threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octopus_trl.kernels._triton import begin, early, tl, triton
from octopus_trl.maths import rotary as maths


def rotate_and_write(
    qkv: Tensor,
    *,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    zero_centered: bool,
    gated: bool,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Norm and rotate queries and keys and fill the pool, as ``maths.rotary.rotate_and_write``.

    Args:
        qkv: [R, H * D * (2 if gated else 1) + 2 * KV * D], rows of any stride (float64 takes the
            reference).
        q_weight, k_weight: [D]; cos, sin: [N, E / 2] contiguous; positions: [R] integers.
        keys, values: [P, S, KV, D] contiguous, written in place.
        slots: [R] integers, distinct; a negative one writes nothing.

    Returns:
        Queries [R, H, D], and the gates [R, H, D] as a view of qkv (None where there are none).
    """
    if qkv.dtype == torch.float64 or qkv.shape[0] == 0:
        return maths.rotate_and_write(
            qkv,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
            zero_centered=zero_centered,
            gated=gated,
            cos=cos,
            sin=sin,
            positions=positions,
            keys=keys,
            values=values,
            slots=slots,
        )
    rows, (kv_heads, dim) = qkv.shape[0], keys.shape[2:]
    per_head = dim * (2 if gated else 1)
    heads = (qkv.shape[1] - 2 * kv_heads * dim) // per_head
    q = torch.empty(rows, heads, dim, dtype=qkv.dtype, device=qkv.device)
    block = triton.next_power_of_2(dim)
    _rotate_and_write[(heads + 2 * kv_heads, rows)](
        qkv,
        q_weight,
        k_weight,
        cos,
        sin,
        positions,
        q,
        keys,
        values,
        slots,
        qkv.stride(0),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=cos.shape[1],
        PER_HEAD=per_head,
        ZERO_CENTERED=zero_centered,
        BLOCK=block,
        **early(qkv.device, rows),
        num_warps=1,
    )
    gate = qkv[:, : heads * per_head].unflatten(1, (heads, per_head))[..., dim:] if gated else None
    return q, gate


@triton.jit
def _rotate_and_write(
    qkv: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PER_HEAD: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin(EARLY)
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    slot = tl.load(slots + row).to(tl.int64)
    source = qkv + row * stride
    if head < HEADS:
        out = _rotated(
            source + head * PER_HEAD,
            q_weight,
            cos,
            sin,
            tl.load(positions + row).to(tl.int64),
            eps,
            DIM,
            HALF,
            ZERO_CENTERED,
            BLOCK,
        )
        tl.store(q + (row * HEADS + head) * DIM + column, out, mask=inside)
    elif slot >= 0:
        source += HEADS * PER_HEAD
        if head < HEADS + KV_HEADS:
            kv = head - HEADS
            out = _rotated(
                source + kv * DIM,
                k_weight,
                cos,
                sin,
                tl.load(positions + row).to(tl.int64),
                eps,
                DIM,
                HALF,
                ZERO_CENTERED,
                BLOCK,
            )
            to = keys + (slot * KV_HEADS + kv) * DIM + column
            tl.store(to, out.to(keys.dtype.element_ty), mask=inside)
        else:
            kv = head - HEADS - KV_HEADS
            value = tl.load(source + (KV_HEADS + kv) * DIM + column, mask=inside, other=0.0)
            to = values + (slot * KV_HEADS + kv) * DIM + column
            tl.store(to, value.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _rotated(
    source: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    position: tl.tensor,
    eps: tl.tensor,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Norm one head and rotate its first 2 HALF dims; every product is rounded, as in eager."""
    dtype = source.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    rotated = column < 2 * HALF
    first = column < HALF
    partner = tl.where(rotated, tl.where(first, column + HALF, column - HALF), column)
    value = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + partner, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(value * value, 0) / DIM + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    other_factor = tl.load(weight + partner, mask=inside, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        value = (value * inverse * (1.0 + factor)).to(dtype)
        other = (other * inverse * (1.0 + other_factor)).to(dtype)
    else:
        value = (factor * (value * inverse).to(dtype).to(tl.float32)).to(dtype)
        other = (other_factor * (other * inverse).to(dtype).to(tl.float32)).to(dtype)
    at = position * HALF + tl.where(first, column, column - HALF)
    c = tl.load(cos + at, mask=rotated, other=1.0).to(tl.float32)
    s = tl.load(sin + at, mask=rotated, other=0.0).to(tl.float32)
    straight = (value.to(tl.float32) * c).to(dtype).to(tl.float32)
    crossed = (tl.where(first, -other.to(tl.float32), other.to(tl.float32)) * s).to(dtype)
    turned = (straight + crossed.to(tl.float32)).to(dtype)
    return tl.where(rotated, turned, value)
