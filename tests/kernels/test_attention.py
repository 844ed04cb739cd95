"""FlexAttention over a DAG: block lists against a dense mask, results against the reference."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from octopus_trl.kernels._block_mask import BLOCK, block_mask, padded_rows, padded_segments
from octopus_trl.kernels.attention import dag_attention
from octopus_trl.maths import attention as maths
from octopus_trl.maths import dag
from tests.kernels.plans import random_plan

SCALE = 0.3


def dense(plan: dag.AttentionPlan, *, apart: bool) -> np.ndarray:
    """Spell the plan out over padded rows; mounts lie in a second half when apart."""
    size = padded_rows(plan.num_rows)
    segment = plan.segment_of_row
    own = (segment[:, None] == segment) & np.tri(len(segment), dtype=bool)
    tree, mounted = (matrix[segment][:, segment] for matrix in (plan.visible, plan.mounted))
    mask = np.zeros((size, (1 + apart) * size), dtype=bool)
    rows = plan.num_rows
    mask[:rows, :rows] = (tree | own) if apart else (tree | own | mounted)
    if apart:
        mask[:rows, size : size + rows] = mounted
    return mask


def listed(counts: Tensor, order: Tensor) -> np.ndarray:
    """Turn lists of block columns into a matrix."""
    matrix = np.zeros(order.shape[-2:], dtype=bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        matrix[row, order[0, 0, row, :count]] = True
    return matrix


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_block_lists_cover_exactly_what_rows_see(seed: int, apart: bool) -> None:
    plan = random_plan(seed)
    mask = block_mask(plan, device="cpu", apart=apart)
    expected = dense(plan, apart=apart)
    blocks = expected.reshape(len(expected) // BLOCK, BLOCK, -1, BLOCK)
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert np.array_equal(full, blocks.all((1, 3)))
    assert np.array_equal(partial, blocks.any((1, 3)) & ~full)
    assert mask.q_num_blocks is not None
    assert mask.q_indices is not None
    assert np.array_equal(listed(mask.q_num_blocks, mask.q_indices), partial.T)


@pytest.mark.parametrize("apart", [False, True])
def test_the_mask_function_is_the_dense_mask(apart: bool) -> None:
    plan = random_plan(3)
    mask = block_mask(plan, device="cpu", apart=apart)
    expected = torch.from_numpy(dense(plan, apart=apart))
    zero = torch.tensor(0)
    rows, keys = (torch.arange(size) for size in expected.shape)
    seen = mask.mask_mod(zero, zero, rows[:, None], keys[None, :])
    assert torch.equal(seen, expected)


def test_few_padded_sizes_serve_many_lengths() -> None:
    sizes = {padded_rows(rows) for rows in range(1, 131072, 97)}
    assert len(sizes) <= 20
    assert all(size % BLOCK == 0 for size in sizes)
    for rows in (1, 127, 128, 129, 1025, 49152, 49153):
        assert rows <= padded_rows(rows) <= max(2 * BLOCK, 1.51 * rows)
    assert {padded_segments(n) for n in range(1, 1000)} == {64, 128, 256, 512, 1024}
    assert padded_segments(64) > 64  # one is left over for padding


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("heads", [(4, 2, 8), (2, 2, 16)])
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 700])
def test_values_equal_the_reference(heads: tuple[int, int, int], rows: int, detach: bool) -> None:
    plan = plan_of(rows)
    q, k, v = make(plan.num_rows + 3, heads, "cpu", torch.float32)
    named: dict[str, Any] = {"k": k, "v": v, "plan": plan, "scale": SCALE}
    with torch.no_grad():
        out = dag_attention(q, **named, detach_mounts=detach)
        expected = maths.dag_attention(q, **named, detach_mounts=detach)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    assert torch.equal(out[plan.num_rows :], torch.zeros_like(out[plan.num_rows :]))


def test_one_mask_serves_every_layer_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(plan: dag.AttentionPlan, **named: Any) -> Any:
        built.append(plan)
        return block_mask(plan, **named)

    monkeypatch.setattr("octopus_trl.kernels._flex.block_mask", build)
    plan = plan_of(129)
    q, k, v = (x.detach() for x in make(plan.num_rows, (2, 1, 8), "cpu", torch.float32))
    for _ in range(3):
        dag_attention(q, k=k, v=v, plan=plan, scale=SCALE)
    assert len(built) == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler: g++ is not found")
def test_compiled_block_lists_give_the_reference_and_one_size_compiles_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.utils import counters

    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    monkeypatch.setattr("octopus_trl.kernels._flex._attend", lambda device: compiled)
    graphs = []
    for rows in (600, 520, 760):
        plan = plan_of(rows)
        q, k, v = (x.detach() for x in make(rows, (4, 2, 16), "cpu", torch.float32))
        out = dag_attention(q, k=k, v=v, plan=plan, scale=SCALE)
        expected = maths.dag_attention(q, k=k, v=v, plan=plan, scale=SCALE)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1


def plan_of(rows: int) -> dag.AttentionPlan:
    """Give a fork with a mount and a second root over this many rows, or one root of few."""
    if rows < 8:
        return dag.layout([None], [[]], [rows]).plan
    part = rows // 4
    lengths = [part, part, part, rows - 3 * part - 1, 1]
    return dag.layout([None, 0, 0, 2, None], [[], [], [], [1], []], lengths).plan


def make(
    rows: int, heads: tuple[int, int, int], device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, num_kv, dim = heads
    q, k, v = (
        torch.randn(rows, num, dim, device=device, dtype=dtype, requires_grad=True)
        for num in (num_heads, num_kv, num_kv)
    )
    return q, k, v


@pytest.mark.gpu
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("rows", [127, 128, 129, 1025])
def test_values_and_gradients_on_cuda_equal_float64(rows: int, detach: bool) -> None:
    plan = plan_of(rows)
    inputs = make(rows + 3, (4, 2, 256), "cuda", torch.bfloat16)
    wide = tuple(x.detach().cpu().double().requires_grad_() for x in inputs)
    weight = torch.randn(rows + 3, 4, 256, device="cuda", dtype=torch.bfloat16)
    results = []
    for attend, (q, k, v), at in (
        (dag_attention, inputs, weight),
        (maths.dag_attention, wide, weight.cpu().double()),
    ):
        out = attend(q, k=k, v=v, plan=plan, scale=256**-0.5, detach_mounts=detach)
        results.append([out, *torch.autograd.grad((out * at).sum(), (q, k, v))])
    for fast, exact in zip(*results, strict=True):
        assert torch.equal(fast[rows:], torch.zeros_like(fast[rows:]))
        error = (fast.cpu().double() - exact).norm() / exact.norm()
        assert float(error) < 1e-2


@pytest.mark.gpu
def test_lengths_of_one_padded_size_compile_once() -> None:
    from torch._dynamo.utils import counters

    def run(rows: int) -> None:
        plan = plan_of(rows)
        q, k, v = make(rows, (4, 2, 64), "cuda", torch.bfloat16)
        dag_attention(q, k=k, v=v, plan=plan, scale=SCALE).sum().backward()

    run(600)
    before = counters["stats"]["unique_graphs"]
    for rows in (520, 600, 700, 760):
        run(rows)
    assert counters["stats"]["unique_graphs"] == before
