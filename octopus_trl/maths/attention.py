"""Attention under an explicit mask, its merge by log-sum-exp, and attention over an episode's DAG.

Axes: T rows (tokens), H query heads, KV key/value heads, D head dim, L keys that a group sees,
G query heads a key head serves: query head h reads key head ``h // G``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from octopus_trl.maths.dag import AttentionPlan, QueryGroup
from octopus_trl.shapes import Keys, LogSumExp, Queries, Values

_INF = float("inf")


def masked_attention(
    q: Queries, *, k: Keys, v: Values, mask: Tensor, scale: float
) -> tuple[Queries, LogSumExp]:
    """Attend from every query to the keys that its row of the mask allows (README.md, Eq. 7).

    Args:
        q: [Tq, H, D]; k, v: [Tk, KV, D] with KV dividing H.
        mask: [Tq, Tk] bool, true where the query sees the key.
        scale: multiplies the scores.

    Returns:
        out [Tq, H, D] in the dtype of q, and the log-sum-exp of the scores [Tq, H] in float32
        (float64 for float64 inputs). A query that sees nothing gives 0 and -inf. A key or value
        that is not finite makes the queries that see it NaN and touches no other.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_queries, num_kv = q.shape[0], k.shape[1]
    # 0 * NaN is NaN, so a masked row must be finite before the products; its readers are marked.
    finite = (k.isfinite() & v.isfinite()).all(-1)  # [Tk, KV]
    keys = torch.where(finite[..., None], k, 0).to(dtype).permute(1, 2, 0)  # [KV, D, Tk]
    values = torch.where(finite[..., None], v, 0).to(dtype).transpose(0, 1)
    poisoned = (mask.to(dtype) @ (~finite).to(dtype)) > 0  # [Tq, KV]

    queries = q.to(dtype).unflatten(1, (num_kv, -1)).permute(1, 2, 0, 3)  # [KV, G, Tq, D]
    scores = (queries @ keys[:, None] * scale).masked_fill(~mask, -_INF)
    top = scores.detach().amax(-1, keepdim=True) if mask.shape[1] else scores.new_zeros(1)
    top = torch.where(top == -_INF, 0, top)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    safe = torch.where(empty, 1, total)
    out = weights @ values[:, None] / safe
    lse = torch.where(empty, -_INF, top + safe.log())

    broken = poisoned.t()[:, None, :, None]  # [KV, 1, Tq, 1]
    out, lse = (torch.where(broken, float("nan"), x) for x in (out, lse))
    out = out.permute(2, 0, 1, 3).reshape(num_queries, -1, v.shape[-1])
    return out.to(q.dtype), lse.squeeze(-1).permute(2, 0, 1).reshape(num_queries, -1)


def merge_attention(outs: list[Tensor], *, lses: list[Tensor]) -> tuple[Queries, LogSumExp]:
    """Combine attention over disjoint sets of keys into attention over their union.

    ``out = sum_i exp(lse_i - lse) out_i`` with ``lse = log sum_i exp(lse_i)`` (README.md, Eq. 8).

    Args:
        outs: partial outputs, each [T, H, D].
        lses: their log-sum-exps, each [T, H]; -inf where a part sees nothing.

    Returns:
        out [T, H, D] in the dtype of the parts and lse [T, H]; 0 and -inf where no part sees
        anything.
    """
    stacked = torch.stack(lses)
    top = stacked.detach().amax(0)
    top = torch.where(top == -_INF, 0, top)
    weights = (stacked - top).exp()
    total = weights.sum(0)
    empty = total == 0
    safe = torch.where(empty, 1, total)
    parts = torch.where(stacked[..., None] == -_INF, 0, torch.stack(outs).to(stacked.dtype))
    out = (parts * (weights / safe)[..., None]).sum(0)
    return out.to(outs[0].dtype), torch.where(empty, -_INF, top + safe.log())


def dag_attention(
    q: Queries,
    *,
    k: Keys,
    v: Values,
    plan: AttentionPlan,
    scale: float,
    detach_mounts: bool = False,
) -> Queries:
    """Attend over the DAG of a packed row: ancestors, mounts, and the causal part of the own run.

    Memory grows with rows, not with rows squared: one query group at a time gathers the keys it
    sees, and the backward pass gathers them again.

    Args:
        q: [T, H, D]; k, v: [T, KV, D] with KV dividing H, rotated already.
        plan: what each row sees; rows outside its groups (padding) give exact zeros.
        scale: multiplies the scores.
        detach_mounts: no gradient from a reader into the keys and values that it mounts.

    Returns:
        [T, H, D] in the dtype of q. Rows that a group does not see are never read.
    """
    return _DagAttention.apply(q, k, v, plan, scale, detach_mounts)


class _DagAttention(torch.autograd.Function):
    """Each group attends to its own rows causally and to the rest fully; Eq. 8 joins the two.

    The backward pass needs no join: with the joint log-sum-exp the weights of either part are
    ``exp(score - lse)`` already.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: AttentionPlan,
        scale: float,
        detach_mounts: bool,
    ) -> Tensor:
        num_kv = k.shape[1]
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = torch.zeros(*q.shape[:2], 1, dtype=wide, device=q.device)
        for group in plan.groups:
            own = slice(group.lo, group.hi)
            queries = _by_head(q[own], num_kv)
            part, part_lse = _attend(
                queries, _keys(k[own], queries), _keys(v[own], queries), True, scale
            )
            rest = _others(group)
            if len(rest):
                keys, values = (_keys(_take(x, rest), queries) for x in (k, v))
                other, other_lse = _attend(queries, keys, values, False, scale)
                joint = torch.logaddexp(part_lse, other_lse)
                part = part * (part_lse - joint).exp()[..., None].to(part.dtype)
                part += other * (other_lse - joint).exp()[..., None].to(part.dtype)
                part_lse = joint
            _by_head(out[own], num_kv).copy_(part)
            _by_head(lse[own], num_kv).copy_(part_lse[..., None])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale, ctx.detach_mounts = plan, scale, detach_mounts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        num_kv = k.shape[1]
        # Sums over readers in float32: a long shared prefix has very many of them.
        wide = lse.dtype
        grad_q = torch.zeros_like(q, memory_format=torch.contiguous_format)
        grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for group in ctx.plan.groups:
            own = slice(group.lo, group.hi)
            queries = _by_head(q[own], num_kv)
            given, made = _by_head(grad_out[own], num_kv), _by_head(out[own], num_kv)
            joint = _by_head(lse[own], num_kv).squeeze(-1).contiguous()
            keys, values = _keys(k[own], queries), _keys(v[own], queries)
            to_q, to_k, to_v = _attend_backward(
                queries, keys, values, given, made, joint, True, ctx.scale
            )
            grad_k[own] += to_k.sum(0).transpose(0, 1)
            grad_v[own] += to_v.sum(0).transpose(0, 1)
            rest = _others(group)
            if len(rest):
                keys, values = (_keys(_take(x, rest), queries) for x in (k, v))
                more, to_k, to_v = _attend_backward(
                    queries, keys, values, given, made, joint, False, ctx.scale
                )
                to_q = to_q + more
                live = group.seen if ctx.detach_mounts else rest
                _give(grad_k, live, to_k)
                _give(grad_v, live, to_v)
            _by_head(grad_q[own], num_kv).copy_(to_q)
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def _others(group: QueryGroup) -> npt.NDArray[np.int64]:
    """Rows outside the group that all of it sees, ancestors first."""
    if len(group.mounted) == 0:
        return group.seen
    return np.concatenate([group.seen, group.mounted])


def _is_range(rows: npt.NDArray[np.int64]) -> bool:
    return bool(np.all(np.diff(rows) == 1))


def _take(x: Tensor, rows: npt.NDArray[np.int64]) -> Tensor:
    """Read rows, without a copy where they are consecutive."""
    if _is_range(rows):
        return x[int(rows[0]) : int(rows[-1]) + 1]
    return x.index_select(0, torch.from_numpy(rows).to(x.device))


def _give(total: Tensor, rows: npt.NDArray[np.int64], grad: Tensor) -> None:
    """Add [G, KV, L, D] gradients of the first len(rows) keys to rows of total [T, KV, D]."""
    if len(rows) == 0:
        return
    summed = grad[:, :, : len(rows)].sum(0).transpose(0, 1).to(total.dtype)
    if _is_range(rows):
        total[int(rows[0]) : int(rows[-1]) + 1] += summed
    else:
        total.index_add_(0, torch.from_numpy(rows).to(total.device), summed)


def _by_head(x: Tensor, num_kv: int) -> Tensor:
    """View [n, H, D] as [G, KV, n, D]."""
    return x.unflatten(1, (num_kv, -1)).permute(2, 1, 0, 3)


def _keys(x: Tensor, queries: Tensor) -> Tensor:
    """View [L, KV, D] as [G, KV, L, D], the same keys for every query head of a group."""
    return x.transpose(0, 1).expand(len(queries), -1, -1, -1)


def _has_fused_kernel(q: Tensor) -> bool:
    return q.device.type == "cpu"


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attend in [G, KV, n, D] to [G, KV, L, D]; return out and log-sum-exp [G, KV, n]."""
    if _has_fused_kernel(q):
        # F.scaled_dot_product_attention's own CPU kernel, called where its log-sum-exp is kept.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ v.to(scores.dtype)).to(q.dtype), lse


def _attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of `_attend`, for a log-sum-exp that may cover more keys than k."""
    if _has_fused_kernel(q):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    wide = lse.dtype
    grad_out, out, q_wide = grad_out.to(wide), out.to(wide), q.to(wide)
    weights = (_scores(q, k, causal, scale) - lse[..., None]).exp()
    grad_weights = grad_out @ v.to(wide).mT - (grad_out * out).sum(-1, keepdim=True)
    grad_scores = weights * grad_weights * scale
    grads = grad_scores @ k.to(wide), grad_scores.mT @ q_wide, weights.mT @ grad_out
    return grads[0].to(q.dtype), grads[1], grads[2]


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = q.to(wide) @ k.to(wide).mT * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -_INF)
    return scores
