"""Where the text of a pass is cut, so that the programs of its attention end together (host only).

Text that one tile of readers sees is laid end to end and cut wherever a program's share of the
work is full, wherever that is: a program gets the end of one text and the beginning of the next.
Items are taken from a queue, longest first, so the beginning goes to the program whose end was the
shortest, and the two make one share. Text that several tiles see is cut into even chunks instead,
at the same places for all of them, so that the second tile finds a chunk in the cache.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

BLOCK = 64  # a cut lies at a whole number of blocks of the kernel's inner loop
_LEAST = 128  # slots of an item; a cut nearer to an end of its text is left out
# Costs of one item and KV head, in slots streamed at a processor's share of memory bandwidth;
# assumed, not fitted: `scripts/bench_attention.py --sweep` times other shares and fixed chunks.
_ITEM_COST = 64.0  # to start and to end
_READER_COST = 8.0  # to write and merge one reader's partial result
_LONG = 0.7  # of the longest item


def cut(
    slots: Ints,
    readers: Ints,
    *,
    per_tile: int,
    programs: int,
    share: float,
    chunk: int | None,
) -> tuple[Ints, Ints]:
    """Cut texts into chunks.

    Args:
        slots, readers: [texts] length of each, and how many rows read it.
        per_tile: readers of a tile.
        programs: those that work on one KV head.
        share: part of a program's work that a chunk is.
        chunk: slots of a chunk instead.

    Returns:
        [chunks] number of the text and first slot in it, ascending; every text has a chunk.
    """
    tiles = np.maximum(1, -(-readers // per_tile))
    if chunk:
        return _even(slots, np.full(len(slots), max(1.0, float(chunk))))
    in_tile = -(-readers // tiles)
    costs = slots + _ITEM_COST + _READER_COST * in_tile
    length = max(float(BLOCK), share * float((costs * tiles).sum()) / max(1, programs))
    text, begin = _even(slots, np.where(tiles > 1, length, 2.0**40))
    single = np.flatnonzero(tiles == 1)
    ends = np.cumsum(costs[single])
    whole = float(ends[-1]) if len(single) else 0.0
    places = np.arange(length, whole, length)
    places = places[places < whole]  # rounding may have added the end itself
    which = np.searchsorted(ends, places, side="right")
    inside = places - (ends[which] - costs[single[which]])
    found = single[which]
    at = np.rint(inside / costs[found] * slots[found] / BLOCK).astype(np.int64) * BLOCK
    kept = (at >= _LEAST) & (at <= slots[found] - _LEAST)
    text, begin = np.append(text, found[kept]), np.append(begin, at[kept])
    order = np.lexsort((begin, text))
    text, begin = text[order], begin[order]
    new = np.append(True, (np.diff(text) > 0) | (np.diff(begin) > 0)) if len(text) else text == 0
    return text[new], begin[new]


def _even(slots: Ints, length: npt.NDArray[np.float64]) -> tuple[Ints, Ints]:
    """Cut each text into equal chunks of at most about `length` slots."""
    whole = np.maximum(1, slots)
    step = np.ceil(whole / np.ceil(whole / length)).astype(np.int64)
    step = -(-step // BLOCK) * BLOCK
    counts = -(-whole // step)
    text = np.repeat(np.arange(len(slots)), counts)
    index = np.arange(len(text)) - np.repeat(np.cumsum(counts) - counts, counts)
    return text, index * step[text]


def order_of(slots: Ints, again: npt.NDArray[np.bool_]) -> Ints:
    """Order items: long ones first, so that the programs end together.

    Among the long ones, those bound by products are spread over those bound by memory. Tiles of one
    chunk stay neighbours.

    Args:
        slots: [items] length of each.
        again: [items] whether several tiles read its chunk.
    """
    order = np.argsort(-slots, kind="stable")
    most = int(slots.max(initial=0))
    num_long = int((slots > _LONG * most).sum())
    head = order[:num_long]
    place = np.empty(num_long)
    for kind in (again[head], ~again[head]):
        place[kind] = (np.arange(int(kind.sum())) + 0.5) / max(1, int(kind.sum()))
    order[:num_long] = head[np.argsort(place, kind="stable")]
    return order
