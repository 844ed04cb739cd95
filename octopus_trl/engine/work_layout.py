"""Where the parts of a work list lie in one buffer, so that one copy brings them to the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from octopus_trl.errors import ConfigError


class WorkLayout:
    """Places of the parts of a work list in one buffer of int32.

    Args:
        max_rows: rows of the widest pass.
        max_items, max_partials: items, and pairs of item and reader; more of either lets the text
            be cut finer. A partial takes ``4 · heads · head_dim`` bytes on the device in a call.
    """

    def __init__(
        self, max_rows: int, max_items: int | None = None, max_partials: int | None = None
    ) -> None:
        self.max_rows = max_rows
        self.max_items = max_items or 8 * max_rows + 512
        self.max_partials = max_partials or 16 * max_rows + 1024
        if min(self.max_items, self.max_partials) < 2 * max_rows:
            raise ConfigError(
                f"max_items and max_partials are {self.max_items} and {self.max_partials}, must be "
                f"at least twice max_rows ({max_rows}): raise them"
            )
        # What changes from step to step comes first, so that a step sends one range.
        self._shapes = {
            "counts": (1,),
            "appends": (max_rows, 2),
            "bounds": (max_rows + 1,),
            "items": (self.max_items, 8),
            "readers": (self.max_partials, 2),
        }
        self.offsets: dict[str, int] = {}
        self.size = 0
        for name, shape in self._shapes.items():
            self.offsets[name] = self.size
            self.size += -(-int(np.prod(shape)) // 4) * 4  # 16-byte words

    def views(self, packed: Any) -> dict[str, Any]:
        """Name the parts of a buffer [size], a NumPy array or a tensor, without a copy."""
        return {
            name: packed[lo : lo + int(np.prod(shape))].reshape(shape)
            for (name, shape), lo in zip(self._shapes.items(), self.offsets.values(), strict=True)
        }
