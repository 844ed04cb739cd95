"""Triton: the items of a decode attention, and the merge of their partial results.

A program takes units from a queue until none is left: unit u is KV head u % KV of item u // KV, so
units that read neighbouring memory, and tiles of readers that share a chunk, run side by side and a
chunk that several tiles read comes from memory once. A unit's readers times the query heads of its
KV head are one side of one matrix tile (`_decode_units`).
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from octopus_trl.kernels._decode_tuning import Tuning
from octopus_trl.kernels._decode_units import attend_tile
from octopus_trl.kernels._triton import tl, triton
from octopus_trl.maths.decode_attention import AttentionWork


@triton.jit
def attend_items(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    count_ptr: tl.tensor,
    item_ptr: tl.tensor,
    reader_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    queue_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    q_stride: tl.tensor,
    scale: tl.tensor,
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SMALL: tl.constexpr,
    SMALL_BLOCK: tl.constexpr,
    SMALL_STAGES: tl.constexpr,
    LARGE: tl.constexpr,
    LARGE_BLOCK: tl.constexpr,
    LARGE_STAGES: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """Take units from the queue until none is left."""
    units = tl.load(count_ptr) * KV
    unit = tl.program_id(0)
    while unit < units:
        item = item_ptr + unit // KV * 8
        kv = unit % KV
        slots = slot_ptr + tl.load(item)
        num_slots = tl.load(item + 1)
        readers = reader_ptr + 2 * tl.load(item + 2)
        num_readers = tl.load(item + 3)
        seen = tl.load(item + 4)
        if num_readers * GROUP > SMALL:
            taken = attend_tile(
                q_ptr,
                key_ptr,
                value_ptr,
                slots,
                readers,
                out_ptr,
                lse_ptr,
                queue_ptr,
                num_slots,
                num_readers,
                seen,
                kv,
                q_stride,
                scale,
                GROUP,
                KV,
                D,
                D_PAD,
                LARGE,
                LARGE_BLOCK,
                REST,
                LARGE_STAGES,
            )
        else:
            taken = attend_tile(
                q_ptr,
                key_ptr,
                value_ptr,
                slots,
                readers,
                out_ptr,
                lse_ptr,
                queue_ptr,
                num_slots,
                num_readers,
                seen,
                kv,
                q_stride,
                scale,
                GROUP,
                KV,
                D,
                D_PAD,
                SMALL,
                SMALL_BLOCK,
                REST,
                SMALL_STAGES,
            )
        unit = tl.num_programs(0) + taken


@triton.jit
def merge_partials(
    out_ptr: tl.tensor,
    part_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    bound_ptr: tl.tensor,
    queue_ptr: tl.tensor,
    out_stride: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Merge the partials of one row and head, and set the queue back for the next call."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    lo = tl.load(bound_ptr + row)
    hi = tl.load(bound_ptr + row + 1)
    if (row == 0) & (head == 0):
        tl.store(queue_ptr, 0)
    place = tl.arange(0, BLOCK)
    column = tl.arange(0, D_PAD)
    inside = column < D
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([D_PAD], tl.float32)
    for first in tl.range(lo, hi, BLOCK, num_stages=1):
        real = first + place < hi
        source = (first + place).to(tl.int64) * HEADS + head
        lse = tl.load(lse_ptr + source, mask=real, other=float("-inf"))
        part = tl.load(
            part_ptr + source[:, None] * D + column[None, :],
            mask=real[:, None] & inside[None, :],
            other=0.0,
        )
        # A NaN is in the partial too, so that a maximum which ignores it loses nothing.
        higher = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(lse - base)
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(weight, 0)
        acc = acc * keep + tl.sum(weight[:, None] * part, 0)
        top = higher
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out_ptr + row.to(tl.int64) * out_stride + head * D + column,
        acc.to(out_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def write_entries(
    slot_ptr: tl.tensor, append_ptr: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Write slot_ptr[a[i, 0]] = a[i, 1]."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = place < count
    target = tl.load(append_ptr + 2 * place, mask=real, other=0)
    tl.store(slot_ptr + target, tl.load(append_ptr + 2 * place + 1, mask=real), mask=real)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, work: AttentionWork, scale: float, tuning: Tuning
) -> Tensor:
    """Run both kernels with the sizes of `tuning`; shapes as in ``kernels.decode_attention``."""
    rows, heads, dim = q.shape
    num_kv = keys.shape[2]
    padded = max(16, triton.next_power_of_2(dim))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    # Scratch of the call; while a graph is captured it comes from the pool of that graph.
    parts = torch.empty(len(work.readers), heads, dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(len(work.readers), heads, dtype=torch.float32, device=q.device)
    attend_items[(_processors(q.device) * tuning.programs,)](
        q,
        keys,
        values,
        work.counts,
        work.items,
        work.readers,
        work.slots,
        work.queue,
        parts,
        lses,
        q.stride(0),
        scale * math.log2(math.e),
        KV=num_kv,
        GROUP=heads // num_kv,
        D=dim,
        D_PAD=padded,
        SMALL=tuning.small,
        SMALL_BLOCK=tuning.small_block,
        SMALL_STAGES=tuning.small_stages,
        LARGE=tuning.large,
        LARGE_BLOCK=tuning.large_block,
        LARGE_STAGES=tuning.large_stages,
        REST=32,
        num_warps=tuning.warps,
    )
    merge_partials[(rows, heads)](
        out,
        parts,
        lses,
        work.bounds,
        work.queue,
        out.stride(0),
        HEADS=heads,
        D=dim,
        D_PAD=padded,
        BLOCK=tuning.merge_block,
        num_warps=tuning.merge_warps,
    )
    return out


@functools.cache
def _processors(device: torch.device) -> int:
    """Count the multiprocessors; one in the interpreter, whose programs run one after another."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
