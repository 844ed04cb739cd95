"""Gates of a decoder layer: SwiGLU of the MLP, and the sigmoid gate of attention outputs.

Axes: R rows, F intermediate size, H query heads, D head dim. Each step is rounded to the dtype of
the input, as the modules of transformers do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def swiglu(gate_up: Tensor) -> Tensor:
    """Gate the upper half of each row by SiLU of the lower half: ``silu(gate) * up``.

    Args:
        gate_up: [R, 2 F], gate first.

    Returns:
        [R, F] in the dtype of `gate_up`.

    Source: transformers ``Qwen3_5MLP`` and ``Qwen3MLP``.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def sigmoid_gate(x: Tensor, *, gate: Tensor) -> Tensor:
    """Gate the outputs of attention: ``x * sigmoid(gate)``.

    Args:
        x: [R, H, D].
        gate: [R, H, D] before its activation, of any strides.

    Returns:
        [R, H * D] in the dtype of x.

    Source: transformers ``Qwen3_5Attention``.
    """
    return x.flatten(1) * torch.sigmoid(gate.flatten(1))
