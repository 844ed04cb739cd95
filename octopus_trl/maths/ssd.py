"""State space duality (Mamba-2) over packed runs: one token at a time, or in chunks.

Axes: T rows (tokens), R runs, H heads, G groups, P head dim, S state dim, L rows of a chunk, N
chunks. Head h reads group ``h // (H // G)``.

What parity of the two forms rests on: everything in float32 (float64 for float64 inputs); an
initial state always given.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from octopus_trl.maths.chunks import Schedule, schedule

CHUNK = 64


def ssd(
    x: Tensor,
    *,
    dt: Tensor,
    rate: Tensor,
    keys: Tensor,
    queries: Tensor,
    skip: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    form: Literal["chunk", "recurrent"] = "chunk",
) -> tuple[Tensor, Tensor]:
    """Run the selective state space along every run, each from its own initial state.

    ``S_t = exp(dt_t a) S_{t-1} + dt_t x_t b_t^T`` and ``y_t = S_t c_t + d x_t`` for each head.

    Args:
        x: [T, H, P] inputs after the convolution.
        dt: [T, H] time step, positive.
        rate: [H] a, negative.
        keys, queries: [T, G, S], b and c of each row (the papers' B and C).
        skip: [H] d.
        initial_state: [R, H, P, S]; zeros start a root.
        cu_seqlens: [R + 1] int64 run boundaries; an empty run returns its initial state.
        form: "chunk" works on `CHUNK` rows at once, "recurrent" on one; results differ by rounding
            alone.

    Returns:
        y [T, H, P] and the final states [R, H, P, S], both in float32 (float64 when x is float64).
        No value of one run enters the result of another.

    Source: Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060), Eq. 2 and section 6;
        transformers ``mamba2_chunk_scan`` and ``mamba2_selective_state_update``.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    state = initial_state.to(dtype)
    if x.shape[0] == 0:
        return x.to(dtype), state
    x, dt, keys, queries = (part.to(dtype) for part in (x, dt, keys, queries))
    scan = _chunk_scan if form == "chunk" else _recurrent_scan
    plan = schedule(cu_seqlens.diff().tolist(), CHUNK if form == "chunk" else 1, x.device)
    written, decay = x * dt[..., None], dt * rate.to(dtype)
    y, final = scan(plan, written, decay, keys, queries, state.index_select(0, plan.runs))
    return torch.addcmul(y, x, skip.to(dtype)[:, None]), plan.restored(final)


def ssd_step(
    x: Tensor,
    *,
    dt: Tensor,
    rate: Tensor,
    keys: Tensor,
    queries: Tensor,
    skip: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Advance every run by one token (see `ssd`).

    Args:
        x: [R, H, P]; dt: [R, H]; rate, skip: [H]; keys, queries: [R, G, S]; state: [R, H, P, S].

    Returns:
        y [R, H, P] and the new states [R, H, P, S] in float32 (float64 when x is float64). Row r
        depends on row r alone, bit by bit, whatever R is.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    x, dt, keys, queries = (part.to(dtype) for part in (x, dt, keys, queries))
    y, state = _step(x * dt[..., None], dt * rate.to(dtype), keys, queries, state.to(dtype))
    return torch.addcmul(y, x, skip.to(dtype)[:, None]), state


def _step(
    written: Tensor, decay: Tensor, keys: Tensor, queries: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    # Sums instead of matrix products: a batched product may round differently with the batch.
    heads = written.shape[1] // keys.shape[1]
    keys, queries = (part.repeat_interleave(heads, dim=1)[..., None, :] for part in (keys, queries))
    state = torch.addcmul(state * decay.exp()[..., None, None], written[..., None], keys)
    return (state * queries).sum(-1), state


def _recurrent_scan(
    plan: Schedule, written: Tensor, decay: Tensor, keys: Tensor, queries: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    rows = torch.empty_like(plan.slots)
    rows[plan.slots] = torch.arange(len(rows), device=rows.device)
    parts = (written, decay, keys, queries)
    steps = [part.index_select(0, rows).split(plan.sizes) for part in parts]
    outs, finished = [], []
    for size, write, fade, key, query in zip(plan.sizes, *steps, strict=True):
        if size < len(state):
            finished.append(state[size:])
            state = state[:size]
        y, state = _step(write, fade, key, query, state)
        outs.append(y)
    return torch.cat(outs).index_select(0, plan.slots), torch.cat([state, *finished[::-1]])


def _chunk_scan(
    plan: Schedule, written: Tensor, decay: Tensor, keys: Tensor, queries: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """All chunks at once, then a scan that carries the state from chunk to chunk."""
    groups = keys.shape[1]

    def grouped(part: Tensor) -> Tensor:
        """Split heads [N, H, ...] into [N, G, H / G, ...], next to the group that they read."""
        return part.unflatten(1, (groups, -1))

    x, decay = (grouped(plan.chunks(part, CHUNK)) for part in (written, decay))
    b, c = (plan.chunks(part, CHUNK).unsqueeze(2) for part in (keys, queries))  # [N, G, 1, L, S]
    sums = decay.cumsum(-1)  # [N, G, H / G, L], log of the decay since the chunk began
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).tril()
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(~causal, float("-inf")).exp()
    within = ((c @ b.mT) * between) @ x
    to_end = (sums[..., -1:] - sums).exp()[..., None]
    added = ((x * to_end).mT @ b).flatten(1, 2)  # [N, H, P, S]
    whole = sums[..., -1, None, None].exp().flatten(1, 2)

    befores, finished = [], []
    for size, new, shrink in zip(
        plan.sizes, added.split(plan.sizes), whole.split(plan.sizes), strict=True
    ):
        if size < len(state):
            finished.append(state[size:])
            state = state[:size]
        befores.append(state)
        state = torch.addcmul(new, state, shrink)
    before = grouped(torch.cat(befores))
    y = within + (c * sums.exp()[..., None]) @ before.mT
    return plan.rows(y.flatten(1, 2)), torch.cat([state, *finished[::-1]])
