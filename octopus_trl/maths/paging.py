"""Reading and writing keys and values in a paged pool.

Axes: P pages, S slots a page, KV key/value heads, D head dim. Slot ``page * S + offset`` is one
token's place; a pool is ``[P, S, KV, D]``.
"""

from __future__ import annotations

from torch import Tensor


def write_slots(pool: Tensor, *, values: Tensor, slots: Tensor) -> None:
    """Write one row of keys or values to each slot, in place (``pool`` is changed).

    Args:
        pool: [P, S, KV, D], contiguous.
        values: [T, KV, D], converted to the dtype of the pool.
        slots: [T] int64, distinct.
    """
    pool.view(-1, *pool.shape[2:]).index_copy_(0, slots, values.to(pool.dtype))


def gather_slots(pool: Tensor, *, slots: Tensor) -> Tensor:
    """Read the rows of some slots; no other slot is read.

    Args:
        pool: [P, S, KV, D], contiguous.
        slots: [L] int64 in any order, repeats allowed.

    Returns:
        [L, KV, D] in the dtype of the pool.
    """
    return pool.view(-1, *pool.shape[2:]).index_select(0, slots)
