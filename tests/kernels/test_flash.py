"""flash-attn 4 over a DAG on the GPU: values, gradients, exact silence, few compilations."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from octopus_trl.kernels import _flash
from octopus_trl.maths import attention as maths
from octopus_trl.maths import dag
from tests.kernels.plans import random_plan

pytestmark = pytest.mark.gpu

HEADS, KV = 8, 2
# One chain of a length around each size that the kernels and the padding know.
LENGTHS = [1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1025]


@pytest.fixture(autouse=True)
def _served() -> None:
    reason = _flash.unavailable(torch.device("cuda", 0), torch.bfloat16, 256)
    if reason is not None:
        pytest.skip(reason)


def plans() -> list[dag.AttentionPlan]:
    chains = [dag.layout([None], [[]], [rows]).plan for rows in LENGTHS]
    return chains + [random_plan(seed, longest=(30, 200, 500)[seed % 3]) for seed in range(6)]


def make(rows: int, dim: int, *, spare: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q, k and v the way a model hands them over: heads before rows in memory."""
    q, k, v = (
        torch.randn(heads, rows + spare, dim, device="cuda", dtype=torch.bfloat16)
        .transpose(0, 1)
        .requires_grad_()
        for heads in (HEADS, KV, KV)
    )
    return q, k, v


def results(attend: Any, inputs: tuple[Tensor, ...], weight: Tensor, **named: Any) -> list[Tensor]:
    q, k, v = inputs
    out = attend(q, k=k, v=v, **named)
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_values_and_gradients_equal_float64(dim: int, detach: bool) -> None:
    for plan in plans():
        rows = plan.num_rows
        inputs = make(rows, dim, spare=3)
        wide = tuple(x.detach().double().requires_grad_() for x in inputs)
        weight = torch.randn(rows + 3, HEADS, dim, device="cuda", dtype=torch.bfloat16)
        named: dict[str, Any] = {"plan": plan, "scale": dim**-0.5, "detach_mounts": detach}
        fast = results(_flash.dag_attention, inputs, weight, **named)
        exact = results(maths.dag_attention, wide, weight.double(), **named)
        for name, found, right in zip(("out", "q", "k", "v"), fast, exact, strict=True):
            assert torch.equal(found[rows:], torch.zeros_like(found[rows:])), name
            # A row that sees itself alone has no gradient in q at all: rounding is all there is.
            error = float((found.double() - right).norm() / right.norm().clamp(min=0.1))
            assert error < 1e-2, f"{name} of {rows} rows: relative error {error}"


def test_rows_that_read_nothing_of_a_sibling_do_not_move() -> None:
    """Trunk, two branches, a reader of the first behind the second: 0 for what does not read."""
    plan = dag.layout([None, 0, 0, 2], [[], [], [], [1]], [200, 190, 130, 77]).plan
    q, k, v = (x.detach() for x in make(plan.num_rows, 256))
    named: dict[str, Any] = {"plan": plan, "scale": 0.0625}
    before = _flash.dag_attention(q, k=k, v=v, **named)
    sibling = torch.from_numpy(plan.segment_of_row == 1).cuda()
    reader = torch.from_numpy(plan.segment_of_row == 3).cuda()
    k, v = (torch.where(sibling[:, None, None], torch.randn_like(x), x) for x in (k, v))
    after = _flash.dag_attention(q, k=k, v=v, **named)
    assert torch.equal(before[~sibling & ~reader], after[~sibling & ~reader])
    assert not torch.equal(before[reader], after[reader])


def test_twenty_lengths_compile_one_kernel_each_way() -> None:
    interface = import_module("flash_attn.cute.interface")
    caches = [interface._flash_attn_fwd.compile_cache, interface._flash_attn_bwd.compile_cache]
    for cache in caches:
        cache.clear()
    for index in range(20):
        plan = random_plan(index, longest=40 * index + 5, segments=3 + 2 * index)
        inputs = make(plan.num_rows, 256)
        weight = torch.ones_like(inputs[0])
        results(_flash.dag_attention, inputs, weight, plan=plan, scale=0.0625)
        with torch.no_grad():  # a pass that only scores takes the same kernel
            q, k, v = inputs
            _flash.dag_attention(q, k=k, v=v, plan=plan, scale=0.0625)
    assert [len(cache.cache) for cache in caches] == [1, 1]
