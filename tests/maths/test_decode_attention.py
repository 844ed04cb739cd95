"""Attention over shared paged text equals loops over what each row sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from octopus_trl.engine.work_layout import WorkLayout
from octopus_trl.engine.worklist import Run
from octopus_trl.maths.decode_attention import AttentionWork, append_slots, dag_decode_attention
from tests.decode_work import (
    Places,
    all_seen,
    brute_force,
    on_device,
    planned,
    poisoned_pools,
    random_runs,
)
from tests.tolerances import FLOAT64

SHAPE = (160, 16, 2, 8)  # pages, slots a page, KV heads, head dim


def attend(q: Tensor, pools: tuple[Tensor, Tensor], work: AttentionWork) -> Tensor:
    return dag_decode_attention(q, keys=pools[0], values=pools[1], work=work, scale=0.3)


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_a_random_dag_equal_loops_and_nothing_unseen_leaks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    rows = [1, 1, 1, 4, 1, 19, 1]
    runs = random_runs(rng, Places(rng, 160 * 16), num_nodes=9, num_rows=rows)
    seen = all_seen(runs)
    pools = poisoned_pools(seen, SHAPE, torch.float64)
    q = torch.randn(sum(rows) + 2, 6, 8, dtype=torch.float64)
    work = on_device(planned(runs, WorkLayout(40), chunk=int(rng.choice([0, 64, 128]))), "cpu")
    out = attend(q, pools, work)
    wanted = brute_force(q, *pools, seen, 0.3)
    assert (out - wanted).abs().max() < FLOAT64
    assert not out[sum(rows) :].any(), "rows without work are exactly 0"


def test_rows_that_see_nothing_give_zero() -> None:
    nothing = np.empty(0, dtype=np.int64)
    work = on_device(planned([Run("a", [], nothing), Run("b", [], nothing)], WorkLayout(4)), "cpu")
    pools = poisoned_pools([], SHAPE, torch.float64)
    q = torch.randn(4, 6, 8, dtype=torch.float64)
    assert not attend(q, pools, work).any()


def test_a_pass_without_runs_gives_zero() -> None:
    work = on_device(planned([], WorkLayout(4)), "cpu")
    pools = poisoned_pools([], SHAPE, torch.float32)
    assert not attend(torch.randn(3, 6, 8), pools, work).any()


def test_a_broken_value_reaches_its_readers_and_no_other_row() -> None:
    rng = np.random.default_rng(0)
    places = Places(rng, 160 * 16)
    shared, own = places.take(70), [places.take(3), places.take(6), places.take(9)]
    runs = [Run("a", [shared], own[0]), Run("b", [shared], own[1], 4), Run("c", [], own[2])]
    seen = all_seen(runs)
    pools = poisoned_pools(seen, SHAPE, torch.float32)
    q = torch.randn(6, 4, 8)
    work = on_device(planned(runs, WorkLayout(6)), "cpu")
    clean = attend(q, pools, work)
    pools[1].view(-1, 2, 8)[own[1][-2], 0, 3] = float("inf")  # seen by the last two rows of b
    broken = attend(q, pools, work)
    assert torch.equal(broken[[0, 1, 2, 5]], clean[[0, 1, 2, 5]])
    assert broken[3:5, :2].isnan().all(), "the heads over the KV head that broke"
    assert torch.equal(broken[3:5, 2:], clean[3:5, 2:])


def test_the_result_has_the_dtype_of_the_queries() -> None:
    rng = np.random.default_rng(1)
    runs = random_runs(rng, Places(rng, 160 * 16), num_nodes=3, num_rows=[1, 1])
    pools = poisoned_pools(all_seen(runs), SHAPE, torch.bfloat16)
    q = torch.randn(2, 4, 8, dtype=torch.bfloat16)
    out = attend(q, pools, on_device(planned(runs, WorkLayout(2)), "cpu"))
    assert out.dtype == torch.bfloat16
    wanted = brute_force(q, *pools, all_seen(runs), 0.3)
    assert (out.double() - wanted).abs().max() < 2e-2


def test_entries_are_written_where_they_belong_and_padding_goes_to_the_last_place() -> None:
    table = torch.arange(10, dtype=torch.int32)
    append_slots(table, appends=torch.tensor([[3, 70], [9, 0], [5, 71], [9, 0]], dtype=torch.int32))
    assert table.tolist() == [0, 1, 2, 70, 4, 71, 6, 7, 8, 0]
