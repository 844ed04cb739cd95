"""The MLP of a long row by tiles of tokens: memory of one tile in place of the row's.

An MLP works on each token alone, so a row may go through it in pieces. Each piece is computed again
when its gradient is needed; between the passes only its input is kept. Classes are swapped for
subclasses under the same name, as `patch` does: parameters, hooks and adapters stay what they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from octopus_trl.errors import ConfigError
from octopus_trl.models.patch import unwrap

MLP_NAMES = ("mlp", "feed_forward", "shared_mlp")


def tile_mlps(model: nn.Module, tokens: int | None) -> None:
    """Compute the MLP of every layer on at most so many tokens at once, in place.

    Results are those of the whole row up to the rounding of its products. In training each tile is
    recomputed in the backward pass, which is one forward pass of the MLPs more.

    Args:
        model: a causal LM, PEFT-wrapped or not.
        tokens: of a tile; None computes rows whole again, and leaves a model that never had tiles
            as it is.
    Raises:
        ConfigError: `tokens` is below 1, or the layers have no MLP of a known name.
    """
    if tokens is not None and tokens < 1:
        raise ConfigError(f"mlp_tile_tokens is {tokens}, must be at least 1, or null for no tiles")
    found = [
        module
        for layer in unwrap(model).model.layers
        for name, module in layer.named_children()
        if name in MLP_NAMES and (tokens is not None or isinstance(module, Tiled))
    ]
    if not found and tokens is not None:
        raise ConfigError(f"{type(unwrap(model)).__name__} has no MLP named as {MLP_NAMES}")
    for module in found:
        if not isinstance(module, Tiled):
            module.__class__ = _with_tiles(type(module))
        module.octopus_tile_tokens = tokens


class Tiled:
    """Adds the tiles to an MLP's class."""

    octopus_tile_tokens: int | None = None
    octopus_whole: Any = None  # what computes a tile in place of the stock forward

    def whole(self, hidden: Tensor) -> Tensor:
        """Run the stock MLP on all tokens at once."""
        return super().forward(hidden)  # type: ignore[misc]

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the MLP; `hidden` is [..., T, d]."""
        whole = self.octopus_whole or self.whole
        size = self.octopus_tile_tokens
        if size is None or hidden.shape[-2] <= size:
            return whole(hidden)
        tiles = hidden.split(size, dim=-2)
        if not torch.is_grad_enabled():
            return torch.cat([whole(tile) for tile in tiles], dim=-2)
        # Not reentrant: all tiles are uses of a weight in one graph, so that its gradient is
        # complete before a hook of DDP or DeepSpeed sees it.
        return torch.cat([checkpoint(whole, tile, use_reentrant=False) for tile in tiles], dim=-2)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle by the stock class, as this one exists only where tiles were asked for."""
        return _blank, (type(self).__bases__[1],), self.__dict__


_CLASSES: dict[type, type] = {}


def _with_tiles(cls: type) -> type:
    if cls not in _CLASSES:
        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _CLASSES[cls] = type(cls.__name__, (Tiled, cls), names)
    return _CLASSES[cls]


def _blank(cls: type) -> Any:
    """Make an empty MLP of a stock class with tiles, for unpickling."""
    tiled: Any = _with_tiles(cls)
    return tiled.__new__(tiled)
