"""Triton: the items of a decode attention, in one launch with the merge of their partial results.

A program takes units from a queue until none is left: unit u is KV head u % KV of item u // KV, so
units that read neighbouring memory, and tiles of readers that share a chunk, run side by side and a
chunk that several tiles read comes from memory once. A unit's readers times the query heads of its
KV head are one side of one matrix tile (`_decode_units`). Then it merges its share of the rows
(`_decode_merge`).
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from octopus_trl.errors import ConfigError
from octopus_trl.kernels._decode_merge import merge_rows
from octopus_trl.kernels._decode_tuning import Tuning
from octopus_trl.kernels._decode_units import answer, ask, attend_tile, fields_of
from octopus_trl.kernels._triton import tl, triton
from octopus_trl.maths.decode_attention import AttentionWork


@triton.jit(do_not_specialize=["rows"])
def attend_items(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    count_ptr: tl.tensor,
    item_ptr: tl.tensor,
    reader_ptr: tl.tensor,
    bound_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    queue_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    rows: tl.tensor,
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
    MERGE_HEADS: tl.constexpr,
    MERGE_PARTS: tl.constexpr,
    THREADS: tl.constexpr,
) -> None:
    """Take units from the queue until none is left, then merge a share of the rows."""
    units = tl.load(count_ptr) * KV
    unit = answer(ask(queue_ptr, THREADS), THREADS)
    slot_lo, num_slots, reader_lo, num_readers, seen = fields_of(item_ptr, unit, units, KV)
    while unit < units:
        kv = unit % KV
        slots = slot_ptr + slot_lo
        readers = reader_ptr + 2 * reader_lo
        if num_readers * GROUP > SMALL:
            unit, slot_lo, num_slots, reader_lo, num_readers, seen = attend_tile(
                q_ptr,
                key_ptr,
                value_ptr,
                slots,
                readers,
                item_ptr,
                bound_ptr,
                queue_ptr,
                arrived_ptr,
                out_ptr,
                part_ptr,
                lse_ptr,
                num_slots,
                num_readers,
                seen,
                kv,
                units,
                q_stride,
                scale,
                GROUP,
                KV,
                D,
                D_PAD,
                MERGE_HEADS,
                THREADS,
                REST,
                LARGE,
                LARGE_BLOCK,
                LARGE_STAGES,
            )
        else:
            unit, slot_lo, num_slots, reader_lo, num_readers, seen = attend_tile(
                q_ptr,
                key_ptr,
                value_ptr,
                slots,
                readers,
                item_ptr,
                bound_ptr,
                queue_ptr,
                arrived_ptr,
                out_ptr,
                part_ptr,
                lse_ptr,
                num_slots,
                num_readers,
                seen,
                kv,
                units,
                q_stride,
                scale,
                GROUP,
                KV,
                D,
                D_PAD,
                MERGE_HEADS,
                THREADS,
                REST,
                SMALL,
                SMALL_BLOCK,
                SMALL_STAGES,
            )
    # Every program asks until it is answered beyond the units: this was the last one to ask.
    if unit == units + tl.num_programs(0) - 1:
        tl.store(queue_ptr, 0)
    merge_rows(
        out_ptr,
        part_ptr,
        lse_ptr,
        bound_ptr,
        arrived_ptr,
        rows,
        KV * GROUP,
        D,
        D_PAD,
        MERGE_HEADS,
        MERGE_PARTS,
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
    """Run the kernel with the sizes of `tuning`; shapes as in ``kernels.decode_attention``."""
    rows, heads, dim = q.shape
    num_kv = keys.shape[2]
    if len(work.arrived) < rows * heads:
        raise ConfigError(
            f"work.arrived has {len(work.arrived)} counters, must be at least {rows} rows times "
            f"{heads} heads: make it of the size that AttentionWork says"
        )
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
        work.bounds,
        work.slots,
        work.queue,
        work.arrived,
        out,
        parts,
        lses,
        rows,
        q.stride(0),
        scale * math.log2(math.e),
        KV=num_kv,
        GROUP=heads // num_kv,
        D=dim,
        D_PAD=max(16, triton.next_power_of_2(dim)),
        SMALL=tuning.small,
        SMALL_BLOCK=tuning.small_block,
        SMALL_STAGES=tuning.small_stages,
        LARGE=tuning.large,
        LARGE_BLOCK=tuning.large_block,
        LARGE_STAGES=tuning.large_stages,
        REST=32,
        MERGE_HEADS=tuning.merge_heads,
        MERGE_PARTS=tuning.merge_parts,
        THREADS=32 * tuning.warps,
        num_warps=tuning.warps,
    )
    return out


@functools.cache
def _processors(device: torch.device) -> int:
    """Count the multiprocessors; one in the interpreter, whose programs run one after another."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
