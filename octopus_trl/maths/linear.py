"""A product of few rows with a large matrix: what a decode step spends its time on.

Axes: R rows, d inputs, N outputs, F intermediate size.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from octopus_trl.maths.gates import swiglu


def skinny_linear(x: Tensor, *, weight: Tensor) -> Tensor:
    """Multiply few rows by a matrix: ``y = x W^T``.

    Args:
        x: [R, d].
        weight: [N, d].

    Returns:
        [R, N] in the dtype of x, sums in float32 (float64 for float64 inputs).
    """
    return F.linear(x, weight)


def gated_linear(x: Tensor, *, weight: Tensor) -> Tensor:
    """Multiply few rows by gate and up, and gate: ``swiglu(x W^T)``.

    Args:
        x: [R, d].
        weight: [2 F, d], gate first.

    Returns:
        [R, F] in the dtype of x; the product is rounded to it before the gate.
    """
    return swiglu(skinny_linear(x, weight=weight))
