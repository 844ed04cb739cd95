"""A product of few rows with a large matrix: by the streaming kernel of `_stream` where that was
measured faster than the BLAS library, which does all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octopus_trl.kernels._stream import multiply
from octopus_trl.kernels._stream_tuning import tuned, tuned_gate
from octopus_trl.kernels.gates import swiglu
from octopus_trl.maths import linear as maths

_DTYPES = (torch.bfloat16, torch.float16)  # that the streaming kernel was measured in


def skinny_linear(x: Tensor, *, weight: Tensor) -> Tensor:
    """Multiply few rows by a matrix, as ``maths.linear.skinny_linear``.

    Args:
        x: [R, d], rows of any stride.
        weight: [N, d], rows of any stride.

    Returns:
        [R, N] in the dtype of x. Calls on one device must follow one another (they share counters),
        as on one stream.
    """
    cut = tuned(len(x), x.shape[1], len(weight)) if x.dtype in _DTYPES else None
    return maths.skinny_linear(x, weight=weight) if cut is None else multiply(x, weight, cut)


def gated_linear(x: Tensor, *, weight: Tensor) -> Tensor:
    """Multiply few rows by gate and up and gate them, as ``maths.linear.gated_linear``.

    Args:
        x: [R, d], rows of any stride.
        weight: [2 F, d], rows of any stride.

    Returns:
        [R, F] in the dtype of x; one launch where `_pass_tuning` has it so, else two, and the same
        bits. Calls on one device must follow one another, as on one stream.
    """
    cut = tuned_gate(len(x), x.shape[1], len(weight)) if x.dtype in _DTYPES else None
    if cut is None:
        return swiglu(skinny_linear(x, weight=weight))
    return multiply(x, weight, cut, gated=True)
