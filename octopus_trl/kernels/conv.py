"""Causal depthwise convolution on CUDA, through the Triton kernel of flash-linear-attention.

fla keeps W inputs a run where we keep the W - 1 that matter; its first slot is never read.
"""

from __future__ import annotations

import functools
from importlib import import_module, util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from octopus_trl.errors import ConfigError
from octopus_trl.kernels._chunks import chunk_indices
from octopus_trl.maths import conv as maths

INSTALL = "pip install flash-linear-attention==0.6.0"


def causal_conv(
    x: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor]:
    """Convolve every run causally and apply SiLU, as ``maths.conv.causal_conv``.

    Args:
        x: [T, C], rows of any stride; weight: [C, W]; bias: [C] or None; tail: [R, C, W - 1], gets
            a gradient.
        cu_seqlens: [R + 1] int64 run boundaries; a run may be empty, and rows past the last run
            belong to none: y is left unwritten there.

    Returns:
        y [T, C] and the new tail [R, C, W - 1], in the dtypes of x and tail; sums in float32.

    Raises:
        ConfigError: fla is missing.
    """
    if x.dtype == torch.float64 or x.shape[0] == 0:
        return maths.causal_conv(x, weight=weight, bias=bias, tail=tail, cu_seqlens=cu_seqlens)
    y, state = _fla()(
        x[None],
        weight=weight,
        bias=bias,
        initial_state=F.pad(tail.to(x.dtype), (1, 0)),
        output_final_state=True,
        activation="silu",
        backend="triton",
        cu_seqlens=cu_seqlens,
        chunk_indices=chunk_indices(cu_seqlens),
    )
    return y[0], state[..., 1:].to(tail.dtype)


@functools.cache
def _fla() -> Any:
    if util.find_spec("fla") is None:
        raise ConfigError(
            f"the convolution on CUDA needs flash-linear-attention: {INSTALL}; "
            "OCTOPUS_KERNELS=maths runs the slow reference"
        )
    return import_module("fla.modules.causal_conv1d").causal_conv1d
