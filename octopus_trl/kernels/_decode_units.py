"""Triton: one unit of decode attention: a tile of readers over one KV head of one chunk.

Scores are kept in base 2: s = scale · log2(e) · q·k. Sums over the slots of a step are left to the
end of the loop: only the maximum has to be known at once. A unit asks for its program's next one
after its main loop and looks at the answer when it has written, so that neither the queue nor the
fields of the next item are waited for.
"""

from __future__ import annotations

from octopus_trl.kernels._triton import tl, triton


@triton.jit
def _scores(q: tl.tensor, k: tl.tensor) -> tl.tensor:
    # float32 inputs (tests, the interpreter) are multiplied as such, not rounded to TF32.
    return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def ask(queue_ptr: tl.tensor, THREADS: tl.constexpr) -> tl.tensor:
    """Take the queue's next number; only `answer` waits for it.

    One thread takes it and a vector has room for every thread's answer: a scalar would be shared
    with the other threads, and waited for, at once.
    """
    thread = tl.arange(0, THREADS)
    return tl.atomic_add(queue_ptr + 0 * thread, 1, mask=thread == 0, sem="relaxed")


@triton.jit
def answer(asked: tl.tensor, THREADS: tl.constexpr) -> tl.tensor:
    """Give the number that was asked for."""
    return tl.max(tl.where(tl.arange(0, THREADS) == 0, asked, 0), 0)


@triton.jit
def fields_of(
    item_ptr: tl.tensor, unit: tl.tensor, units: tl.tensor, KV: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Load slot_lo, num_slots, reader_lo, num_readers and seen of a unit's item."""
    item = item_ptr + unit // KV * 8
    real = unit < units
    return (
        tl.load(item, mask=real, other=0),
        tl.load(item + 1, mask=real, other=0),
        tl.load(item + 2, mask=real, other=0),
        tl.load(item + 3, mask=real, other=0),
        tl.load(item + 4, mask=real, other=0),
    )


@triton.jit
def _pairs(
    ptr: tl.tensor, place: tl.tensor, real: tl.tensor, FIELDS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Load ptr[place] and ptr[place + 1], 0 where not real.

    As a matrix of at least one element a thread: Triton lets every thread repeat a smaller load for
    each line that it deals with, and keeps all of that in registers.
    """
    field = tl.arange(0, FIELDS)
    pair = tl.load(
        ptr + place[:, None] + field[None, :],
        mask=real[:, None] & (field < 2)[None, :],
        other=0,
    )
    second = (field == 1)[None, :]
    return tl.sum(tl.where(second, 0, pair), 1), tl.sum(tl.where(second, pair, 0), 1)


@triton.jit
def attend_tile(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    reader_ptr: tl.tensor,
    item_ptr: tl.tensor,
    bound_ptr: tl.tensor,
    queue_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    num_slots: tl.tensor,
    num_readers: tl.tensor,
    seen: tl.tensor,
    kv: tl.tensor,
    units: tl.tensor,
    q_stride: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    MERGE_HEADS: tl.constexpr,
    THREADS: tl.constexpr,
    REST: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Attend with the readers' heads as rows of the products; returns the program's next unit and
    the fields of its item.
    """
    HEADS: tl.constexpr = KV * GROUP
    BLOCKS: tl.constexpr = (HEADS + MERGE_HEADS - 1) // MERGE_HEADS
    FIELDS: tl.constexpr = THREADS // TILE if THREADS > 2 * TILE else 2
    line = tl.arange(0, TILE)
    reader = line // GROUP
    head = kv * GROUP + line % GROUP
    column = tl.arange(0, D_PAD)
    place = tl.arange(0, BLOCK)
    real = reader < num_readers
    inside = column < D
    row, partial = _pairs(reader_ptr, 2 * reader, real, FIELDS)
    q = tl.load(
        q_ptr + (row.to(tl.int64) * q_stride + head * D)[:, None] + column[None, :],
        mask=real[:, None] & inside[None, :],
        other=0.0,
    )
    sees = tl.minimum(seen + reader, num_slots)
    top = tl.full([TILE], float("-inf"), tl.float32)
    sums = tl.zeros([TILE, BLOCK], tl.float32)
    acc = tl.zeros([TILE, D_PAD], tl.float32)
    key_ptr += kv * D
    value_ptr += kv * D

    # Blocks that every reader sees whole: no mask at all.
    common = tl.maximum(tl.minimum(seen, num_slots), 0) // BLOCK * BLOCK
    slot = tl.load(slot_ptr + place, mask=place < num_slots, other=0)
    for lo in tl.range(0, common, BLOCK, num_stages=STAGES):
        where = (slot.to(tl.int64) * (KV * D))[:, None] + column[None, :]
        ahead = lo + BLOCK + place
        slot = tl.load(slot_ptr + ahead, mask=ahead < num_slots, other=0)
        if D == D_PAD:
            k = tl.load(key_ptr + where)
        else:
            k = tl.load(key_ptr + where, mask=inside[None, :], other=0.0)
        s = _scores(q, k)
        higher = tl.maximum(top, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - higher[:, None])
        keep = tl.exp2(top - higher)
        sums = sums * keep[:, None] + p
        acc = acc * keep[:, None]
        if D == D_PAD:
            v = tl.load(value_ptr + where)
        else:
            v = tl.load(value_ptr + where, mask=inside[None, :], other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        top = higher
    asked = ask(queue_ptr, THREADS)
    total = tl.sum(sums, 1)

    # The rest: a ragged end, and slots that some readers see and others do not.
    most = tl.minimum(seen + num_readers - 1, num_slots)
    step = tl.arange(0, REST)
    for lo in tl.range(common, most, REST, num_stages=1):
        exists = lo + step < most
        start = tl.load(slot_ptr + lo + step, mask=exists, other=0).to(tl.int64) * (KV * D)
        where = start[:, None] + column[None, :]
        wanted = exists[:, None] & inside[None, :]
        k = tl.load(key_ptr + where, mask=wanted, other=0.0)
        v = tl.load(value_ptr + where, mask=wanted, other=0.0)
        # 0 * NaN is NaN: a value that is not finite is taken out and its readers are marked.
        finite = tl.abs(v.to(tl.float32)) < float("inf")
        broken = tl.sum((~finite).to(tl.int32), 1) > 0
        v = tl.where(finite, v, 0.0)
        s = _scores(q, k) * scale
        s = tl.where(broken[None, :], float("nan"), s)
        s = tl.where(lo + step[None, :] < sees[:, None], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        # A reader that has seen nothing yet has no top to subtract.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * keep[:, None], input_precision="ieee")
        top = higher

    # Loaded again: held through the loop they would cost it registers.
    row, partial = _pairs(reader_ptr, 2 * reader, real, FIELDS)
    lo, hi = _pairs(bound_ptr, row, real, FIELDS)
    partials = hi - lo
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    whole = partials == 1
    if tl.max(whole.to(tl.int32), 0) > 0:
        tl.store(
            out_ptr + ((row * HEADS + head).to(tl.int64) * D)[:, None] + column[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=whole[:, None] & inside[None, :],
        )
    split = partials > 1
    if tl.max(split.to(tl.int32), 0) > 0:
        lse = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))
        target = (partial * HEADS + head).to(tl.int64)
        tl.store(lse_ptr + target, lse, mask=split)
        tl.store(
            part_ptr + (target * D)[:, None] + column[None, :],
            acc,
            mask=split[:, None] & inside[None, :],
        )
    unit = answer(asked, THREADS)
    slot_lo, next_slots, reader_lo, next_readers, next_seen = fields_of(item_ptr, unit, units, KV)
    # All threads have written before one of them says so.
    tl.debug_barrier()
    tl.atomic_add(arrived_ptr + row * BLOCKS + head // MERGE_HEADS, 1, mask=split, sem="release")
    return unit, slot_lo, next_slots, reader_lo, next_readers, next_seen
