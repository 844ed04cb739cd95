"""Attention over an episode's DAG on CUDA: flash-attn 4 where it runs, else FlexAttention.

``OCTOPUS_ATTENTION=flash`` or ``flex`` holds every call to one of them; what is chosen and why is
said when a run starts.
"""

from __future__ import annotations

import torch

from octopus_trl.kernels import _flash, _flex
from octopus_trl.kernels._attention_choice import choose
from octopus_trl.maths import attention as maths
from octopus_trl.maths.dag import AttentionPlan
from octopus_trl.shapes import Keys, Queries, Values

_RUN = {"flash": _flash.dag_attention, "flex": _flex.dag_attention}


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
        q: [T, H, D]; k, v: [T, KV, D] of one dtype (float64 takes the reference). Rows beyond
            those of the plan are padding and give exact zeros.
        plan: what each row sees. Its block lists are kept while the same object comes again.
        scale: multiplies the scores.
        detach_mounts: no gradient from a reader into the keys and values that it mounts.

    Returns:
        [T, H, D] in the dtype of q.

    Raises:
        ConfigError: OCTOPUS_ATTENTION asks for kernels that cannot serve here.
    """
    if q.dtype == torch.float64 or plan.num_rows == 0:
        return maths.dag_attention(q, k=k, v=v, plan=plan, scale=scale, detach_mounts=detach_mounts)
    run = _RUN[choose(q.device, q.dtype, q.shape[-1]).name]
    return run(q, k=k, v=v, plan=plan, scale=scale, detach_mounts=detach_mounts)
