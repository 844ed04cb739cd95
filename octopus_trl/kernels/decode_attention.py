"""Attention of a step's rows over shared paged keys and values on CUDA, in Triton.

Two launches whatever the work is: a persistent grid that takes items from a queue on the device,
and a merge of the rows' partial results. Counts live on the device, so a captured graph serves
while they change.

Axes: R rows, H query heads, KV key/value heads, D head dim, P pages, S slots a page.
"""

from __future__ import annotations

from torch import Tensor

from octopus_trl.errors import ConfigError
from octopus_trl.kernels._decode_items import attend, write_entries
from octopus_trl.kernels._decode_tuning import Tuning
from octopus_trl.kernels._triton import triton
from octopus_trl.maths.decode_attention import AttentionWork
from octopus_trl.shapes import Queries

_APPEND_BLOCK = 128


def dag_decode_attention(
    q: Queries, *, keys: Tensor, values: Tensor, work: AttentionWork, scale: float
) -> Queries:
    """Attend from every row to what the work lets it see, as ``maths`` does.

    Args:
        q: [R, H, D], heads and columns contiguous, D at most 256.
        keys, values: [P, S, KV, D] pools in the dtype of q, contiguous.
        work: on the device of q, with room for N rows. An item has at most
            ``Tuning.of(D, N).readers_per_tile(H / KV)`` readers. Calls that share a queue run one
            after another.
        scale: multiplies the scores; above 0.

    Returns:
        [R, H, D] contiguous, in the dtype of q; products in that dtype, sums and merge in float32.

    Raises:
        ConfigError: a head dim, head count, dtype or layout that the kernel does not serve.
    """
    heads, dim = q.shape[1:]
    num_kv = keys.shape[2]
    tuning = Tuning.of(dim, len(work.bounds) - 1)
    if heads % num_kv:
        raise ConfigError(f"{heads} query heads over {num_kv} KV heads: must be a multiple")
    tuning.readers_per_tile(heads // num_kv)
    if not q.dtype == keys.dtype == values.dtype:
        raise ConfigError(
            f"q, keys and values are {q.dtype}, {keys.dtype} and {values.dtype}; must be one dtype"
        )
    if keys.shape != values.shape or keys.shape[3] != dim:
        raise ConfigError(
            f"keys {list(keys.shape)} and values {list(values.shape)} must both be "
            f"[pages, page_size, kv_heads, {dim}]"
        )
    if not (keys.is_contiguous() and values.is_contiguous() and q[0:1].is_contiguous()):
        raise ConfigError("keys, values and each row of q must be contiguous")
    return attend(q, keys, values, work, scale, tuning)


def append_slots(slots: Tensor, *, appends: Tensor) -> None:
    """Write entries of a slot table in place, as the function of this name in ``maths``.

    Args:
        slots: [capacity] int32.
        appends: [n, 2] int32 contiguous: place in the table, and slot.
    """
    count = len(appends)
    write_entries[(triton.cdiv(count, _APPEND_BLOCK),)](slots, appends, count, BLOCK=_APPEND_BLOCK)


__all__ = ["AttentionWork", "Tuning", "append_slots", "dag_decode_attention"]
