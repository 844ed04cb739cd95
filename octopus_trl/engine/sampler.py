"""Draws of one step: every row from its own stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octopus_trl.engine.staging import Array
from octopus_trl.kernels import select
from octopus_trl.maths.sampling import uniform
from octopus_trl.protocols import SamplingParams


@dataclass(frozen=True, slots=True)
class Draw:
    """One row that wants a token.

    Attributes:
        hidden: [d] last hidden state.
        seed, index: stream and number of the draw within its turn.
    """

    hidden: Tensor
    params: SamplingParams
    seed: int
    index: int


def draw(
    wanted: Sequence[Draw], logits_of: Callable[[Tensor], Tensor], *, width: int
) -> list[tuple[int, float]]:
    """Draw one token a row, at most `width` rows.

    Args:
        logits_of: from hidden states [width, d] to float32 logits [width, vocab].
        width: rows of the product; fewer are padded, so that its rounding does not depend on how
            many there are.
    Returns:
        Token and log-probability for each row; NaN where the row's logits are not finite.
    """
    rows = [*wanted, *[wanted[0]] * (width - len(wanted))]
    logits = logits_of(torch.stack([row.hidden for row in rows]))

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(logits.device, non_blocking=True)

    tokens, logps = select("sample", logits.device)(
        logits,
        temperature=column([row.params.temperature for row in rows], torch.float32),
        top_p=column([row.params.top_p for row in rows], torch.float64),
        top_k=column([row.params.top_k for row in rows], torch.int64),
        min_p=column([row.params.min_p for row in rows], torch.float64),
        uniform=column([uniform(row.seed, row.index) for row in rows], torch.float64),
    )
    return list(zip(tokens.tolist(), logps.tolist(), strict=True))[: len(wanted)]


def uniforms(seeds: Array, indices: Array) -> Array:
    """Give the uniform numbers of many draws, each that of `maths.sampling.uniform`.

    Args:
        seeds, indices: [R] uint64.
    Returns:
        [R] float64 in [0, 1).
    """
    return (_splitmix(_splitmix(seeds) ^ indices) >> np.uint64(11)) * 2.0**-53


def _splitmix(state: Array) -> Array:
    mixed = state + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
