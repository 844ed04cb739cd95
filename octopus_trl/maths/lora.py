"""Low-rank adapters over a group of projections that read the same input.

Axes: R rows, d inputs, N output columns of the whole group, Σr ranks of all its adapters. The group
is one product with the rows of all its matrices below one another; each adapter reaches a range
of its columns.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def lora_shrink(x: Tensor, *, a: Tensor) -> Tensor:
    """Project the input onto the ranks of every adapter of the group: ``h = x A^T``.

    Args:
        x: [R, d].
        a: [Σr, d] the A matrices below one another, in the dtype of x.

    Returns:
        h [R, Σr] in the dtype of x.
    """
    return F.linear(x, a)


def lora_expand(y: Tensor, *, h: Tensor, b: Tensor, starts: Tensor) -> Tensor:
    """Add what the adapters give to the outputs of the group, in place.

    ``y[:, n] += sum_j h[:, starts[n] + j] b[n, j]``, the sum rounded to the dtype of y before it is
    added, as PEFT does.

    Args:
        y: [R, N] output of the group; changed.
        h: [R, Σr] from `lora_shrink`.
        b: [N, r] the B matrices times their scaling, in the dtype of y; r is the largest rank, and
            the columns beyond a smaller one are zero.
        starts: [N] integers, first column of h for each output column; -1 where no adapter is.

    Returns:
        y.
    """
    for start in sorted({int(start) for start in starts.unique().tolist()} - {-1}):
        (columns,) = (starts == start).nonzero(as_tuple=True)
        ranks = h[:, start : start + b.shape[1]]
        added = F.linear(ranks, b[columns][:, : ranks.shape[1]])
        y.index_add_(1, columns, added.to(y.dtype))
    return y
