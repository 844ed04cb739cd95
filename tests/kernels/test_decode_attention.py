"""The decode attention kernel equals loops in float64 over what each row sees.

On a CPU it runs in Triton's interpreter, on small shapes; `gpu` tests run it compiled.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octopus_trl.engine.pages import Slots
from octopus_trl.engine.work_layout import WorkLayout
from octopus_trl.engine.worklist import Run
from octopus_trl.errors import ConfigError
from octopus_trl.maths import decode_attention as maths
from tests.decode_work import (
    Places,
    all_seen,
    brute_force,
    on_device,
    planned,
    poisoned_pools,
    random_runs,
    with_own,
)
from tests.kernels.interpreter import mend_loop_bounds

pytest.importorskip("triton", reason="needs Triton: pip install 'triton>=3.6,<3.8'")
from octopus_trl.kernels import decode_attention as kernels
from octopus_trl.kernels._decode_items import attend

mend_loop_bounds()
PAGES, PAGE = 60, 16  # an odd number of tokens a node crosses pages of 16 anywhere
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


def check(
    runs: list[Run],
    device: torch.device,
    *,
    heads: int,
    num_kv: int,
    dim: int,
    dtype: torch.dtype,
    pages: int = PAGES,
    **settings: int,
) -> None:
    """Compare the kernel with loops; slots that nobody sees hold NaN."""
    seen = all_seen(runs)
    rows = len(seen)
    pools = poisoned_pools(seen, (pages, PAGE, num_kv, dim), dtype)
    q = torch.randn(rows + 1, heads, dim, dtype=torch.float64).to(dtype)
    tuning = kernels.Tuning.of(dim, rows + 1)
    settings.setdefault("readers_per_tile", tuning.readers_per_tile(heads // num_kv))
    lists = planned(runs, WorkLayout(rows + 1), **settings)
    work = on_device(lists, device)
    q, pools = q.to(device), (pools[0].to(device), pools[1].to(device))
    out = attend(q, *pools, work, dim**-0.5, tuning)
    wanted = brute_force(q, *pools, seen, dim**-0.5)
    assert out.dtype == dtype
    error = (out.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)
    assert error < TOLERANCE[dtype]
    assert not out[rows].any(), "a row without work is exactly 0"
    assert not work.queue.any(), "the queue is ready for the next call"


def run(q: Tensor, pools: tuple[Tensor, Tensor], work: maths.AttentionWork) -> Tensor:
    keys, values = pools
    return kernels.dag_decode_attention(
        q, keys=keys, values=values, work=work, scale=q.shape[-1] ** -0.5
    )


def filled_pools(
    num_pages: int, device: torch.device, seen: list[Slots] | None = None
) -> tuple[Tensor, Tensor]:
    """Pools of 4 heads of 256 in bfloat16."""
    used = [np.arange(num_pages * PAGE)] if seen is None else seen
    keys, values = poisoned_pools(used, (num_pages, PAGE, 4, 256), torch.bfloat16)
    return keys.to(device), values.to(device)


@pytest.mark.parametrize(
    ("heads", "num_kv", "dim", "dtype"),
    [(2, 1, 16, torch.float32), (3, 1, 24, torch.float16), (2, 2, 32, torch.float32)],
    ids=str,
)
def test_rows_of_a_random_dag_equal_loops_and_nothing_unseen_leaks(
    heads: int, num_kv: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    rng = np.random.default_rng([heads, dim])
    torch.manual_seed(dim)
    places = Places(rng, PAGES * PAGE)
    runs = random_runs(rng, places, num_nodes=5, num_rows=[1, 2, 1], lengths=[1, 63, 64, 65])
    settings: dict[str, Any] = {"num_kv": num_kv, "dim": dim, "dtype": dtype}
    check(runs, device, heads=heads, chunk=64, **settings)


def test_a_chunk_of_prompt_and_single_rows_share_a_pass(device: torch.device) -> None:
    rng = np.random.default_rng(1)
    places = Places(rng, PAGES * PAGE)
    shared = places.take(70)
    # 6 rows of one chain are a tile: 24 lines, which takes the large one.
    runs = [Run("a", [shared], places.take(9), 6), Run("b", [shared], places.take(1))]
    check(runs, device, heads=4, num_kv=1, dim=16, dtype=torch.float32, readers_per_tile=6)


def test_a_broken_value_reaches_its_readers_and_no_other_row(device: torch.device) -> None:
    places = Places(np.random.default_rng(2), PAGES * PAGE)
    shared, own = places.take(20), places.take(5)
    runs = [Run("a", [shared], own, 2), Run("b", [shared], places.take(3))]
    keys, values = poisoned_pools(all_seen(runs), (PAGES, PAGE, 2, 16), torch.float32)
    pools = keys.to(device), values.to(device)
    q = torch.randn(3, 2, 16).to(device)
    work = on_device(planned(runs, WorkLayout(3)), device)
    tuning = kernels.Tuning.of(16, 3)
    clean = attend(q, *pools, work, 0.25, tuning)
    pools[1].view(-1, 2, 16)[own[4], 0, 3] = float("inf")  # the last row of a sees it
    broken = attend(q, *pools, work, 0.25, tuning)
    assert torch.equal(broken[[0, 2]], clean[[0, 2]])
    assert torch.equal(broken[1, 1], clean[1, 1])
    assert broken[1, 0].isnan().all()


def test_entries_are_appended_as_by_the_reference(device: torch.device) -> None:
    rng = np.random.default_rng(3)
    table = torch.arange(300, dtype=torch.int32)
    appends = torch.full((130, 2), 299, dtype=torch.int32)
    appends[:129, 0] = torch.from_numpy(rng.permutation(299)[:129])
    appends[:, 1] = torch.arange(1000, 1130)
    wanted, found = table.clone(), table.to(device)
    maths.append_slots(wanted, appends=appends)
    kernels.append_slots(found, appends=appends.to(device))
    assert torch.equal(found.cpu()[:299], wanted[:299])


def test_what_the_kernel_does_not_serve_is_refused_with_the_reason() -> None:
    work = on_device(planned([], WorkLayout(2)), "cpu")

    def attend(q: Tensor, pool: Tensor) -> None:
        kernels.dag_decode_attention(q, keys=pool, values=pool, work=work, scale=1.0)

    with pytest.raises(ConfigError, match="head_dim is 288, must be at most 256"):
        attend(torch.zeros(2, 2, 288), torch.zeros(2, 4, 1, 288))
    with pytest.raises(ConfigError, match="3 query heads over 2 KV heads"):
        attend(torch.zeros(2, 3, 16), torch.zeros(2, 4, 2, 16))
    with pytest.raises(ConfigError, match="must be one dtype"):
        attend(torch.zeros(2, 2, 16), torch.zeros(2, 4, 2, 16, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match="must be contiguous"):
        attend(torch.zeros(2, 2, 16), torch.zeros(2, 2, 4, 16).transpose(1, 2))
    with pytest.raises(ConfigError, match="256 query heads share a KV head"):
        attend(torch.zeros(2, 256, 16), torch.zeros(2, 4, 1, 16))


@pytest.mark.slow
def test_the_kernel_builds_for_hopper_and_does_not_spill_into_its_loops() -> None:
    """In a process of its own, without the interpreter."""
    code = """
import re, torch
from tests.kernels.hopper import compiled_for_hopper
from octopus_trl.kernels.decode_attention import Tuning, dag_decode_attention
from octopus_trl.maths.decode_attention import AttentionWork
def ints(*shape): return torch.zeros(*shape, dtype=torch.int32)
work = AttentionWork(ints(1), ints(8, 8), ints(8, 2), ints(5), ints(64), ints(1))
for dim in (64, 128, 256):
    q, pool = (torch.zeros(s, dtype=torch.bfloat16) for s in ((4, 16, dim), (4, 16, 4, dim)))
    with compiled_for_hopper() as built:
        dag_decode_attention(q, keys=pool, values=pool, work=work, scale=1.0)
    items = next(kernel for kernel in built if kernel.name == "attend_items")
    programs = Tuning.of(dim, 4).programs
    assert items.shared_bytes * programs <= 227 * 1024, (dim, items.shared_bytes)
    assert items.registers * items.warps * 32 * programs <= 65536, (dim, items.registers)
    assert "wgmma.mma_async" in items.ptx and "mma.sync" in items.ptx, dim
    assert items.ptx.count("cp.async.cg") >= 16, "loads are not asynchronous"
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(Path.home())},
    )
    assert done.returncode == 0, done.stderr


def gpu_runs(seed: int, num_slots: int, num_rows: list[int]) -> list[Run]:
    rng = np.random.default_rng(seed)
    lengths = [1, 2, 63, 64, 65, 511, 1030]
    places = Places(rng, num_slots)
    return random_runs(rng, places, num_nodes=12, num_rows=num_rows, lengths=lengths)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "num_kv", "dim", "dtype"),
    [
        (16, 4, 256, torch.bfloat16),
        (16, 4, 256, torch.float16),
        (32, 8, 128, torch.bfloat16),
        (14, 2, 64, torch.float16),
        (8, 8, 80, torch.bfloat16),
        (5, 1, 192, torch.bfloat16),
        (32, 1, 128, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [[1], [1] * 3, [1] * 65, [1, 7, 1, 64, 1, 1, 130]], ids=len)
def test_compiled_rows_equal_float64(
    rows: list[int], heads: int, num_kv: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    runs = gpu_runs(dim + len(rows), 1500 * PAGE, rows)
    check(runs, device, heads=heads, num_kv=num_kv, dim=dim, dtype=dtype, pages=1500)


@pytest.mark.gpu
@pytest.mark.parametrize("readers", [1, 2, 4, 5, 32, 33, 64, 200])
def test_compiled_readers_of_one_long_text_equal_float64(
    readers: int, device: torch.device
) -> None:
    places = Places(np.random.default_rng(readers), 3000 * PAGE)
    shared = places.take(8193)
    runs = [Run(n, [shared], places.take(n % 67)) for n in range(readers)]
    settings: dict[str, Any] = {"num_kv": 4, "dim": 256, "dtype": torch.bfloat16}
    check(runs, device, heads=16, pages=3000, **settings)


@pytest.mark.gpu
def test_a_captured_graph_serves_while_rows_come_grow_and_go(device: torch.device) -> None:
    layout, places = WorkLayout(24), Places(np.random.default_rng(0), 1500 * PAGE)
    shared = places.take(3000)
    pools = filled_pools(1500, device)
    q = torch.randn(24, 16, 256, dtype=torch.bfloat16, device=device)

    def plan(count: int, length: int) -> tuple[list[Slots], maths.AttentionWork]:
        runs = [Run(n, [shared], places.take(length)) for n in range(count)]
        lists = planned(runs, layout, readers_per_tile=16, num_kv_heads=4)
        return all_seen(runs), on_device(lists, device)

    seen, work = plan(3, 40)
    for _ in range(2):  # compiled before it is captured
        run(q, pools, work)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(q, pools, work)
    for count, length in ((3, 40), (24, 129), (1, 1), (17, 200)):
        seen, other = plan(count, length)
        for name in ("counts", "items", "readers", "bounds", "slots"):
            getattr(work, name).copy_(getattr(other, name))
        graph.replay()
        wanted = brute_force(q, *pools, seen, 256**-0.5)
        assert (out.double() - wanted).abs().max() < 1.2e-2 * wanted.abs().max()


@pytest.mark.gpu
def test_rows_of_a_prompt_chunk_equal_the_same_rows_one_by_one(device: torch.device) -> None:
    places = Places(np.random.default_rng(4), 1000 * PAGE)
    shared, own = places.take(2050), places.take(300)
    pools = filled_pools(1000, device)
    q = torch.randn(100, 16, 256, dtype=torch.bfloat16, device=device)
    chunk = Run("a", [shared], own, 100)
    single = [replace(with_own(chunk, own[: 201 + row]), key=row, num_rows=1) for row in range(100)]
    one, other = (
        run(q, pools, on_device(planned(runs, WorkLayout(100), readers_per_tile=32), device))
        for runs in ([chunk], single)
    )
    assert (one.double() - other.double()).abs().max() < 1e-2 * other.double().abs().max()


@pytest.mark.gpu
def test_a_row_alone_gets_the_same_bits_whatever_runs_beside_it(device: torch.device) -> None:
    runs = gpu_runs(9, 1500 * PAGE, [1] * 40)
    pools = filled_pools(1500, device, all_seen(runs))
    q = torch.randn(40, 16, 256, dtype=torch.bfloat16, device=device)
    settings = {"readers_per_tile": 32, "alone": True, "chunk": 1 << 30}
    together = run(q, pools, on_device(planned(runs, WorkLayout(40), **settings), device))
    for row in (0, 7, 39):
        work = on_device(planned(runs[row : row + 1], WorkLayout(40), **settings), device)
        assert torch.equal(run(q[row : row + 1], pools, work)[0], together[row])
