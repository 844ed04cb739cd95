"""A product of few rows with a large matrix: by the streaming kernel of `_stream` where that was
measured faster than the BLAS library, which does all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octopus_trl.kernels._stream import multiply
from octopus_trl.kernels._stream_tuning import tuned
from octopus_trl.maths import linear as maths


def skinny_linear(x: Tensor, *, weight: Tensor) -> Tensor:
    """Multiply few rows by a matrix, as ``maths.linear.skinny_linear``.

    Args:
        x: [R, d], rows of any stride.
        weight: [N, d], rows of any stride.

    Returns:
        [R, N] in the dtype of x. Calls on one device must follow one another (they share counters),
        as on one stream.
    """
    cut = None
    if x.dtype in (torch.bfloat16, torch.float16):
        cut = tuned(len(x), x.shape[1], len(weight))
    return maths.skinny_linear(x, weight=weight) if cut is None else multiply(x, weight, cut)
