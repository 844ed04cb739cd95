"""Attention of a step's rows over paged keys and values that many of them share.

The host lists which rows see which slots (`engine/worklist.py`) as items: a chunk of slots and the
rows that read it. Each item gives its readers one partial result each; a row's partials merge by
log-sum-exp (README.md, Eq. 8), so a slot is read once however many rows see it.

Axes: R rows, H query heads, KV key/value heads, D head dim, P pages, S slots a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octopus_trl.maths.attention import masked_attention, merge_attention
from octopus_trl.shapes import Queries

# Columns of `AttentionWork.items`, a row being padded to a whole number of 16-byte words.
SLOT_LO, NUM_SLOTS, READER_LO, NUM_READERS, SEEN = range(5)
ITEM_WIDTH = 8


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Who reads what in one pass: int32 tensors of fixed capacity, so that a captured graph serves
    while the contents change.

    Attributes:
        counts: [1] number of items in force.
        items: [items, 8] slot_lo, num_slots, reader_lo, num_readers, seen and three unused. The
            item covers ``slots[slot_lo : slot_lo + num_slots]`` for the readers
            ``readers[reader_lo : reader_lo + num_readers]``; reader j sees the first
            ``min(num_slots, max(0, seen + j))`` of them. All see all where seen = num_slots; rows
            that follow each other in a chain see one slot more each. Items that share a chunk
            follow each other, so that a cache serves the second one.
        readers: [partials, 2] row of q, and the partial result that this item gives it; every
            partial in force is given by one reader.
        bounds: [rows + 1] ascending; row r merges the partials bounds[r] to bounds[r + 1].
        slots: [capacity] slot table: ``page * S + offset`` of each place that items point into.
        queue: [1] zero between calls; a kernel's own count of the work that it has handed out.
    """

    counts: Tensor
    items: Tensor
    readers: Tensor
    bounds: Tensor
    slots: Tensor
    queue: Tensor


def dag_decode_attention(
    q: Queries, *, keys: Tensor, values: Tensor, work: AttentionWork, scale: float
) -> Queries:
    """Attend from every row to the slots that the work's items let it see (README.md, Eq. 7, 8).

    Args:
        q: [R, H, D] with R at most the rows that the work has room for.
        keys, values: [P, S, KV, D] pools, contiguous, KV dividing H.
        work: what each row sees; no slot may come to a row twice.
        scale: multiplies the scores.

    Returns:
        [R, H, D] in the dtype of q; rows without work give 0. A slot that a row does not see never
        changes its result, whatever it holds; one that it sees and that is not finite makes the
        row's heads over that KV head NaN.
    """
    rows = q.shape[0]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    pools = [pool.reshape(-1, *pool.shape[2:]) for pool in (keys, values)]
    outs = torch.zeros(len(work.readers), *q.shape[1:], dtype=wide, device=q.device)
    lses = torch.full(outs.shape[:2], -torch.inf, dtype=wide, device=q.device)
    for item in work.items[: int(work.counts[0])].tolist():
        slot_lo, num_slots, reader_lo, num_readers, seen = item[:5]
        readers, partials = work.readers[reader_lo : reader_lo + num_readers].long().unbind(1)
        index = work.slots[slot_lo : slot_lo + num_slots].long()
        place = torch.arange(num_slots, device=q.device)
        sees = seen + torch.arange(num_readers, device=q.device)
        outs[partials], lses[partials] = masked_attention(
            q[readers].to(wide),
            k=pools[0][index],
            v=pools[1][index],
            mask=place < sees[:, None],
            scale=scale,
        )
    lo, hi = work.bounds[:rows].long(), work.bounds[1 : rows + 1].long()
    most = int((hi - lo).amax()) if rows else 0
    if most == 0:
        return torch.zeros_like(q)
    index = lo + torch.arange(most, device=q.device)[:, None]  # [most, R]
    real = index < hi
    index = torch.where(real, index, 0)
    parts = torch.where(real[..., None], lses[index], -torch.inf)
    out, _ = merge_attention(list(outs[index].unbind()), lses=list(parts.unbind()))
    return out.to(q.dtype)


def append_slots(slots: Tensor, *, appends: Tensor) -> None:
    """Write entries of a slot table, in place (``slots`` is changed).

    Args:
        slots: [capacity] int32.
        appends: [n, 2] int32: place in the table, and slot. Places may repeat only where all
            entries of a place are equal, or in the table's last place, which nobody reads.
    """
    slots[appends[:, 0].long()] = appends[:, 1]
