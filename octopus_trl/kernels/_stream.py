"""Few rows times a large matrix in Triton: the weights stream through once.

The matrix is the left operand, whatever the number of rows, and where its depth is cut depends on
its shape alone. So a row's sums are taken in the same order beside 1 or 63 other rows, which the
choice of kernels in a BLAS library does not promise. Of the programs that share an output, the last
to arrive adds the parts in their order: one launch, and the same bits each time.

All programs should be resident at once: each then streams its share of the weights at its own pace
and none waits for a place.
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
    parts = 1
    while triton.cdiv(num_outputs, 64) * parts < _PROGRAMS and dim // (2 * parts) >= _MIN_DEPTH:
        parts *= 2
    if rows <= 32:
        return Tiling(64, 128, parts, warps=4, stages=3)
    return Tiling(128, 64, parts, warps=8, stages=4)


_PROGRAMS = 150  # a little more than one for each multiprocessor of an H200
_MIN_DEPTH = 384  # of a part: less would not pay for starting a program


def multiply(x: Tensor, weight: Tensor, cut: Tiling) -> Tensor:
    """Launch ``x W^T`` with a given tiling.

    Args:
        x: [R, d], R at most `MAX_ROWS`; weight: [N, d]; rows of any stride.

    Returns:
        [R, N] in the dtype of x. Calls on one device must follow one another (they share
        counters), as on one stream.
    """
    y = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    grid, arguments, settings = launch(x, weight, y, cut)
    _skinny_linear[grid](*arguments, **settings)
    return y


def launch(
    x: Tensor, weight: Tensor, y: Tensor, cut: Tiling
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Give grid, arguments and settings of a product's launch."""
    (rows, num_outputs), dim = y.shape, weight.shape[1]
    tiles = triton.cdiv(num_outputs, cut.outputs)
    partial = y
    if cut.parts > 1:
        partial = torch.empty(cut.parts, rows, num_outputs, dtype=torch.float32, device=x.device)
    even = dim % cut.depth == 0
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
        "EVEN": even,
        **early(x.device),
        "num_warps": cut.warps,
        "num_stages": cut.stages,
    }
    return (tiles, cut.parts), arguments, settings


_arrived: dict[torch.device, Tensor] = {}


def _counters(device: torch.device, tiles: int) -> Tensor:
    """Zeros, one a tile; each launch leaves them as it found them."""
    if device not in _arrived or len(_arrived[device]) < tiles:
        size = max(4096, triton.next_power_of_2(tiles))
        _arrived[device] = torch.zeros(size, dtype=torch.int32, device=device)
    return _arrived[device]


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
    EARLY: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    part = tl.program_id(1)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    real = (output < num_outputs)[:, None]
    given = (row < rows)[None, :]
    matrix = weight + output.to(tl.int64)[:, None] * weight_stride + depth[None, :]
    inputs = x + row[None, :] * x_stride + depth[:, None]
    steps = tl.cdiv(dim, DEPTH)
    share = tl.cdiv(steps, PARTS)
    first = part * share
    await_inputs(EARLY)
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for step in tl.range(first, tl.minimum(first + share, steps)):
        at = step * DEPTH
        if EVEN:
            w = tl.load(matrix + at, mask=real, other=0.0)
            columns = tl.load(inputs + at, mask=given, other=0.0)
        else:
            inside = at + depth < dim
            w = tl.load(matrix + at, mask=real & inside[None, :], other=0.0)
            columns = tl.load(inputs + at, mask=given & inside[:, None], other=0.0)
        sums = tl.dot(w, columns, sums, input_precision="ieee")
    # Not before: the next kernel's programs would take room and bandwidth from this one's.
    release_next(EARLY)
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
            for index in tl.static_range(PARTS):
                # Past the first-level cache, which other multiprocessors do not write to.
                total += tl.load(
                    partial + index * size + to,
                    mask=real & given,
                    other=0.0,
                    cache_modifier=".cg",
                )
            tl.store(y + to, total.to(y.dtype.element_ty), mask=real & given)
            tl.store(arrived + tile, 0)
