"""Few rows times a large matrix in Triton: the weights stream through once.

The matrix is the left operand, whatever the number of rows, and where its depth is cut depends on
its shape alone. So a row's sums are taken in the same order beside 1 or 63 other rows, which the
choice of kernels in a BLAS library does not promise. Of the programs that share an output, the last
to arrive adds the parts in their order: one launch, and the same bits each time.

All programs should be resident at once: each then streams its share of the weights at its own pace
and none waits for a place. In an early launch the programs take their places while the kernel
before still runs. What more an early launch could do was slower on an H200 or no faster
(data/bench/kernels.jsonl): to ask for the first weights before the wait, and to let the next kernel
in before this one has read its weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octopus_trl.kernels._triton import (
    await_inputs,
    early,
    release_next,
    tl,
    triton,
)
from octopus_trl.kernels.gates import gated_value

MAX_ROWS = 64  # beyond, a BLAS library is at its best


class Tiling(NamedTuple):
    """How a matrix is cut.

    Attributes:
        outputs, depth: rows and columns of a tile of the matrix, powers of two.
        parts: programs that share the depth of one output.
        warps, stages: of a program; stages is the number of tiles in flight.
    """

    outputs: int
    depth: int
    parts: int
    warps: int
    stages: int


def tiling(rows: int, num_outputs: int, dim: int) -> Tiling:
    """Choose a tiling; where the depth is cut, and so the bits, does not depend on the rows."""
    parts, tiles = 1, triton.cdiv(dim, 128)
    # Parts of whole tiles of either depth below begin at the same columns.
    while (
        triton.cdiv(num_outputs, 64) * parts < _PROGRAMS
        and dim // (2 * parts) >= _MIN_DEPTH
        and tiles % (2 * parts) == 0
    ):
        parts *= 2
    if rows <= 32:
        return Tiling(64, 128, parts, warps=4, stages=3)
    return Tiling(128, 64, parts, warps=8, stages=4)


_PROGRAMS = 150  # a little more than one for each multiprocessor of an H200
_MIN_DEPTH = 384  # of a part: less would not pay for starting a program


def multiply(x: Tensor, weight: Tensor, cut: Tiling, *, gated: bool = False) -> Tensor:
    """Launch ``x W^T`` with a given tiling, or SwiGLU of it.

    Args:
        x: [R, d], R at most `MAX_ROWS`; weight: [N, d]; rows of any stride.
        gated: gate the upper half of the outputs by the lower half, as ``gates.swiglu`` does of
            their rounded values; a tiling of one part.

    Returns:
        [R, N], gated [R, N / 2], in the dtype of x. Calls on one device must follow one another
        (they share counters), as on one stream.
    """
    num_outputs = len(weight) // 2 if gated else len(weight)
    y = torch.empty(len(x), num_outputs, dtype=x.dtype, device=x.device)
    grid, arguments, settings = launch(x, weight, y, cut)
    _skinny_linear[grid](*arguments, **settings)
    return y


def launch(
    x: Tensor, weight: Tensor, y: Tensor, cut: Tiling
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Give grid, arguments and settings of a launch; y of half as many columns is gated."""
    (rows, num_outputs), dim = y.shape, weight.shape[1]
    gated = 2 * num_outputs == len(weight)
    assert not gated or cut.parts == 1, "a gate needs whole sums"
    tiles = triton.cdiv(len(weight), cut.outputs)
    partial = y
    if cut.parts > 1:
        partial = torch.empty(cut.parts, rows, num_outputs, dtype=torch.float32, device=x.device)
    when = early(x.device, rows)
    arguments = (
        x,
        weight,
        y,
        partial,
        _counters(x.device, tiles),
        rows,
        num_outputs,
        dim,
        x.stride(0),
        weight.stride(0),
    )
    settings = {
        "ROWS": max(16, triton.next_power_of_2(rows)),
        "OUTPUTS": cut.outputs,
        "DEPTH": cut.depth,
        "PARTS": cut.parts,
        "EVEN": dim % cut.depth == 0,
        "GATED": gated,
        **when,
        "num_warps": cut.warps,
        "num_stages": cut.stages,
    }
    return (tiles, cut.parts), arguments, settings


_arrived: dict[torch.device, list[Tensor]] = {}


def _counters(device: torch.device, tiles: int) -> Tensor:
    """Zeros, one a tile; each launch leaves them as it found them."""
    made = _arrived.setdefault(device, [])
    if not made or len(made[-1]) < tiles:
        size = max(4096, triton.next_power_of_2(tiles))
        made.append(torch.zeros(size, dtype=torch.int32, device=device))
    return made[-1]  # smaller ones stay: captured graphs count in them


@triton.jit
def _skinny_linear(
    x: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    rows: tl.tensor,
    num_outputs: tl.tensor,
    dim: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    part = tl.program_id(1)
    line = tl.arange(0, OUTPUTS)
    if GATED:
        # Lines of the gate and of its up side by side.
        column = tile * (OUTPUTS // 2) + line // 2
        output = column + line % 2 * num_outputs
        real = (column < num_outputs)[:, None]
    else:
        output = tile * OUTPUTS + line
        real = (output < num_outputs)[:, None]
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    given = (row < rows)[None, :]
    matrix = weight + output.to(tl.int64)[:, None] * weight_stride + depth[None, :]
    inputs = x + row[None, :] * x_stride + depth[:, None]
    steps = tl.cdiv(dim, DEPTH)
    share = tl.cdiv(steps, PARTS)
    first = part * share
    count = tl.maximum(tl.minimum(share, steps - first), 0)
    await_inputs(EARLY)
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for index in tl.range(count):
        at = (first + index) * DEPTH
        w = _tile(matrix + at, real, (at + depth < dim)[None, :], EVEN)
        columns = _tile(inputs + at, given, (at + depth < dim)[:, None], EVEN)
        sums = tl.dot(w, columns, sums, input_precision="ieee")
    # Not before: the next kernel's programs would take room and bandwidth from this one's.
    release_next(EARLY)
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(sums, [OUTPUTS // 2, 2, ROWS]), 0, 2, 1))
        column = tile * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        to = row[None, :] * num_outputs + column[:, None]
        dtype: tl.constexpr = y.dtype.element_ty
        value = gated_value(gate.to(dtype), up.to(dtype))
        tl.store(y + to, value, mask=given & (column < num_outputs)[:, None])
        return
    to = row[None, :] * num_outputs + output[:, None]
    if PARTS == 1:
        tl.store(y + to, sums.to(y.dtype.element_ty), mask=real & given)
    else:
        size = rows * num_outputs
        tl.store(partial + part * size + to, sums, mask=real & given)
        # All threads have written before one of them says so.
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
        if before == PARTS - 1:
            total = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for other in tl.static_range(PARTS):
                # Past the first-level cache, which other multiprocessors do not write to.
                total += tl.load(
                    partial + other * size + to,
                    mask=real & given,
                    other=0.0,
                    cache_modifier=".cg",
                )
            tl.store(y + to, total.to(y.dtype.element_ty), mask=real & given)
            tl.store(arrived + tile, 0)


@triton.jit
def _tile(pointers: tl.tensor, real: tl.tensor, inside: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """Load a tile of the matrix or of the rows; `inside` tells the depth's end, unless EVEN."""
    if EVEN:
        mask = real
    else:
        mask = real & inside
    return tl.load(pointers, mask=mask, other=0.0)
