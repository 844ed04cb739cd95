"""Triton: one unit of decode attention: a tile of readers over one KV head of one chunk.

Scores are kept in base 2: s = scale · log2(e) · q·k. A unit takes its program's next unit from the
queue before it writes, so that the answer is there when it ends. Sums over the slots of a step are
left to the end of the loop: only the maximum has to be known at once.
"""

from __future__ import annotations

from octopus_trl.kernels._triton import tl, triton


@triton.jit
def _scores(q: tl.tensor, k: tl.tensor) -> tl.tensor:
    # float32 inputs (tests, the interpreter) are multiplied as such, not rounded to TF32.
    return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def attend_tile(
    q_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    reader_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    queue_ptr: tl.tensor,
    num_slots: tl.tensor,
    num_readers: tl.tensor,
    seen: tl.tensor,
    kv: tl.tensor,
    q_stride: tl.tensor,
    scale: tl.tensor,
    GROUP: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Attend with the readers' heads as rows of the products; returns what the queue gave."""
    line = tl.arange(0, TILE)
    reader = line // GROUP
    head = kv * GROUP + line % GROUP
    column = tl.arange(0, D_PAD)
    place = tl.arange(0, BLOCK)
    real = reader < num_readers
    inside = column < D
    row = tl.load(reader_ptr + 2 * reader, mask=real, other=0).to(tl.int64)
    partial = tl.load(reader_ptr + 2 * reader + 1, mask=real, other=0).to(tl.int64)
    q = tl.load(
        q_ptr + (row * q_stride + head * D)[:, None] + column[None, :],
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

    taken = tl.atomic_add(queue_ptr, 1, sem="relaxed")
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))
    target = partial * (KV * GROUP) + head
    tl.store(lse_ptr + target, lse, mask=real)
    tl.store(
        out_ptr + target[:, None] * D + column[None, :],
        acc,
        mask=real[:, None] & inside[None, :],
    )
    return taken
