"""Log-probabilities of chosen tokens from hidden states, without full logits.

Axes: T rows (tokens), d hidden width, M asked targets.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from octopus_trl.errors import ConfigError
from octopus_trl.shapes import Hidden, Logps, Rows


def token_logps(
    hidden: Hidden,
    *,
    head: Callable[[Tensor], Tensor],
    rows: Rows,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Logps:
    """Score targets with the hidden rows that predict them (README.md, Eq. 9).

    ``logps[m] = log softmax(head(hidden[rows[m]]) / temperature)[targets[m]]``. A row may be asked
    for several targets, as at a branch point. Logits live for one chunk at a time and are computed
    again in the backward pass.

    Args:
        hidden: [T, d] any dtype.
        head: maps [n, d] to logits [n, vocab]; its parameters get gradients.
        rows: [M] int64 into T.
        targets: [M] int64 token ids.
        temperature: above 0 and finite, divides the logits.
        chunk: targets scored at once; memory grows with chunk times vocab.

    Returns:
        [M] float32 natural logarithms (float64 for float64 logits); connected to `hidden` and
        `head` even when M is 0, so that an empty row still takes part in a backward pass.

    Raises:
        ConfigError: temperature or chunk is not positive, or not finite.
    """
    if not 0 < temperature < float("inf") or chunk < 1:
        raise ConfigError(
            f"temperature={temperature}, chunk={chunk}: both must be positive and finite; "
            "greedy decoding is temperature 0 of the sampler, its log-probabilities are those of "
            "temperature 1"
        )

    def score(part: Tensor, wanted: Tensor) -> Tensor:
        logits = head(part)
        logits = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
        scaled = logits if temperature == 1.0 else logits / temperature
        return -F.cross_entropy(scaled, wanted, reduction="none")

    selected = hidden[rows]  # indexed once: per chunk, the backward would fill [T, d] each time
    parts = zip(selected.split(chunk), targets.split(chunk), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([score(part, wanted) for part, wanted in parts])
    return torch.cat(
        [
            checkpoint(score, part, wanted, use_reentrant=False, preserve_rng_state=False)
            for part, wanted in parts
        ]
    )
