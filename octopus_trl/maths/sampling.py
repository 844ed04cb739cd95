"""Drawing tokens: temperature, top-k, top-p, min-p, by the inverse of the cumulative distribution.

Axes: R rows (cursors that draw a token), V vocabulary. A row's draw depends on its own logits,
settings and uniform number alone, so that it is the same whatever shares the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octopus_trl.shapes import Logps

_WORD = (1 << 64) - 1


def uniform(seed: int, index: int) -> float:
    """Give the uniform number of one draw, without any state.

    Two rounds of splitmix64 over (seed, index); the top 53 bits of the result.

    Args:
        seed: any integer, taken modulo 2**64; names a stream.
        index: number of the draw within the stream, at least 0.

    Returns:
        A float in [0, 1), a multiple of 2**-53.

    >>> uniform(7, 0) == uniform(7, 0), uniform(7, 0) == uniform(7, 1)
    (True, False)
    """
    return (_splitmix(_splitmix(seed & _WORD) ^ (index & _WORD)) >> 11) * 2.0**-53


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
    """Draw one token a row (README.md, Eq. 10).

    Tokens are ranked by falling logit (ties by id). Kept are the first ``top_k``, of those the
    shortest prefix whose probability reaches ``top_p`` of what top-k kept, and of those the ones
    with at least ``min_p`` times the highest probability; the best token always stays. The draw
    inverts the cumulative distribution of the kept tokens, in order of id and in float64.

    Args:
        logits: [R, V], taken to float32 where they are narrower.
        temperature: [R], at least 0; 0 takes the best token.
        top_p: [R] in (0, 1], 1 keeps all.
        top_k: [R] int64, 0 keeps all.
        min_p: [R] in [0, 1), 0 keeps all.
        uniform: [R] float64 in [0, 1).
        filtered: False promises that no row uses top-k, top-p or min-p, True allows it; None looks,
            which waits for the device once and saves sorting the vocabulary where no row filters.

    Returns:
        tokens [R] int64, and their log-probabilities [R] float32 under the temperature-scaled
        distribution before top-k, top-p and min-p, which is what training scores (temperature 1
        where the temperature is 0). A row without a finite log-probability of its token (logits
        that are not finite) gets NaN.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    greedy = temperature == 0
    scale = torch.where(greedy, 1, temperature).to(logits.dtype)[:, None]
    scaled = logits / scale
    probs = scaled.double().softmax(-1)
    if filtered is None:
        filtered = bool(((top_p < 1) | (top_k > 0) | (min_p > 0)).any())
    if filtered:
        probs = probs.masked_fill(~_kept(scaled, probs, top_p, top_k, min_p), 0)
    cumulative = probs.cumsum(-1)
    target = uniform.double()[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    # Rounding of the last sum must not reach past the last token that can be drawn.
    drawn = torch.minimum(drawn, torch.where(probs > 0, ids, 0).amax(-1, keepdim=True))
    token = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), drawn)
    return token.squeeze(-1), scaled.log_softmax(-1).gather(-1, token).squeeze(-1)


def _kept(scaled: Tensor, probs: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Mark the tokens [R, V] that top-k, top-p and min-p leave."""
    tokens = scaled.sort(dim=-1, descending=True, stable=True).indices
    ranked = probs.gather(-1, tokens)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    keep = (rank < top_k[:, None]) | (top_k <= 0)[:, None]
    ranked = ranked.masked_fill(~keep, 0)
    before = ranked.cumsum(-1) - ranked
    keep &= (before < top_p.double()[:, None] * ranked.sum(-1, keepdim=True)) | (top_p >= 1)[
        :, None
    ]
    keep &= ranked >= min_p.double()[:, None] * ranked[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter(-1, tokens, keep)


def _splitmix(state: int) -> int:
    """One step of splitmix64 (Steele, Lea and Flood 2014): advance by the golden ratio, and mix."""
    mixed = (state + 0x9E3779B97F4A7C15) & _WORD
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
    return mixed ^ (mixed >> 31)
