"""A product of few rows with a large matrix: what a decode step spends its time on.

Axes: R rows, d inputs, N outputs.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def skinny_linear(x: Tensor, *, weight: Tensor) -> Tensor:
    """Multiply few rows by a matrix: ``y = x W^T``.

    Args:
        x: [R, d].
        weight: [N, d].

    Returns:
        [R, N] in the dtype of x, sums in float32 (float64 for float64 inputs).
    """
    return F.linear(x, weight)
