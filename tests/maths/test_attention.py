"""Attention under a mask, its merge, and attention over a DAG against a dense mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from octopus_trl.maths import attention, dag
from octopus_trl.maths.attention import dag_attention, masked_attention, merge_attention

SCALE = 0.3
# Two roots, branches below branches, mounts of siblings and of a cousin, single-token segments.
PARENTS = [None, 0, 0, 1, 1, 2, None, 3, 6]
MOUNTS: list[list[int]] = [[], [], [1], [2], [], [3], [], [5, 4], [2]]
LENGTHS = [4, 3, 5, 1, 7, 3, 2, 4, 3]
HEADS = [(4, 2, 5), (3, 3, 16), (6, 1, 8)]


def make_plan(scale: int = 1) -> dag.AttentionPlan:
    return dag.layout(PARENTS, MOUNTS, [length * scale for length in LENGTHS]).plan


def dense_mask(plan: dag.AttentionPlan, *, mounted: bool = True) -> Tensor:
    """Spell the plan's segment matrix out over rows."""
    segment = plan.segment_of_row
    seen = plan.visible | plan.mounted if mounted else plan.visible
    own = (segment[:, None] == segment[None, :]) & np.tri(len(segment), dtype=bool)
    return torch.from_numpy(seen[segment][:, segment] | own)


def make(
    rows: int, heads: tuple[int, int, int], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, num_kv, dim = heads
    q, k, v = (
        torch.randn(rows, num, dim, dtype=dtype, requires_grad=True)
        for num in (num_heads, num_kv, num_kv)
    )
    return q, k, v


def naive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attend one query and one head at a time."""
    groups = q.shape[1] // k.shape[1]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=q.dtype)
    for row in range(len(q)):
        seen = mask[row].nonzero()[:, 0]
        for head in range(q.shape[1]):
            if len(seen):
                scores = k[seen, head // groups] @ q[row, head] * SCALE
                lse[row, head] = scores.logsumexp(0)
                out[row, head] = scores.softmax(0) @ v[seen, head // groups]
    return out, lse


@pytest.mark.parametrize("heads", HEADS)
def test_masked_attention_is_softmax_over_what_each_query_sees(heads: tuple[int, int, int]) -> None:
    q, k, v = (x.detach() for x in make(13, heads))
    mask = torch.rand(13, 13) < 0.4
    mask[5] = False
    out, lse = masked_attention(q, k=k, v=v, mask=mask, scale=SCALE)
    expected, expected_lse = naive(q, k, v, mask)
    torch.testing.assert_close(out, expected, atol=1e-13, rtol=0)
    torch.testing.assert_close(lse, expected_lse, atol=1e-13, rtol=0)
    assert torch.equal(out[5], torch.zeros_like(out[5]))


def test_masked_attention_has_the_derivatives_where_a_query_sees_nothing() -> None:
    q, k, v = make(5, (2, 1, 3))
    mask = torch.rand(5, 5) < 0.5
    mask[0] = True
    mask[2] = False

    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = masked_attention(tensors[0], k=tensors[1], v=tensors[2], mask=mask, scale=SCALE)
        return out, lse[mask.any(1)]

    torch.autograd.gradcheck(attend, [q, k, v])


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_unseen_key_never_leaks(where: str, value: float) -> None:
    q, k, v = make(7, (2, 2, 3))
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    out, lse = masked_attention(q, k=k, v=v, mask=mask, scale=SCALE)
    poisoned = {"k": k.detach().clone(), "v": v.detach().clone()}
    poisoned[where][4] = value
    moved, moved_lse = masked_attention(q, **poisoned, mask=mask, scale=SCALE)
    assert torch.equal(moved[:4], out[:4])
    assert torch.equal(moved_lse[:4], lse[:4])
    assert bool(moved[4:].isnan().all())
    (grad,) = torch.autograd.grad(moved[:4].sum(), q)
    (expected,) = torch.autograd.grad(out[:4].sum(), q)
    assert torch.equal(grad, expected)


def test_no_keys_give_zero_and_minus_infinity() -> None:
    q, k, v = make(3, (2, 1, 5))
    mask = torch.zeros(3, 0, dtype=torch.bool)
    out, lse = masked_attention(q, k=k[:0], v=v[:0], mask=mask, scale=SCALE)
    assert torch.equal(out, torch.zeros_like(q))
    assert bool((lse == -torch.inf).all())


def test_parts_merge_into_the_whole() -> None:
    q, k, v = make(11, (4, 2, 3))
    mask = torch.rand(11, 11) < 0.5
    mask[3] = False
    mask[7, :4] = False
    whole, whole_lse = masked_attention(q, k=k, v=v, mask=mask, scale=SCALE)
    parts = [
        masked_attention(q, k=k[part], v=v[part], mask=mask[:, part], scale=SCALE)
        for part in (slice(0, 4), slice(4, 5), slice(5, 11))
    ]
    outs, lses = map(list, zip(*parts, strict=True))
    out, lse = merge_attention(outs, lses=lses)
    torch.testing.assert_close(out, whole, atol=1e-14, rtol=0)
    torch.testing.assert_close(lse, whole_lse, atol=1e-14, rtol=0)
    grads = torch.autograd.grad(out.square().sum(), [q, k, v], retain_graph=True)
    for grad, expected in zip(grads, torch.autograd.grad(whole.square().sum(), [q, k, v])):
        torch.testing.assert_close(grad, expected, atol=1e-13, rtol=0)


@pytest.mark.parametrize("heads", HEADS)
def test_dag_attention_is_attention_under_the_segment_matrix(heads: tuple[int, int, int]) -> None:
    plan = make_plan()
    inputs = make(plan.num_rows, heads)
    q, k, v = inputs
    out = dag_attention(q, k=k, v=v, plan=plan, scale=SCALE)
    expected, _ = masked_attention(q, k=k, v=v, mask=dense_mask(plan), scale=SCALE)
    torch.testing.assert_close(out, expected, atol=1e-13, rtol=0)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad((out * weight).sum(), inputs)
    for grad, wanted in zip(grads, torch.autograd.grad((expected * weight).sum(), inputs)):
        torch.testing.assert_close(grad, wanted, atol=1e-13, rtol=0)


def test_dag_attention_has_the_derivatives() -> None:
    plan = dag.layout([None, 0, 0], [[], [], [1]], [2, 2, 2]).plan
    torch.autograd.gradcheck(
        lambda q, k, v: dag_attention(q, k=k, v=v, plan=plan, scale=SCALE), make(6, (2, 1, 3))
    )


def test_dag_attention_without_the_cpu_kernel_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    inputs = make(plan.num_rows, (4, 2, 5))
    q, k, v = inputs
    weight = torch.randn_like(q)
    results = []
    for cpu in (True, False):
        monkeypatch.setattr(attention, "_has_fused_kernel", lambda _, cpu=cpu: cpu)
        out = dag_attention(q, k=k, v=v, plan=plan, scale=SCALE)
        results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, atol=1e-13, rtol=0)


def test_detached_mounts_keep_values_and_lose_the_readers_gradient() -> None:
    plan = make_plan()
    q, k, v = make(plan.num_rows, (4, 2, 5))
    out = dag_attention(q, k=k, v=v, plan=plan, scale=SCALE, detach_mounts=True)
    assert torch.equal(out, dag_attention(q, k=k, v=v, plan=plan, scale=SCALE))
    tree, mounts = dense_mask(plan, mounted=False), dense_mask(plan)
    mounts &= ~tree
    outs, lses = [], []
    for mask, keys, values in ((tree, k, v), (mounts, k.detach(), v.detach())):
        part, lse = masked_attention(q, k=keys, v=values, mask=mask, scale=SCALE)
        outs.append(part)
        lses.append(lse)
    expected, _ = merge_attention(outs, lses=lses)
    grads = torch.autograd.grad(out.square().sum(), [q, k, v])
    wanted = torch.autograd.grad(expected.square().sum(), [q, k, v])
    for grad, want in zip(grads, wanted):
        torch.testing.assert_close(grad, want, atol=1e-13, rtol=0)


def test_rows_that_nobody_asked_for_are_never_read() -> None:
    plan = make_plan(scale=9)
    q, k, v = make(plan.num_rows, (4, 2, 8), torch.float32)
    out = dag_attention(q, k=k, v=v, plan=plan, scale=SCALE)
    mask = dense_mask(plan)
    for group in plan.groups:
        unseen = ~mask[group.lo : group.hi].any(0)
        keys, values = k.detach().clone(), v.detach().clone()
        keys[unseen] = values[unseen] = float("nan")
        moved = dag_attention(q, k=keys, v=values, plan=plan, scale=SCALE)
        assert torch.equal(moved[group.lo : group.hi], out[group.lo : group.hi])
        grads = torch.autograd.grad(out[group.lo : group.hi].sum(), [k, v], retain_graph=True)
        for grad in grads:
            assert torch.equal(grad[unseen], torch.zeros_like(grad[unseen]))


def test_padding_rows_are_exact_zeros() -> None:
    plan = make_plan()
    q, k, v = make(plan.num_rows + 5, (2, 1, 4))
    out = dag_attention(q, k=k, v=v, plan=plan, scale=SCALE)
    assert torch.equal(out[plan.num_rows :], torch.zeros(5, 2, 4))
    for grad in torch.autograd.grad(out.sum(), [q, k, v]):
        assert torch.equal(grad[plan.num_rows :], torch.zeros_like(grad[plan.num_rows :]))


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
def test_one_root_of_any_length_is_causal_attention(rows: int) -> None:
    plan = dag.layout([None], [[]], [rows]).plan
    q, k, v = make(rows, (2, 2, 8), torch.float32)
    out = dag_attention(q, k=k, v=v, plan=plan, scale=SCALE)
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    expected, _ = masked_attention(q, k=k, v=v, mask=mask, scale=SCALE)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)


def test_bfloat16_stays_close_to_float32() -> None:
    plan = make_plan()
    q, k, v = (x.detach().bfloat16() for x in make(plan.num_rows, (4, 2, 8)))
    out = dag_attention(q, k=k, v=v, plan=plan, scale=SCALE)
    wide: dict[str, Any] = {"k": k.float(), "v": v.float(), "plan": plan, "scale": SCALE}
    assert out.dtype == torch.bfloat16
    error = (out.float() - dag_attention(q.float(), **wide)).abs().max()
    assert float(error) < 2e-2
