"""A product of few rows with a large matrix, by the streaming kernel of `_stream`."""

from __future__ import annotations

import torch
from torch import Tensor

from octopus_trl.kernels._stream import multiply, tiling
from octopus_trl.maths import linear as maths

STREAMED_ROWS = 32  # beyond, a BLAS library was measured faster on an H200


def skinny_linear(x: Tensor, *, weight: Tensor) -> Tensor:
    """Multiply few rows by a matrix, as ``maths.linear.skinny_linear``.

    Args:
        x: [R, d], rows of any stride; more than `STREAMED_ROWS` rows, and float64, take the
            reference.
        weight: [N, d], rows of any stride.

    Returns:
        [R, N] in the dtype of x; a row's bits do not depend on the rows beside it. Calls on one
        device must follow one another (they share counters), as on one stream.
    """
    if x.dtype == torch.float64 or not 0 < len(x) <= STREAMED_ROWS:
        return maths.skinny_linear(x, weight=weight)
    return multiply(x, weight, tiling(len(x), *weight.shape))
