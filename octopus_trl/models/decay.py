"""How fast a recurrent layer forgets before it has learnt anything."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


def initialise_decay(model: nn.Module, *, seed: int) -> None:
    """Draw the decay of every GDN layer for memory, as fla does.

    A ~ U(1, 16) and dt ~ exp(U(log 0.001, log 0.1)), dt_bias = dt + log(1 − e^−dt) (the inverse of
    softplus), so that a token's decay exp(−A softplus(dt_bias)) starts between 0.2 and 0.999.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        decay, bias = getattr(module, "A_log", None), getattr(module, "dt_bias", None)
        if decay is None or bias is None:
            continue
        heads = decay.shape[0]
        rate = torch.rand(heads, generator=generator) * 15 + 1
        low, high = np.log(0.001), np.log(0.1)
        dt = torch.exp(torch.rand(heads, generator=generator) * (high - low) + low)
        with torch.no_grad():
            decay.copy_(rate.log())
            bias.copy_(dt + torch.log(-torch.expm1(-dt)))
