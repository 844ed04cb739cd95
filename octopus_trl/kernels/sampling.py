"""Drawing tokens in Triton: one pass over the logits, and a second look at one block a row.

A first launch reduces blocks of the vocabulary to their maximum and their sum of exponentials; a
second one, a program a row, finds the block in which the cumulative distribution passes the uniform
number and walks that block alone. Exponentials are in float32, sums in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octopus_trl.kernels._filters import key_of, search
from octopus_trl.kernels._triton import begin, early, tl, triton
from octopus_trl.maths import sampling as maths
from octopus_trl.shapes import Logps

BLOCK = 4096  # tokens of one block


def sample(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    filtered: bool | None = None,
) -> tuple[Tensor, Logps]:
    """Draw one token a row, as ``maths.sampling.sample``.

    Args:
        logits: [R, V], rows of any stride (float64 takes the reference).
        temperature, top_p, top_k, min_p, uniform: [R].
        filtered: False promises that no row uses top-k, top-p or min-p and then costs two launches;
            True allows it and costs about twenty (bfloat16; float32 about forty), in which rows
            without filters do no work; None looks, which waits for the device once.

    Returns:
        tokens [R] int64 and their log-probabilities [R] float32. Exponentials are rounded to
        float32, so a token may differ from the reference where the uniform number lies within about
        1e-6 of a boundary. Of equal logits the lowest id is the best.
    """
    rows, vocab = logits.shape
    if filtered is None:
        filtered = bool(((top_p < 1) | (top_k > 0) | (min_p > 0)).any())
    if logits.dtype == torch.float64 or rows == 0:
        return maths.sample(
            logits,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            uniform=uniform,
            filtered=filtered,
        )
    blocks = triton.cdiv(vocab, BLOCK)
    highest = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    mass = torch.empty(rows, blocks, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logps = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _survey[(blocks, rows)](
        logits,
        temperature,
        highest,
        best,
        mass,
        vocab,
        logits.stride(0),
        BLOCK=BLOCK,
        **early(logits.device, rows),
        num_warps=8,
    )
    kept, found, shift = mass, best, 0
    if filtered:
        totals = torch.empty(rows, 2, dtype=torch.float64, device=logits.device)
        _total[(rows,)](
            highest,
            mass,
            totals,
            blocks,
            BLOCKS=triton.next_power_of_2(blocks),
            **early(logits.device, rows),
            num_warps=4,
        )
        found, shift = search(logits, temperature, totals, top_k=top_k, top_p=top_p, block=BLOCK)
        kept = torch.empty(rows, blocks, 3, dtype=torch.float64, device=logits.device)
        _measure_kept[(blocks, rows)](
            logits,
            temperature,
            totals,
            min_p,
            found,
            kept,
            vocab,
            logits.stride(0),
            SHIFT=shift,
            BLOCK=BLOCK,
            **early(logits.device, rows),
            num_warps=8,
        )
    _draw[(rows,)](
        logits,
        temperature,
        uniform,
        highest,
        best,
        mass,
        min_p,
        found,
        kept,
        tokens,
        logps,
        vocab,
        blocks,
        logits.stride(0),
        FILTERED=filtered,
        SHIFT=shift,
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(blocks),
        **early(logits.device, rows),
        num_warps=8,
    )
    return tokens, logps


@triton.jit
def scaled_block(
    logits: tl.tensor, scale: tl.tensor, token: tl.tensor, vocab: tl.tensor
) -> tl.tensor:
    """Load logits of one row over its temperature; -inf beyond the vocabulary."""
    value = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return tl.div_rn(value, scale)


@triton.jit
def scale_of(temperature: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Give the divisor of a row's logits: 1 where the best token is taken."""
    asked = tl.load(temperature + row).to(tl.float32)
    return tl.where(asked == 0.0, 1.0, asked)


@triton.jit
def exponentials(value: tl.tensor, highest: tl.tensor) -> tl.tensor:
    """Give ``exp(value - highest)``, 0 for -inf whatever the highest is, NaN kept."""
    return tl.exp(value - tl.where(highest == float("-inf"), 0.0, highest))


@triton.jit
def _survey(
    logits: tl.tensor,
    temperature: tl.tensor,
    highest: tl.tensor,
    best: tl.tensor,
    mass: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin(EARLY)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    value = scaled_block(logits + row * stride, scale_of(temperature, row), token, vocab)
    top = tl.max(value, 0)
    first = tl.min(tl.where(value == top, token, vocab - 1), 0)
    total = tl.sum(exponentials(value, top).to(tl.float64), 0)
    at = row * tl.num_programs(0) + block
    tl.store(highest + at, top)
    tl.store(best + at, first)
    tl.store(mass + at, total)


@triton.jit
def _total(
    highest: tl.tensor,
    mass: tl.tensor,
    totals: tl.tensor,
    blocks: tl.tensor,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    tops = tl.load(highest + row * blocks + block, mask=inside, other=float("-inf"))
    sums = tl.load(mass + row * blocks + block, mask=inside, other=0.0)
    top = tl.max(tops, 0)
    tl.store(totals + row * 2, top.to(tl.float64))
    tl.store(totals + row * 2 + 1, tl.sum(sums * exponentials(tops, top).to(tl.float64), 0))


@triton.jit
def _passing(value: tl.tensor, top: tl.tensor, min_p: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Give exponentials, 0 where min-p drops a token; the best one always stays."""
    weight = exponentials(value, top).to(tl.float64)
    return tl.where(inside & ((weight >= min_p) | (value == top)), weight, 0.0)


@triton.jit
def _measure_kept(
    logits: tl.tensor,
    temperature: tl.tensor,
    totals: tl.tensor,
    min_p: tl.tensor,
    found: tl.tensor,
    kept: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Sum a block's tokens above the last kept key; count those with that key, and sum them."""
    begin(EARLY)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    raw = tl.load(logits + row * stride + token, mask=inside, other=float("-inf")).to(tl.float32)
    key = key_of(raw, SHIFT)
    value = tl.div_rn(raw, scale_of(temperature, row))
    top = tl.load(totals + row * 2).to(tl.float32)
    weight = _passing(value, top, tl.load(min_p + row).to(tl.float64), inside)
    last = tl.load(found + row * 3)
    tied = inside & (key == last)
    to = kept + (row * tl.num_programs(0) + block) * 3
    tl.store(to, tl.sum(tl.where(key > last, weight, 0.0), 0))
    tl.store(to + 1, tl.sum(tl.where(tied, 1.0, 0.0), 0).to(tl.float64))
    tl.store(to + 2, tl.sum(tl.where(tied, weight, 0.0), 0))


@triton.jit
def _draw(
    logits: tl.tensor,
    temperature: tl.tensor,
    uniform: tl.tensor,
    highest: tl.tensor,
    best: tl.tensor,
    mass: tl.tensor,
    min_p: tl.tensor,
    found: tl.tensor,
    kept: tl.tensor,
    tokens: tl.tensor,
    logps: tl.tensor,
    vocab: tl.tensor,
    blocks: tl.tensor,
    stride: tl.tensor,
    FILTERED: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    inside = block < blocks
    tops = tl.load(highest + row * blocks + block, mask=inside, other=float("-inf"))
    sums = tl.load(mass + row * blocks + block, mask=inside, other=0.0)
    firsts = tl.load(best + row * blocks + block, mask=inside, other=0)
    top = tl.max(tops, 0)
    sums = sums * exponentials(tops, top).to(tl.float64)
    total = tl.sum(sums, 0)
    if FILTERED:
        last_key = tl.load(found + row * 3)
        num_ties = tl.load(found + row * 3 + 1).to(tl.float64)
        at = kept + (row * blocks + block) * 3
        ties = tl.load(at + 1, mask=inside, other=0.0)
        tied_mass = tl.load(at + 2, mask=inside, other=0.0)
        ties_before = tl.cumsum(ties, 0) - ties
        staying = tl.minimum(tl.maximum(num_ties - ties_before, 0.0), ties)
        sums = tl.load(at, mask=inside, other=0.0)
        sums += tl.where(ties > 0, tied_mass * staying / tl.maximum(ties, 1.0), 0.0)
    target = tl.load(uniform + row).to(tl.float64) * tl.sum(sums, 0)
    ends = tl.cumsum(sums, 0)
    # The first block whose end lies beyond the target; rounding must not reach past the last one
    # that holds anything.
    last = tl.max(tl.where(sums > 0, block, 0), 0)
    chosen = tl.minimum(tl.min(tl.where(ends > target, block, BLOCKS), 0), last)
    start = tl.sum(tl.where(block < chosen, sums, 0.0), 0)

    token = chosen * BLOCK + tl.arange(0, BLOCK)
    source = logits + row * stride
    scale = scale_of(temperature, row)
    value = scaled_block(source, scale, token, vocab)
    if FILTERED:
        raw = tl.load(source + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        key = key_of(raw, SHIFT)
        weight = _passing(value, top, tl.load(min_p + row).to(tl.float64), token < vocab)
        tied = (key == last_key) & (token < vocab)
        rank = tl.cumsum(tl.where(tied, 1, 0), 0).to(tl.float64)
        before = tl.sum(tl.where(block == chosen, ties_before, 0.0), 0)
        stays = (key > last_key) | (tied & (before + rank <= num_ties))
        weight = tl.where(stays, weight, 0.0)
    else:
        weight = exponentials(value, top).to(tl.float64)
    passed = start + tl.cumsum(weight, 0)
    last_token = tl.max(tl.where(weight > 0, token, 0), 0)
    drawn = tl.minimum(tl.min(tl.where(passed > target, token, vocab), 0), last_token)
    greedy = tl.min(tl.where((tops == top) & inside, firsts, vocab - 1), 0)
    drawn = tl.where(tl.load(temperature + row) == 0.0, greedy, drawn)
    logp = scaled_block(source, scale, drawn, vocab) - top - tl.log(total.to(tl.float32))
    tl.store(tokens + row, drawn.to(tl.int64))
    tl.store(logps + row, logp)
