"""Triton: the merge of decode attention's partial results, in the launch that makes them.

Who writes a partial says so in a counter of its row and heads. When the queue of units is empty,
every program merges its share of the rows, each as soon as its counter is full: so the merge is
spread over the whole device, whoever came last. Nothing waits for ever: units come from the queue
alone, so whoever has one is running, and no program waits before all of its own are done.
"""

from __future__ import annotations

from octopus_trl.kernels._triton import tl, triton


@triton.jit
def merge_rows(
    out_ptr: tl.tensor,
    part_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    bound_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    MERGE_HEADS: tl.constexpr,
    MERGE_PARTS: tl.constexpr,
) -> None:
    """Write this program's share of the rows that have no or several partials.

    Partials are added in the order of their numbers, whoever made them and whenever: the same bits
    each time. Counters are left at 0.
    """
    BLOCKS: tl.constexpr = (HEADS + MERGE_HEADS - 1) // MERGE_HEADS
    line = tl.arange(0, MERGE_HEADS)
    place = tl.arange(0, MERGE_PARTS)
    column = tl.arange(0, D_PAD)
    share = tl.cdiv(rows * BLOCKS, tl.num_programs(0))
    begin = tl.program_id(0) * share
    for block in tl.range(begin, tl.minimum(begin + share, rows * BLOCKS), num_stages=1):
        row = block // BLOCKS
        head = block % BLOCKS * MERGE_HEADS + line
        lo = tl.load(bound_ptr + row)
        hi = tl.load(bound_ptr + row + 1)
        # A partial that is its row's only one was written as the result.
        if hi - lo != 1:
            wanted = (hi - lo) * tl.minimum(HEADS - block % BLOCKS * MERGE_HEADS, MERGE_HEADS)
            while tl.atomic_add(arrived_ptr + block, 0, sem="acquire") < wanted:
                pass
            tl.store(arrived_ptr + block, 0)
            top = tl.full([MERGE_HEADS], float("-inf"), tl.float32)
            total = tl.zeros([MERGE_HEADS], tl.float32)
            acc = tl.zeros([MERGE_HEADS, D_PAD], tl.float32)
            given = (head < HEADS)[:, None] & (column < D)[None, :]
            for first in tl.range(lo, hi, MERGE_PARTS, num_stages=1):
                source = (first + place).to(tl.int64)[None, :] * HEADS + head[:, None]
                real = (first + place < hi)[None, :] & (head < HEADS)[:, None]
                # Past the first-level cache, which other multiprocessors do not write to.
                lse = tl.load(
                    lse_ptr + source, mask=real, other=float("-inf"), cache_modifier=".cg"
                )
                part = tl.load(
                    part_ptr + source[:, :, None] * D + column[None, None, :],
                    mask=real[:, :, None] & (column < D)[None, None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                # A NaN is in the partial too, so that a maximum which ignores it loses nothing.
                higher = tl.maximum(top, tl.max(lse, 1))
                base = tl.where(higher == float("-inf"), 0.0, higher)
                weight = tl.exp2(lse - base[:, None])
                keep = tl.exp2(top - base)
                total = total * keep + tl.sum(weight, 1)
                acc = acc * keep[:, None] + tl.sum(weight[:, :, None] * part, 1)
                top = higher
            acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            target = (row.to(tl.int64) * HEADS + head)[:, None] * D + column[None, :]
            tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=given)
