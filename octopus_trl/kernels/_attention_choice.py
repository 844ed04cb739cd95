"""Which kernels serve packed attention on a device, and why."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from octopus_trl.errors import ConfigError
from octopus_trl.kernels import _flash

SETTING = "OCTOPUS_ATTENTION"
NAMES = ("auto", "flash", "flex")


@dataclass(frozen=True, slots=True)
class Choice:
    """Kernels of packed attention.

    Attributes:
        name: "flash" or "flex".
        text: for the user, with the reason where it is not the fastest.
    """

    name: str
    text: str


def choose(device: torch.device, dtype: torch.dtype, head_dim: int) -> Choice:
    """Pick flash-attn 4 where it can serve, FlexAttention elsewhere.

    Raises:
        ConfigError: OCTOPUS_ATTENTION is unknown, or asks for flash-attn 4 where it cannot serve.
    """
    asked = os.environ.get(SETTING, "auto")
    if asked not in NAMES:
        raise ConfigError(f"{SETTING} is {asked!r}, must be one of {', '.join(NAMES)}")
    if asked == "flex":
        return Choice("flex", f"FlexAttention ({SETTING}=flex)")
    reason = _flash.unavailable(device, dtype, head_dim)
    if reason is None:
        return Choice("flash", f"flash-attn 4 {_flash.version()}, block-sparse")
    if asked == "flash":
        raise ConfigError(f"{SETTING}=flash cannot be had: {reason}; unset it for FlexAttention")
    return Choice("flex", f"FlexAttention, two to three times slower: {reason}")
