"""Between the projections and the attention of a layer: q/k norm, rotation, write to the pool.

Axes: R rows, H query heads, KV key/value heads, D head dim, E rotated dims (the first E of a head),
N positions of a table, P pages, S slots a page.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octopus_trl.maths.norms import rms_norm
from octopus_trl.maths.paging import write_slots


def rotary_tables(
    num_positions: int, *, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Tabulate the cosines and sines of every position, one column a frequency.

    Args:
        num_positions: N, the first position that has no row.
        inv_freq: [E / 2] radians a position.
        scaling: multiplies both, a property of the rope type (1 for the default).
        dtype: of the model; angles are computed in float32 and rounded last.

    Returns:
        cos and sin, [N, E / 2]. A text position turns every section of a multi-section rotation by
        the same angle, so sections do not appear.

    Source: transformers ``Qwen3_5TextRotaryEmbedding`` and ``Qwen3RotaryEmbedding``.
    """
    positions = torch.arange(num_positions, device=inv_freq.device)
    angles = positions[:, None].float() * inv_freq.float()
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def rotate_and_write(
    qkv: Tensor,
    *,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    zero_centered: bool,
    gated: bool,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Norm and rotate queries and keys, and write keys and values to their slots.

    With the first E dims of a normed head as two halves (a, b):
    ``(a cos - b sin, b cos + a sin)``; the other dims pass (README.md, Eq. 15).

    Args:
        qkv: [R, H * D * (2 if gated else 1) + 2 * KV * D], the outputs of q_proj, k_proj and
            v_proj side by side; a gated q_proj gives [query, gate] for each head.
        q_weight, k_weight: [D] of the head norms, in the form of `norms.rms_norm`.
        eps, zero_centered: of the head norms.
        gated: whether q_proj carries gates.
        cos, sin: [N, E / 2] tables over positions in the dtype of qkv.
        positions: [R] integers below N.
        keys, values: [P, S, KV, D] pools, written in place.
        slots: [R] integers, flat slot of each row, distinct; a negative one writes nothing.

    Returns:
        Queries [R, H, D] in the dtype of qkv, and the gates [R, H, D] before their activation, a
        view of qkv (None where there are none).

    Source: transformers ``Qwen3_5Attention`` and ``apply_rotary_pos_emb``.
    """
    kv_heads, dim = keys.shape[2:]
    heads_and_gates = (qkv.shape[1] - 2 * kv_heads * dim) // dim
    heads = heads_and_gates // (2 if gated else 1)
    q, k, v = qkv.split([heads_and_gates * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    q, gate = q.unflatten(-1, (heads, -1)), None
    if gated:
        q, gate = q[..., :dim], q[..., dim:]
    at = positions.long()
    angles = cos[at, None], sin[at, None]
    q, _ = rms_norm(q, weight=q_weight, eps=eps, zero_centered=zero_centered)
    k = k.unflatten(-1, (kv_heads, dim))
    k, _ = rms_norm(k, weight=k_weight, eps=eps, zero_centered=zero_centered)
    q, k = _rotate(q, *angles), _rotate(k, *angles)
    live = (slots >= 0).nonzero()[:, 0]
    to = slots.long()[live]
    write_slots(keys, values=k[live], slots=to)
    write_slots(values, values=v.unflatten(-1, (kv_heads, dim))[live], slots=to)
    return q, gate


def shift_positions(k: Tensor, *, by: Tensor, inv_freq: Tensor) -> Tensor:
    """Move rotated keys to other positions.

    Rotations add up, ``R(p + d) = R(d) R(p)``, so a key needs to know how far it moves and not
    where it is; a constant that scales the tables stays as it was.

    Args:
        k: [R, KV, D], rotated; the first E dims turn as two halves.
        by: [R] integers d, positions to add, negative ones too.
        inv_freq: [E / 2] radians a position.

    Returns:
        [R, KV, D] in the dtype of k; angles in float64, products in float32 (float64 for float64).
        Differentiable in k.
    """
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    angles = by[:, None].double() * inv_freq.double()
    cos, sin = (table.to(wide)[:, None] for table in (angles.cos(), angles.sin()))
    return _rotate(k.to(wide), cos, sin).to(k.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first E dims of [R, heads, D] by tables [R, 1, E / 2]."""
    a, b, rest = x.split([cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    # b is negated before the product, as transformers does: the same bits.
    return torch.cat([a * cos + -b * sin, b * cos + a * sin, rest], dim=-1)
