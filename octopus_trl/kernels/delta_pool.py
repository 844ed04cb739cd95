"""One decode step of a gated delta layer in one Triton launch, the gates of a prefill in another.

A program owns one row and one key head with the value heads that read it, so that every channel of
a convolution tail is read and written by one program and a step in place needs no second launch.
The launch is bound by reading and writing 2 HV K V floats a row: a program streams its states in
tiles of value columns, the next ones on their way to shared memory while it works on one. Both
sums over K are taken of the old state, ``S_t^T q = alpha S^T q + w (k . q)``, so that a tile is
reduced once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octopus_trl.kernels._triton import (
    await_inputs,
    begin,
    early,
    release_next,
    tl,
    triton,
)
from octopus_trl.kernels.norms import gated_unit
from octopus_trl.maths import delta_pool as maths


class Tiling(NamedTuple):
    """How a program walks its states.

    Attributes:
        columns: value columns of a tile, a power of two.
        warps: of a program.
        stages: tiles in flight, the one at hand included.
    """

    columns: int
    warps: int
    stages: int


# 2026-12-01, H200, us at 16, 64, 128 rows: 24, 80, 153; three tiles of 32 in flight 26, 88, 167.
TILING = Tiling(columns=64, warps=4, stages=2)
_THREADS = 32  # of a warp
_GATES = 256  # of a program


def delta_gates(a: Tensor, *, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Give decay and write strength of rows, as ``maths.delta_pool.delta_gates``.

    Args:
        a, b: [R, HV], rows of any stride (float64 takes the reference); A_log, dt_bias: [HV].

    Returns:
        g and beta, [R, HV] float32.
    """
    if a.dtype == torch.float64 or a.shape[0] == 0:
        return maths.delta_gates(a, b=b, A_log=A_log, dt_bias=dt_bias)
    rows, heads = a.shape
    g = torch.empty(rows, heads, dtype=torch.float32, device=a.device)
    beta = torch.empty_like(g)
    _delta_gates[(triton.cdiv(rows * heads, _GATES),)](
        a,
        b,
        A_log,
        dt_bias,
        g,
        beta,
        a.stride(0),
        b.stride(0),
        rows * heads,
        HEADS=heads,
        BLOCK=_GATES,
        **early(a.device, rows),
        num_warps=4,
    )
    return g, beta


def gated_delta_pool_step(
    mixed: Tensor,
    *,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    tails: Tensor,
    states: Tensor,
    read: Tensor,
    write: Tensor,
    num_key_heads: int,
    z: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor:
    """Advance every row by one token, as ``maths.delta_pool.gated_delta_pool_step``.

    Args:
        mixed: [R, C]; a, b: [R, HV]; z: [R, HV * V] or None; rows of any stride (float64 takes the
            reference).
        conv_weight, conv_bias: [C, W], [C] or None; A_log, dt_bias: [HV]; norm_weight: [V] or None.
        tails, states: [S, C, W - 1] and [S, HV, K, V] float32, contiguous, changed in place.
        read, write: [R] integers; a row whose `write` is at most 0 is padding.
        num_key_heads: HK.
        norm_eps: of the gated norm.

    Returns:
        [R, HV * V] in the dtype of `mixed`.
    """
    if mixed.dtype == torch.float64 or mixed.shape[0] == 0:
        return maths.gated_delta_pool_step(
            mixed,
            a=a,
            b=b,
            conv_weight=conv_weight,
            conv_bias=conv_bias,
            A_log=A_log,
            dt_bias=dt_bias,
            tails=tails,
            states=states,
            read=read,
            write=write,
            num_key_heads=num_key_heads,
            z=z,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
        )
    heads, key_dim, value_dim = states.shape[1:]
    out = torch.empty(len(mixed), heads * value_dim, dtype=mixed.dtype, device=mixed.device)
    key_block = triton.next_power_of_2(key_dim)
    columns = min(TILING.columns, triton.next_power_of_2(value_dim))
    group = heads // num_key_heads
    _delta_pool_step[(num_key_heads, len(mixed))](
        mixed,
        a,
        b,
        mixed if z is None else z,
        conv_weight,
        conv_weight if conv_bias is None else conv_bias,
        A_log,
        dt_bias,
        conv_weight if norm_weight is None else norm_weight,
        tails,
        states,
        read,
        write,
        out,
        mixed.stride(0),
        a.stride(0),
        b.stride(0),
        0 if z is None else z.stride(0),
        key_dim**-0.5,
        norm_eps,
        KEY_HEADS=num_key_heads,
        GROUP=group,
        K=key_dim,
        V=value_dim,
        W=conv_weight.shape[1],
        HAS_BIAS=conv_bias is not None,
        HAS_NORM=z is not None,
        KEY_BLOCK=key_block,
        GROUP_BLOCK=triton.next_power_of_2(group),
        COLUMNS=columns,
        TILES=triton.next_power_of_2(triton.cdiv(value_dim, columns)),
        STAGES=TILING.stages,
        **early(mixed.device, len(mixed)),
        # A thread holds an element at least, so that no element has two owners.
        num_warps=max(1, min(TILING.warps, key_block * columns // _THREADS)),
    )
    return out


@triton.jit
def _delta_gates(
    a: tl.tensor,
    b: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    count: tl.tensor,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin(EARLY)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    row = (place // HEADS).to(tl.int64)
    head = place % HEADS
    shift = tl.load(a + row * a_stride + head, mask=inside, other=0.0).to(tl.float32)
    shift += tl.load(dt_bias + head, mask=inside, other=0.0).to(tl.float32)
    rate = tl.load(a_log + head, mask=inside, other=0.0).to(tl.float32)
    strength = tl.load(b + row * b_stride + head, mask=inside, other=0.0)
    decay, written = _gates(rate, shift, strength)
    tl.store(g + place, decay, mask=inside)
    tl.store(beta + place, written, mask=inside)


@triton.jit
def _delta_pool_step(
    mixed: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    z: tl.tensor,
    conv_weight: tl.tensor,
    conv_bias: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    norm_weight: tl.tensor,
    tails: tl.tensor,
    states: tl.tensor,
    read: tl.tensor,
    write: tl.tensor,
    out: tl.tensor,
    mixed_stride: tl.tensor,
    a_stride: tl.tensor,
    b_stride: tl.tensor,
    z_stride: tl.tensor,
    scale: tl.tensor,
    norm_eps: tl.tensor,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    CHANNELS: tl.constexpr = KEY_HEADS * (2 * K + GROUP * V)
    STATE: tl.constexpr = KEY_HEADS * GROUP * K * V
    EVEN: tl.constexpr = KEY_BLOCK == K and TILES * COLUMNS == V
    key_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    target = tl.load(write + row).to(tl.int64)
    source = tl.load(read + row).to(tl.int64)
    release_next(EARLY)
    await_inputs(EARLY)
    dtype = mixed.dtype.element_ty
    out += row * (KEY_HEADS * GROUP * V)
    # Value columns of the whole group, one row of this table a tile.
    part = tl.arange(0, GROUP_BLOCK * TILES)
    column = tl.arange(0, COLUMNS)
    in_head = (part % TILES)[:, None] * COLUMNS + column[None, :]
    value_inside = (part // TILES < GROUP)[:, None] & (in_head < V)
    value_at = (key_head * GROUP + part // TILES)[:, None] * V + in_head
    if target <= 0:
        nothing = tl.zeros([GROUP_BLOCK * TILES, COLUMNS], dtype)
        tl.store(out + value_at, nothing, mask=value_inside)
        return

    # All that is small is asked for at once, so that its way from memory is waited for once.
    key = tl.arange(0, KEY_BLOCK)
    key_inside = key < K
    q_at = key_head * K + key
    k_at = KEY_HEADS * K + q_at
    v_at = 2 * KEY_HEADS * K + value_at
    now = mixed + row * mixed_stride
    before = tails + source * (CHANNELS * (W - 1))
    q_kept, q_taps = _inputs(now, before, conv_weight, q_at, key_inside, W)
    k_kept, k_taps = _inputs(now, before, conv_weight, k_at, key_inside, W)
    v_kept, v_taps = _inputs(now, before, conv_weight, v_at, value_inside, W)
    member = tl.arange(0, GROUP_BLOCK)
    head = key_head * GROUP + member
    real = member < GROUP
    shift = tl.load(a + row * a_stride + head, mask=real, other=0.0).to(tl.float32)
    shift += tl.load(dt_bias + head, mask=real, other=0.0).to(tl.float32)
    rate = tl.load(a_log + head, mask=real, other=0.0).to(tl.float32)
    strength = tl.load(b + row * b_stride + head, mask=real, other=0.0)
    if HAS_NORM:
        factor = tl.load(norm_weight + in_head, mask=value_inside, other=0.0)
        gate = tl.load(z + row * z_stride + value_at, mask=value_inside, other=0.0)

    q = _activated(q_kept, q_taps, conv_bias, q_at, key_inside, W, HAS_BIAS).to(tl.float32)
    k = _activated(k_kept, k_taps, conv_bias, k_at, key_inside, W, HAS_BIAS).to(tl.float32)
    # Values wait in the output's place, where each tile finds its own.
    v = _activated(v_kept, v_taps, conv_bias, v_at, value_inside, W, HAS_BIAS)
    tl.store(out + value_at, v, mask=value_inside)
    # Every old tail has been read before a new one is written: threads may hold copies of one
    # channel, and a step in place must not read what it wrote.
    tl.debug_barrier()
    after = tails + target * (CHANNELS * (W - 1))
    _store_tail(after, q_at, key_inside, q_kept, W)
    _store_tail(after, k_at, key_inside, k_kept, W)
    _store_tail(after, v_at, value_inside, v_kept, W)

    logs, betas = _gates(rate, shift, strength)
    decays = tl.exp(logs)
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    overlap = tl.sum(q * k, 0)
    old = states + source * STATE + key_head * (GROUP * K * V)
    new = states + target * STATE + key_head * (GROUP * K * V)
    for index in tl.range(GROUP * TILES, num_stages=STAGES):
        in_tile = (index % TILES) * COLUMNS + column
        at = (index // TILES) * (K * V) + key[:, None] * V + in_tile[None, :]
        o_at = out + (key_head * GROUP + index // TILES) * V + in_tile
        if EVEN:
            state = tl.load(old + at)
            value = tl.load(o_at).to(tl.float32)
        else:
            tile_inside = key_inside[:, None] & (in_tile < V)[None, :]
            state = tl.load(old + at, mask=tile_inside, other=0.0)
            value = tl.load(o_at, mask=in_tile < V, other=0.0).to(tl.float32)
        mine = member == index // TILES
        decay = tl.sum(tl.where(mine, decays, 0.0), 0)
        beta = tl.sum(tl.where(mine, betas, 0.0), 0)
        held = tl.sum(state * k[:, None], 0)
        seen = tl.sum(state * q[:, None], 0)
        delta = beta * (value - decay * held)
        state = state * decay + k[:, None] * delta[None, :]
        o = (decay * seen + overlap * delta).to(dtype)
        if EVEN:
            tl.store(new + at, state)
            tl.store(o_at, o)
        else:
            tl.store(new + at, state, mask=tile_inside)
            tl.store(o_at, o, mask=in_tile < V)

    if HAS_NORM:
        tl.debug_barrier()
        wide = tl.load(out + value_at, mask=value_inside, other=0.0).to(tl.float32)
        squares = tl.sum(tl.reshape(wide * wide, [GROUP_BLOCK, TILES * COLUMNS]), 1)
        inverse = tl.rsqrt(squares / V + norm_eps)[:, None]
        inverse = tl.broadcast_to(inverse, [GROUP_BLOCK, TILES])
        inverse = tl.reshape(inverse, [GROUP_BLOCK * TILES])[:, None]
        normed = gated_unit(wide, inverse, gate, factor, dtype).to(dtype)
        tl.debug_barrier()
        tl.store(out + value_at, normed, mask=value_inside)


@triton.jit
def _inputs(
    now: tl.tensor,
    tail: tl.tensor,
    weight: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    W: tl.constexpr,
) -> tl.tensor:
    """Load the W inputs of some channels and their taps, newest first."""
    kept: tl.tensor = (tl.load(now + channel, mask=inside, other=0.0),)
    taps: tl.tensor = (tl.load(weight + channel * W + W - 1, mask=inside, other=0.0),)
    for back in tl.static_range(1, W):
        at = channel * (W - 1) + W - 1 - back
        kept = kept + (tl.load(tail + at, mask=inside, other=0.0),)
        tap = tl.load(weight + channel * W + W - 1 - back, mask=inside, other=0.0)
        taps = taps + (tap,)
    return kept, taps


@triton.jit
def _activated(
    kept: tl.tensor,
    taps: tl.tensor,
    bias: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """Convolve some channels and apply SiLU, rounded to the dtype of the inputs."""
    y = kept[0].to(tl.float32) * taps[0].to(tl.float32)
    for back in tl.static_range(1, W):
        y += kept[back].to(tl.float32) * taps[back].to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return (y * tl.sigmoid(y)).to(kept[0].dtype)


@triton.jit
def _store_tail(
    tail: tl.tensor, channel: tl.tensor, inside: tl.tensor, kept: tl.tensor, W: tl.constexpr
) -> None:
    for back in tl.static_range(W - 1):
        at = tail + channel * (W - 1) + W - 2 - back
        tl.store(at, kept[back].to(tail.dtype.element_ty), mask=inside)


@triton.jit
def _gates(rate: tl.tensor, shift: tl.tensor, strength: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Give the logarithm of the decay, and the write strength rounded as the module does."""
    written = tl.sigmoid(strength.to(tl.float32)).to(strength.dtype).to(tl.float32)
    return -tl.exp(rate) * _softplus(shift), written


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """``log(1 + exp(x))`` to float32's precision also where it is far below 1.

    ``log1p(e) = 2 artanh(e / (2 + e))`` by its series: the device's logarithm is only good to an
    absolute error near 1, and a decay close to 1 is what a long memory is made of.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    square = s * s
    series = square / 15.0
    for term in tl.static_range(6):
        series = square * (series + 1.0 / (13 - 2 * term))
    return tl.maximum(x, 0.0) + 2.0 * s * (1.0 + series)
