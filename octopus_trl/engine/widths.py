"""Widths of decode passes between which a row's result does not change by a bit.

A matrix product may round a row differently when the number of rows beside it changes, because a
library picks its kernel by shape. At one fixed width that cannot happen; several widths are allowed
only where the products of this model, on this machine, are seen to agree.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BASE = 16
LIMIT = 128
GPU_WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def decode_widths(model: nn.Module, device: torch.device) -> tuple[int, ...]:
    """Choose the widths, ascending.

    On a CPU each is twice the one before, and taken while every linear layer gives its rows the
    bits that it gives them at width 16. On a GPU they are closer, as padding rows cost time there,
    and a cursor is independent of the batch at a fixed `decode_width` only.
    """
    if device.type != "cpu":
        return GPU_WIDTHS
    widths = [BASE]
    weights = _shapes(model)
    while widths[-1] < LIMIT:
        wider = 2 * widths[-1]
        if not all(_agree(weight, wider) for weight in weights):
            break
        widths.append(wider)
    return tuple(widths)


def _shapes(model: nn.Module) -> Iterable[Tensor]:
    """Give one weight of each shape that the model multiplies by."""
    weights = [
        module.weight.detach()
        for module in model.modules()
        if isinstance(module, nn.Linear) and module.weight.dim() == 2
    ]
    return {(weight.shape, weight.dtype): weight for weight in weights}.values()


def _agree(weight: Tensor, width: int) -> bool:
    """Compare the first and the last rows of a wide product with the product of these alone."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(width, weight.shape[1], generator=draws).to(weight.dtype)
    wide = F.linear(x, weight)
    return all(
        torch.equal(wide[rows], F.linear(x[rows], weight))
        for rows in (slice(0, BASE), slice(width - BASE, width))
    )
