"""Root-mean-square norms of a decoder layer, with what stands around them fused.

Axes: R rows, d hidden size, HV value heads, V value dim. Sums are taken in float32 (float64 for
float64 inputs), and results are rounded where the modules of transformers round them, so that a
bfloat16 row comes out with the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(
    x: Tensor,
    *,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add the residual stream and divide each row by its root mean square.

    ``h = x + residual`` and ``y = h / sqrt(mean(h^2) + eps) * w`` (README.md, Eq. 13).

    Args:
        x: [R, d] output of the block before.
        weight: [d]; the factor is ``1 + weight`` if `zero_centered`, as in Qwen3.5, and then y is
            rounded once; else the factor is ``weight``, as in Qwen3, and the quotient is rounded
            before the product.
        eps: added to the mean square.
        residual: [R, d] the stream that x is added to, or None.

    Returns:
        y and h, [R, d] in the dtype of x; h is x itself where there is no residual.

    Source: transformers ``Qwen3_5RMSNorm`` and ``Qwen3RMSNorm``.
    """
    h = x if residual is None else residual + x
    unit = _unit(h, eps)
    if zero_centered:
        return (unit * (1.0 + weight.to(unit.dtype))).to(x.dtype), h
    return (weight * unit.to(x.dtype)).to(x.dtype), h


def gated_rms_norm(o: Tensor, *, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each head by its root mean square and gate it by SiLU.

    ``y = o / sqrt(mean(o^2) + eps) * w * silu(z)``, the mean over one head (README.md, Eq. 14).

    Args:
        o: [R, HV, V].
        z: [R, HV * V] gate before its activation.
        weight: [V].
        eps: added to the mean square.

    Returns:
        [R, HV * V] in the dtype of o.

    Source: transformers ``Qwen3_5RMSNormGated``.
    """
    unit = _unit(o, eps)
    scaled = weight * unit.to(o.dtype)
    gated = scaled * F.silu(z.to(unit.dtype).unflatten(-1, o.shape[1:]))
    return gated.to(o.dtype).flatten(1)


def _unit(x: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
