"""Gated delta rule over packed runs: one token at a time, or in chunks (README.md, Eq. 2 to 6).

Axes: T rows (tokens), R runs, HK key heads, HV value heads, K key dim, V value dim, L rows of a
chunk, N chunks. Heads are grouped: value head h reads key head ``h // (HV // HK)``.

What parity of the two forms rests on: everything in float32 (float64 for float64 inputs); q and k
divided by ``sqrt(sum of squares + 1e-6)``; q scaled by ``K ** -0.5``; an initial state always
given.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from octopus_trl.maths.chunks import Schedule, schedule

CHUNK = 32  # on a CPU the fastest of 16, 32 and 64 for heads of 64
EPS = 1e-6


def gated_delta_rule(
    q: Tensor,
    *,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    form: Literal["chunk", "recurrent"] = "chunk",
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule along every run, each from its own initial state.

    ``S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) k_t^T S_{t-1}))^T`` and
    ``o_t = S_t^T q_t K^{-1/2}`` with q and k of unit length (Eq. 2).

    Args:
        q, k: [T, HK, K] before normalisation.
        v: [T, HV, V].
        g: [T, HV] natural logarithm of the decay, at most 0.
        beta: [T, HV] write strength in [0, 1].
        initial_state: [R, HV, K, V]; zeros start a root.
        cu_seqlens: [R + 1] int64 run boundaries; an empty run returns its initial state, and rows
            past the last run belong to none: o is of no use there.
        form: "chunk" works on `CHUNK` rows at once, "recurrent" on one; results differ by rounding
            alone.

    Returns:
        o [T, HV, V] in the dtype of v, and the final states [R, HV, K, V] in float32 (float64 when
        v is float64). No value of one run enters the result of another.

    Source: transformers ``torch_chunk_gated_delta_rule`` and ``torch_recurrent_gated_delta_rule``.
    """
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    state = initial_state.to(dtype)
    if v.shape[0] == 0:
        return v, state
    lengths = cu_seqlens.diff().tolist()
    num_rows = sum(lengths)
    if num_rows < v.shape[0]:
        o, state = gated_delta_rule(
            q[:num_rows],
            k=k[:num_rows],
            v=v[:num_rows],
            g=g[:num_rows],
            beta=beta[:num_rows],
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            form=form,
        )
        return F.pad(o, (0, 0, 0, 0, 0, v.shape[0] - num_rows)), state
    unit_q = _unit(q.to(dtype)) * q.shape[-1] ** -0.5
    unit_k = _unit(k.to(dtype))
    scan = _chunk_scan if form == "chunk" else _recurrent_scan
    plan = schedule(lengths, CHUNK if form == "chunk" else 1, v.device)
    state = state.index_select(0, plan.runs)
    o, final = scan(plan, unit_q, unit_k, v.to(dtype), g.to(dtype), beta.to(dtype), state)
    return o.to(v.dtype), plan.restored(final)


def gated_delta_step(
    q: Tensor,
    *,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Advance every run by one token (Eq. 2).

    Args:
        q, k: [R, HK, K] before normalisation.
        v: [R, HV, V].
        g, beta: [R, HV] logarithm of the decay, and write strength.
        state: [R, HV, K, V].

    Returns:
        o [R, HV, V] in the dtype of v, and the new states [R, HV, K, V] in float32 (float64 when v
        is float64). Row r depends on row r alone, bit by bit, whatever R is.
    """
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    groups = v.shape[1] // q.shape[1]
    unit_q = (_unit(q.to(dtype)) * q.shape[-1] ** -0.5).repeat_interleave(groups, dim=1)
    unit_k = _unit(k.to(dtype)).repeat_interleave(groups, dim=1)
    o, new_state = _step(unit_q, unit_k, v.to(dtype), g.to(dtype), beta.to(dtype), state.to(dtype))
    return o.to(v.dtype), new_state


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS)


def _step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    # Sums instead of matrix products: a batched product may round differently with the batch.
    decayed = state * g.exp()[..., None, None]
    product = decayed * k[..., None]
    delta = ((v - product.sum(-2)) * beta[..., None])[..., None, :]
    if torch.is_grad_enabled():
        state = torch.addcmul(decayed, k[..., None], delta)
        return (state * q[..., None]).sum(-2), state
    # A decode step is bound by memory: its two large temporaries serve twice.
    state = decayed.addcmul_(k[..., None], delta)
    return torch.mul(state, q[..., None], out=product).sum(-2), state


def _recurrent_scan(
    plan: Schedule, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    groups = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(groups, dim=1), k.repeat_interleave(groups, dim=1)
    rows = torch.empty_like(plan.slots)
    rows[plan.slots] = torch.arange(len(rows), device=rows.device)
    steps = [x.index_select(0, rows).split(plan.sizes) for x in (q, k, v, g, beta)]
    outs, finished = [], []
    for index, size in enumerate(plan.sizes):
        if size < len(state):
            finished.append(state[size:])
            state = state[:size]
        q, k, v, g, beta = (step[index] for step in steps)
        o, state = _step(q, k, v, g, beta, state)
        outs.append(o)
    return torch.cat(outs).index_select(0, plan.slots), torch.cat([state, *finished[::-1]])


def _chunk_scan(
    plan: Schedule, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Eq. 3 to 6: all chunks at once, then a scan that carries the state from chunk to chunk."""
    groups = v.shape[1] // q.shape[1]

    def chunks(x: Tensor) -> Tensor:
        return plan.chunks(x, CHUNK)  # padded rows are zero and change nothing

    def grouped(x: Tensor) -> Tensor:
        """Split value heads [N, HV, ...] into [N, HK, G, ...], next to the key head they read."""
        return x.unflatten(1, (-1, groups))

    q, k = chunks(q).unsqueeze(2), chunks(k).unsqueeze(2)  # [N, HK, 1, L, K]
    v, g, beta = grouped(chunks(v)), grouped(chunks(g)), grouped(chunks(beta))
    decay = g.cumsum(-1)  # [N, HK, G, L], log of the decay since the chunk began
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~causal, float("-inf")).exp()
    beta = beta[..., None]
    # The rows of a chunk read one another: solve for what each really writes (Eq. 4).
    system = (k @ k.mT) * between * beta
    sides = torch.cat([v * beta, k * (beta * decay[..., None].exp())], dim=-1)
    # From the right and transposed: the layout that LAPACK reads without copies.
    solved = torch.linalg.solve_triangular(
        system.mT, sides.mT, upper=True, unitriangular=True, left=False
    ).mT
    writes, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    to_end = k * (decay[..., -1:] - decay)[..., None].exp()  # [N, HK, G, L, K]
    whole = decay[..., -1, None, None].exp()

    value_heads = (1, 2)
    steps = [x.flatten(*value_heads).split(plan.sizes) for x in (writes, reads, to_end.mT, whole)]
    befores, corrected, finished = [], [], []
    for index, size in enumerate(plan.sizes):
        write, read, key, shrink = (step[index] for step in steps)
        if size < len(state):
            finished.append(state[size:])
            state = state[:size]
        befores.append(state)
        new = write - read @ state
        corrected.append(new)
        state = state * shrink + key @ new
    before = grouped(torch.cat(befores))
    new_values = grouped(torch.cat(corrected))
    o = (q * decay[..., None].exp()) @ before + ((q @ k.mT) * between) @ new_values
    return plan.rows(o.flatten(*value_heads)), torch.cat([state, *finished[::-1]])
