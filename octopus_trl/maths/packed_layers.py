"""Norms, and the gate of an MLP, over the rows of a packed pass, with a gradient.

Axes: R rows, d width of a norm, F intermediate size. Results are rounded where the modules of
transformers round them, as in `norms` and `gates`; autograd gives the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from octopus_trl.maths import norms


def packed_rms_norm(x: Tensor, *, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """Divide each row by its root mean square (README.md, Eq. 13).

    Args:
        x: [..., d].
        weight: [d], of the dtype of x, or of any dtype if `zero_centered`.
        eps: added to the mean square.
        zero_centered: the factor is ``1 + weight``, as in Qwen3.5, else ``weight``.

    Returns:
        [..., d] in the dtype of x.

    Source: transformers ``Qwen3_5RMSNorm`` and ``Qwen3RMSNorm``.
    """
    return norms.rms_norm(x, weight=weight, eps=eps, zero_centered=zero_centered)[0]


def packed_unit(x: Tensor, *, eps: float) -> Tensor:
    """Divide each row by its length: ``x / sqrt(sum(x^2) + eps)``.

    Args:
        x: [..., d].
        eps: added to the sum of squares.

    Returns:
        [..., d] in the dtype of x.
    """
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype)


def packed_gated_norm(o: Tensor, *, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each row by its root mean square and gate it by SiLU (README.md, Eq. 14).

    Args:
        o: [R, d], a head each.
        z: [R, d] gate before its activation.
        weight: [d], of the dtype of o or float32.
        eps: added to the mean square.

    Returns:
        [R, d] in the dtype of o.

    Source: transformers ``Qwen3_5RMSNormGated``.
    """
    return norms.gated_rms_norm(o[:, None], z=z, weight=weight, eps=eps)


def packed_swiglu(gate: Tensor, *, up: Tensor) -> Tensor:
    """Gate the one product of an MLP by SiLU of the other: ``silu(gate) * up``.

    Args:
        gate, up: [..., F] of one dtype.

    Returns:
        [..., F] in their dtype.

    Source: transformers ``Qwen3_5MLP`` and ``Qwen3MLP``.
    """
    return torch.mul(F.silu(gate), up)
