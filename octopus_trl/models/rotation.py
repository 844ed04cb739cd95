"""How far keys can be moved after they were rotated: the frequencies of a model's positions."""

from __future__ import annotations

from torch import Tensor, nn

from octopus_trl.errors import ConfigError
from octopus_trl.models.patch import unwrap

_MOVING = ("dynamic", "longrope")  # types whose frequencies follow the longest position


def inverse_frequencies(model: nn.Module) -> Tensor | None:
    """Give the [E / 2] radians a position that keys turn by, None for a model without positions.

    Raises:
        ConfigError: the frequencies change with the length, so a rotated key cannot be moved.
    """
    rotary = unwrap(model).model.rotary_emb
    if rotary is None:
        return None
    if rotary.rope_type in _MOVING:
        raise ConfigError(
            f"position='rerotate' with rope_type={rotary.rope_type!r}: its frequencies change with "
            "the length, so keys that were rotated cannot be moved; use position jump or reencode"
        )
    inv_freq: Tensor = rotary.inv_freq
    return inv_freq
