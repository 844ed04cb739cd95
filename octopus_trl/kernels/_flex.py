"""Attention over an episode's DAG through FlexAttention, where flash-attn 4 does not run.

The block lists come straight from the plan's spans in NumPy; asking FlexAttention to find
them would evaluate the mask over rows squared. The mask function reads device tensors, so that
packs of the same padded sizes share one compiled kernel.

Axes: T rows, H query heads, KV key/value heads, D head dim.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from octopus_trl.kernels._block_mask import block_mask, padded_rows
from octopus_trl.maths.dag import AttentionPlan
from octopus_trl.shapes import Keys, Queries, Values

_MAX_COMPILED = 64  # sizes met in one process; beyond, compiling again is an error, never eager
_KEPT_MASKS = 4  # plans of the pass at hand: with and without mounts, live and detached


def dag_attention(
    q: Queries,
    *,
    k: Keys,
    v: Values,
    plan: AttentionPlan,
    scale: float,
    detach_mounts: bool = False,
) -> Queries:
    """Attend over the DAG of a packed row, as ``maths.attention.dag_attention``.

    Args:
        q: [T, H, D]; k, v: [T, KV, D] of one dtype. Rows beyond those of the plan are padding and
            give exact zeros.
        plan: what each row sees. Its block lists are kept while the same object comes again.
        scale: multiplies the scores.
        detach_mounts: mounted keys and values are read from a detached copy.

    Returns:
        [T, H, D] in the dtype of q.

    Cost: compiles once for each padded size; sizes are padded in steps of at most a half, and
    blocks of padding are never computed.
    """
    rows, padded = plan.num_rows, padded_rows(plan.num_rows)
    apart = detach_mounts and any(len(group.mounted_spans) for group in plan.groups)
    mask = _masks.get(plan, q.device, apart)
    queries, keys, values = (
        F.pad(x[:rows], (0, 0, 0, 0, 0, padded - rows)).transpose(0, 1)[None] for x in (q, k, v)
    )
    if apart:
        keys, values = (torch.cat([x, x.detach()], dim=2) for x in (keys, values))
    attend = _attend(q.device.type)
    out = attend(
        queries, keys, values, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return F.pad(out[0].transpose(0, 1)[:rows], (0, 0, 0, 0, 0, q.shape[0] - rows))


class _Masks:
    """Block masks of the last few plans, by object: layers of one pass share a plan."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, str, bool], tuple[AttentionPlan, BlockMask]] = (
            OrderedDict()
        )

    def get(self, plan: AttentionPlan, device: torch.device, apart: bool) -> BlockMask:
        # The plan is kept beside its mask, so that its id cannot be reused while the entry lives.
        key = (id(plan), str(device), apart)
        if key not in self._kept:
            self._kept[key] = (plan, block_mask(plan, device=device, apart=apart))
            if len(self._kept) > _KEPT_MASKS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key][1]


_masks = _Masks()


@functools.cache
def _attend(device: str) -> Callable[..., Any]:
    if device != "cuda":  # forward only, for tests of the masks
        return flex_attention
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, _MAX_COMPILED)
    # Static sizes: gradients with dynamic shapes and captured tensors were wrong (pytorch#186775).
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)
