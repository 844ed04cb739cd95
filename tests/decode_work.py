"""Random readers of random text in paged pools, and what attention over it must give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from octopus_trl.engine.pages import Slots
from octopus_trl.engine.slot_table import SlotTable
from octopus_trl.engine.work_layout import WorkLayout
from octopus_trl.engine.worklist import Run, WorkList, WorkLists
from octopus_trl.maths.decode_attention import AttentionWork


class Places:
    """Hands out slots in stretches that begin and end anywhere inside pages, each slot once."""

    def __init__(self, rng: np.random.Generator, num_slots: int, longest: int = 37) -> None:
        cuts = np.sort(rng.choice(np.arange(1, num_slots), num_slots // longest * 2, replace=False))
        parts = np.split(np.arange(num_slots), cuts)
        rng.shuffle(parts)
        self._slots = np.concatenate(parts)

    def take(self, count: int) -> Slots:
        assert count <= len(self._slots), "the test asks for more slots than there are"
        taken, self._slots = self._slots[:count], self._slots[count:]
        return taken.copy()


def random_runs(
    rng: np.random.Generator,
    places: Places,
    *,
    num_nodes: int,
    num_rows: Sequence[int],
    lengths: Sequence[int] = (1, 2, 63, 64, 65, 130),
) -> list[Run]:
    """Grow a random forest and give each run a chain of it, some mounts and an own text.

    Args:
        num_rows: rows of each run; a run of one row may have no own text yet.
    """
    spans = [places.take(int(rng.choice(lengths))) for _ in range(num_nodes)]
    parents = [int(rng.integers(-1, node)) if node else -1 for node in range(num_nodes)]
    runs = []
    for number, rows in enumerate(num_rows):
        chain: list[int] = []
        node = int(rng.integers(-1, num_nodes))
        while node >= 0:
            chain.insert(0, node)
            node = parents[node]
        others = [node for node in range(num_nodes) if node not in chain]
        mounted = rng.permutation(others)[: rng.integers(0, 4)].tolist()
        own = places.take(int(rng.choice([0, 1, 5, 70])) if rows == 1 else rows + 3)
        runs.append(
            Run(number, [spans[node] for node in chain], own, rows, [spans[n] for n in mounted])
        )
    return runs


def seen_by(run: Run, row: int, *, mounts: bool = True) -> Slots:
    """List the slots that a row of a run sees."""
    own = run.own[: max(0, len(run.own) - run.num_rows + 1 + row)]
    parts = [*run.spans, *(run.mounted if mounts else ()), own]
    return np.concatenate(parts).astype(np.int64)


def all_seen(runs: Sequence[Run], *, mounts: bool = True) -> list[Slots]:
    """List the slots that each row of a pass sees."""
    return [seen_by(run, row, mounts=mounts) for run in runs for row in range(run.num_rows)]


def planned(runs: Sequence[Run], layout: WorkLayout, **settings: int) -> WorkLists:
    """Plan one list for some runs."""
    settings = {"readers_per_tile": 8, "num_kv_heads": 2, "num_programs": 4, **settings}
    lists = WorkLists([WorkList(layout, SlotTable(1 << 16), **settings)])  # type: ignore[arg-type]
    lists.plan(runs)
    return lists


def on_device(lists: WorkLists, device: torch.device | str, number: int = 0) -> AttentionWork:
    """Copy one list's work to a device, as it stands."""
    one = lists.lists[number]
    views = one.layout.views(torch.tensor(one.packed, device=device))
    views.pop("appends")
    return AttentionWork(
        **views,
        slots=torch.tensor(lists.table.mirror, device=device),
        queue=torch.zeros(1, dtype=torch.int32, device=device),
    )


def poisoned_pools(
    seen: Sequence[Slots], shape: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Fill the slots that somebody sees at random, and all others with NaN."""
    used = torch.from_numpy(np.unique(np.concatenate([*seen, np.empty(0, np.int64)])))
    pools = []
    for _ in range(2):
        pool = torch.full(shape, float("nan"), dtype=dtype)
        drawn = torch.randn(len(used), *shape[2:], dtype=torch.float64)
        pool.view(-1, *shape[2:])[used] = drawn.to(dtype)
        pools.append(pool)
    return pools[0], pools[1]


def brute_force(
    q: Tensor, keys: Tensor, values: Tensor, seen: Sequence[Slots], scale: float
) -> Tensor:
    """Attend row by row in float64, on the device of q, to exactly the slots that each row sees."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    num_kv = keys.shape[2]
    for row, slots in enumerate(seen):
        if not len(slots):
            continue
        index = torch.from_numpy(slots).to(q.device)
        k, v = (pool.flatten(0, 1)[index].double() for pool in (keys, values))  # [L, KV, D]
        query = q[row].double().unflatten(0, (num_kv, -1))  # [KV, G, D]
        weights = (torch.einsum("hgd,lhd->hgl", query, k) * scale).softmax(-1)
        out[row] = torch.einsum("hgl,lhd->hgd", weights, v).flatten(0, 1)
    return out


def with_own(run: Run, own: Slots) -> Run:
    """Give a run other own text."""
    return replace(run, own=own)
