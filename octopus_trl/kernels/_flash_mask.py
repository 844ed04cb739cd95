"""The visibility test that flash-attn 4 compiles into its kernels (needs CUTLASS's Python DSL)."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from flash_attn.cute import utils


@cute.jit
def visible(batch: Any, head: Any, row: Any, key: Any, lengths: Any, tensors: Any) -> Any:
    """Tell whether a row sees a key, from the segments of both.

    Args:
        row, key: vectors of one index.
        tensors: segment of each row [T] int32, and a bit a pair of segments [S, W] int32.
    """
    segment, sees = tensors
    reader, read = segment[row[0]], segment[key[0]]
    bit = (sees[reader, read >> 5] >> (read & 31)) & 1
    seen = (bit != 0) & ((reader != read) | (key[0] <= row[0]))
    return utils.scalar_to_ssa(seen, cutlass.Boolean)
