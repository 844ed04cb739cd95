"""Top-k and top-p in Triton without a sort: the rank of the last kept token, four bits at a time.

Logits become integers that rank as they do. What top-k or top-p keeps is then all keys above some
key, and of those equal to it the first few by id. That key is found from its highest bits down:
a launch tallies, for each value of the next four bits, how many tokens have it and what mass, and
a second one, a program a row, decides. Masses are integers of 2^-40, so that no order of adding
matters. Bits beyond a bfloat16's sixteen are not looked at where the logits are bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octopus_trl.kernels._triton import begin, early, tl, triton

_DIGIT_BITS = 4
_MASS_BITS = 41  # of a tally; the count lies above


class Found(NamedTuple):
    """What top-k, and top-p within it, leave of each row.

    Attributes:
        rows: [R, 3] int64: tokens with keys above the first stay (-1: all), and of those with that
            key as many as the second says, lowest ids first. The third is the mass that top-k left.
        shift: bits of a key that do not count.
    """

    rows: Tensor
    shift: int


def search(
    logits: Tensor,
    temperature: Tensor,
    totals: Tensor,
    *,
    top_k: Tensor,
    top_p: Tensor,
    block: int,
) -> Found:
    """Find what top-k and top-p keep in each row, in two launches for each four bits of a key.

    Args:
        logits: [R, V]; temperature, top_k, top_p: [R].
        totals: [R, 2] float64, highest scaled logit and sum of exponentials below it.
        block: tokens of one program.
    """
    rows, vocab = logits.shape
    shift = 16 if logits.dtype == torch.bfloat16 else 0
    blocks = triton.cdiv(vocab, block)
    device = logits.device
    found = torch.empty(rows, 3, dtype=torch.int64, device=device)
    state = torch.empty(rows, 2, dtype=torch.int64, device=device)
    tallies = torch.empty(rows, blocks, 1 << _DIGIT_BITS, dtype=torch.int64, device=device)
    for is_mass in (False, True):
        for low in range(32 - shift - _DIGIT_BITS, -1, -_DIGIT_BITS):
            shape = {"LOW": low, "FIRST": low == 32 - shift - _DIGIT_BITS, "IS_MASS": is_mass}
            _tally[(blocks, rows)](
                logits,
                temperature,
                totals,
                top_k,
                top_p,
                state,
                tallies,
                vocab,
                logits.stride(0),
                **shape,
                SHIFT=shift,
                BLOCK=block,
                **early(device, rows),
                num_warps=8,
            )
            _narrow[(rows,)](
                top_k,
                top_p,
                state,
                tallies,
                found,
                blocks,
                **shape,
                BLOCKS=triton.next_power_of_2(blocks),
                **early(device, rows),
                num_warps=4,
            )
    return Found(found, shift)


@triton.jit
def key_of(value: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """Give the rank of a float32 among all, as an integer below 2^(32 - SHIFT)."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0 ranks as 0
    ordered = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return (ordered.to(tl.int64) & 4294967295) >> SHIFT


@triton.jit
def _is_used(
    top_k: tl.tensor, top_p: tl.tensor, row: tl.tensor, IS_MASS: tl.constexpr
) -> tl.tensor:
    if IS_MASS:
        used = tl.load(top_p + row) < 1.0
    else:
        used = tl.load(top_k + row) > 0
    return used


@triton.jit
def _tally(
    logits: tl.tensor,
    temperature: tl.tensor,
    totals: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    state: tl.tensor,
    tallies: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    LOW: tl.constexpr,
    FIRST: tl.constexpr,
    IS_MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin(EARLY)
    block = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if _is_used(top_k, top_p, row, IS_MASS):
        token = block * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        value = tl.load(logits + row * stride + token, mask=inside, other=0.0).to(tl.float32)
        key = key_of(value, SHIFT)
        if not FIRST:
            inside = inside & (key >> (LOW + 4) == tl.load(state + row * 2) >> (LOW + 4))
        asked = tl.load(temperature + row).to(tl.float32)
        scaled = tl.div_rn(value, tl.where(asked == 0.0, 1.0, asked))
        share = tl.exp(scaled - tl.load(totals + row * 2).to(tl.float32)).to(tl.float64)
        share = share / tl.load(totals + row * 2 + 1)
        packed = (share * 1099511627776.0 + 0.5).to(tl.int64) + (1 << 41)
        digit = (key >> LOW) & 15
        to = tallies + (row * tl.num_programs(0) + block) * 16
        for each in tl.static_range(16):
            total = tl.sum(tl.where(inside & (digit == 15 - each), packed, 0), 0)
            tl.store(to + each, total)


@triton.jit
def _narrow(
    top_k: tl.tensor,
    top_p: tl.tensor,
    state: tl.tensor,
    tallies: tl.tensor,
    found: tl.tensor,
    blocks: tl.tensor,
    LOW: tl.constexpr,
    FIRST: tl.constexpr,
    IS_MASS: tl.constexpr,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    begin(EARLY)
    WHOLE: tl.constexpr = 1 << 40
    MASS: tl.constexpr = (1 << 41) - 1
    row = tl.program_id(0).to(tl.int64)
    to = found + row * 3
    if _is_used(top_k, top_p, row, IS_MASS):
        block = tl.arange(0, BLOCKS)
        each = tl.arange(0, 16)  # digits from the highest down
        at = tallies + (row * blocks + block[:, None]) * 16 + each[None, :]
        tally = tl.sum(tl.load(at, mask=(block < blocks)[:, None], other=0), 0)
        prefix = tl.program_id(0).to(tl.int64) * 0
        above = prefix
        if not FIRST:
            prefix = tl.load(state + row * 2)
            above = tl.load(state + row * 2 + 1)
        through = above + tl.cumsum(tally, 0)
        if IS_MASS:
            target = tl.load(top_p + row).to(tl.float64) * tl.load(to + 2).to(tl.float64)
            reached = (through & MASS).to(tl.float64) >= target
        else:
            target = tl.load(top_k + row).to(tl.float64)
            reached = (through >> 41).to(tl.float64) >= target
        # Rounding, or a k beyond the vocabulary, must not reach past the last token.
        last = tl.max(tl.where(tally > 0, each, 0), 0)
        chosen = tl.minimum(tl.min(tl.where(reached, each, 15), 0), last)
        above += tl.sum(tl.where(each < chosen, tally, 0), 0)
        prefix |= (15 - chosen).to(tl.int64) << LOW
        if LOW > 0:
            tl.store(state + row * 2, prefix)
            tl.store(state + row * 2 + 1, above)
        else:
            group = tl.sum(tl.where(each == chosen, tally, 0), 0)
            size = group >> 41
            one = (group & MASS) // size
            if IS_MASS:
                left = target - (above & MASS).to(tl.float64)
                ties = tl.maximum(tl.ceil(left / tl.maximum(one, 1).to(tl.float64)), 1.0)
                if tl.load(to) == prefix:
                    size = tl.load(to + 1)
                ties = tl.minimum(ties, size.to(tl.float64)).to(tl.int64)
            else:
                ties = tl.minimum(tl.load(top_k + row).to(tl.int64) - (above >> 41), size)
                tl.store(to + 2, (above & MASS) + ties * one)
            tl.store(to, prefix)
            tl.store(to + 1, ties)
    elif LOW == 0 and not IS_MASS:
        tl.store(to, tl.full([], -1, tl.int64))
        tl.store(to + 1, tl.full([], 0, tl.int64))
        tl.store(to + 2, tl.full([], WHOLE, tl.int64))
