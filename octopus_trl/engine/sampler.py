"""Draws of one step: every row from its own stream, in batches of one fixed width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """Draw one token a row.

    Args:
        logits_of: from hidden states [width, d] to float32 logits [width, vocab].
        width: rows of each batch; a batch of fewer is padded, so that the shape of the product, and
            with it the rounding, never depends on how many rows there are.
    Returns:
        Token and log-probability for each row; NaN where the row's logits are not finite.
    """
    results: list[tuple[int, float]] = []
    for lo in range(0, len(wanted), width):
        part = wanted[lo : lo + width]
        pad = width - len(part)
        logits = logits_of(torch.stack([*(row.hidden for row in part), *[part[0].hidden] * pad]))
        rows = [*part, *[part[0]] * pad]
        device = logits.device

        def column(values: list[float], dtype: torch.dtype, to: torch.device = device) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(to, non_blocking=True)

        tokens, logps = select("sample", device)(
            logits,
            temperature=column([row.params.temperature for row in rows], torch.float32),
            top_p=column([row.params.top_p for row in rows], torch.float64),
            top_k=column([row.params.top_k for row in rows], torch.int64),
            min_p=column([row.params.min_p for row in rows], torch.float64),
            uniform=column([uniform(row.seed, row.index) for row in rows], torch.float64),
        )
        results.extend(zip(tokens.tolist()[: len(part)], logps.tolist()[: len(part)], strict=True))
    return results
