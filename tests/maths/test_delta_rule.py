"""Gated delta rule: chunk form, recurrent form and single steps against the rule itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor

from octopus_trl.maths.delta_rule import gated_delta_rule, gated_delta_step

Form = Literal["chunk", "recurrent"]
FORMS = get_args(Form)
LENGTHS = [1, 63, 0, 64, 65, 200, 31, 32, 33]


def make(
    lengths: list[int],
    heads: tuple[int, int] = (2, 6),
    dims: tuple[int, int] = (5, 3),
    dtype: torch.dtype = torch.float64,
    decay: float = 0.05,
) -> tuple[dict[str, Any], Tensor]:
    """Draw inputs; slow decay, so that a state that leaks is seen far away."""
    rows, runs = sum(lengths), len(lengths)
    (num_k, num_v), (key_dim, value_dim) = heads, dims
    inputs: dict[str, Any] = {
        "q": torch.randn(rows, num_k, key_dim, dtype=dtype),
        "k": torch.randn(rows, num_k, key_dim, dtype=dtype),
        "v": torch.randn(rows, num_v, value_dim, dtype=dtype),
        "g": -decay * torch.rand(rows, num_v, dtype=dtype),
        "beta": torch.rand(rows, num_v, dtype=dtype),
        "initial_state": torch.randn(runs, num_v, key_dim, value_dim, dtype=dtype),
    }
    for value in inputs.values():
        value.requires_grad_()
    return inputs, torch.tensor([0, *lengths]).cumsum(0)


def naive(inputs: dict[str, Any], bounds: list[int]) -> tuple[Tensor, Tensor]:
    """Apply Eq. 2 one row and one head at a time."""
    q, k, v, g, beta, initial = inputs.values()
    groups = v.shape[1] // q.shape[1]
    outs, states = [], []
    for run, (low, high) in enumerate(pairwise(bounds)):
        heads: list[Tensor] = []
        for row in range(low, high):
            row_outs = []
            for head in range(v.shape[1]):
                state = initial[run, head] if row == low else heads[head]
                query, key = (
                    x[row, head // groups] / (x[row, head // groups].square().sum() + 1e-6).sqrt()
                    for x in (q, k)
                )
                state = state * g[row, head].exp()
                state = state + torch.outer(key, beta[row, head] * (v[row, head] - key @ state))
                row_outs.append(query @ state / q.shape[-1] ** 0.5)
                heads = [*heads[:head], state, *heads[head + 1 :]]
            outs.append(torch.stack(row_outs))
        states.append(torch.stack(heads) if high > low else initial[run])
    return torch.stack(outs), torch.stack(states)


@pytest.mark.parametrize("form", FORMS)
def test_both_forms_are_the_rule(form: Form) -> None:
    inputs, cu_seqlens = make([1, 0, 70, 3])
    o, state = gated_delta_rule(**inputs, cu_seqlens=cu_seqlens, form=form)
    expected, expected_state = naive(inputs, cu_seqlens.tolist())
    torch.testing.assert_close(o, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(state, expected_state, atol=1e-12, rtol=0)


def test_forms_agree_with_every_gradient_at_odd_lengths() -> None:
    inputs, cu_seqlens = make(LENGTHS)
    results = []
    for form in FORMS:
        o, state = gated_delta_rule(**inputs, cu_seqlens=cu_seqlens, form=form)
        torch.manual_seed(1)
        loss = (o * torch.randn_like(o)).sum() + (state * torch.randn_like(state)).sum()
        results.append([o, state, *torch.autograd.grad(loss, list(inputs.values()))])
    for chunk, recurrent in zip(*results, strict=True):
        torch.testing.assert_close(chunk, recurrent, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_the_derivatives(form: Form) -> None:
    inputs, cu_seqlens = make([3, 0, 2], heads=(1, 2), dims=(2, 3))

    def rule(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(inputs, tensors, strict=True))
        return gated_delta_rule(**named, cu_seqlens=cu_seqlens, form=form)

    torch.autograd.gradcheck(rule, list(inputs.values()))


@pytest.mark.parametrize("form", FORMS)
def test_matches_transformers_run_by_run(form: Form) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    stock = {
        "chunk": qwen.torch_chunk_gated_delta_rule,
        "recurrent": qwen.torch_recurrent_gated_delta_rule,
    }[form]
    lengths = [1, 63, 64, 65, 200]
    inputs, cu_seqlens = make(lengths, dims=(16, 8), dtype=torch.float32)
    o, state = gated_delta_rule(**inputs, cu_seqlens=cu_seqlens, form=form)
    for run, (low, high) in enumerate(pairwise(cu_seqlens.tolist())):
        rows = {
            name: inputs[short][None, low:high]
            for name, short in {"query": "q", "key": "k", "value": "v"}.items()
        }
        expected, expected_state = stock(
            **rows,
            g=inputs["g"][None, low:high],
            beta=inputs["beta"][None, low:high],
            initial_state=inputs["initial_state"][run : run + 1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(o[low:high], expected[0], atol=2e-6, rtol=0)
        torch.testing.assert_close(state[run], expected_state[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [1, 63, 64, 65])
def test_a_run_cut_anywhere_continues(form: Form, cut: int) -> None:
    inputs, whole = make([130])
    o, state = gated_delta_rule(**inputs, cu_seqlens=whole, form=form)
    carried, outs = inputs["initial_state"], []
    for low, high in ((0, cut), (cut, 130)):
        part = {n: x[low:high] for n, x in inputs.items() if n != "initial_state"}
        out, carried = gated_delta_rule(
            **part, initial_state=carried, cu_seqlens=torch.tensor([0, high - low]), form=form
        )
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs), o, atol=1e-12, rtol=0)
    torch.testing.assert_close(carried, state, atol=1e-12, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_a_sibling_never_moves_a_run(form: Form) -> None:
    inputs, cu_seqlens = make([37, 51, 40], dtype=torch.float32)
    o, state = gated_delta_rule(**inputs, cu_seqlens=cu_seqlens, form=form)
    poisoned = {name: value.detach().clone() for name, value in inputs.items()}
    for name, value in poisoned.items():
        value[1 if name == "initial_state" else slice(37, 88)] = float("nan")
        value.requires_grad_()
    moved, moved_state = gated_delta_rule(**poisoned, cu_seqlens=cu_seqlens, form=form)
    others = [*range(37), *range(88, 128)]
    assert torch.equal(moved[others], o[others])
    assert torch.equal(moved_state[[0, 2]], state[[0, 2]])
    assert bool(moved[37:88].isnan().all())
    grads = [
        torch.autograd.grad(out[others].sum() + final[[0, 2]].sum(), list(values.values()))
        for out, final, values in ((o, state, inputs), (moved, moved_state, poisoned))
    ]
    for clean, touched in zip(*grads, strict=True):
        keep = [0, 2] if len(clean) == 3 else others
        assert torch.equal(touched[keep], clean[keep])


def test_steps_follow_the_recurrent_form() -> None:
    inputs, cu_seqlens = make([4, 4, 4])
    o, state = gated_delta_rule(**inputs, cu_seqlens=cu_seqlens, form="recurrent")
    now, outs = inputs["initial_state"], []
    for step in range(4):
        rows = torch.arange(3) * 4 + step
        named = {name: inputs[name][rows] for name in ("q", "k", "v", "g", "beta")}
        out, now = gated_delta_step(**named, state=now)
        outs.append(out)
    torch.testing.assert_close(torch.stack(outs, 1).flatten(0, 1), o, atol=1e-13, rtol=0)
    torch.testing.assert_close(now, state, atol=1e-13, rtol=0)


def test_a_step_does_not_depend_on_the_batch_around_it() -> None:
    inputs, _ = make([1] * 33, heads=(4, 8), dims=(64, 64), dtype=torch.float32)
    named = {name: value.detach() for name, value in inputs.items()}
    named["state"] = named.pop("initial_state")
    o, state = gated_delta_step(**named)
    for rows in ([5], [32, 5], list(range(3, 20))):
        part, part_state = gated_delta_step(**{n: x[rows] for n, x in named.items()})
        assert torch.equal(part, o[rows])
        assert torch.equal(part_state, state[rows])


def test_states_stay_wide_and_outputs_follow_the_values() -> None:
    inputs, cu_seqlens = make([5], dtype=torch.float32)
    half: dict[str, Any] = {name: value.detach().bfloat16() for name, value in inputs.items()}
    o, state = gated_delta_rule(**half, cu_seqlens=cu_seqlens)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)


def test_strong_decay_stays_finite() -> None:
    inputs, cu_seqlens = make([200], dtype=torch.float32, decay=40.0)
    o, state = gated_delta_rule(**inputs, cu_seqlens=cu_seqlens)
    grads = torch.autograd.grad(o.sum() + state.sum(), list(inputs.values()))
    assert all(bool(x.isfinite().all()) for x in (o, state, *grads))


def test_no_rows_return_the_initial_states() -> None:
    inputs, cu_seqlens = make([0, 0])
    o, state = gated_delta_rule(**inputs, cu_seqlens=cu_seqlens)
    assert o.shape == (0, 6, 3)
    assert torch.equal(state, inputs["initial_state"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [[1], [65, 0, 7], [0, 0]], ids=str)
def test_rows_past_the_last_run_and_runs_past_the_last_row_change_nothing(
    form: Form, lengths: list[int]
) -> None:
    inputs, bounds = make(lengths)
    want, want_state = gated_delta_rule(**inputs, cu_seqlens=bounds, form=form)
    rows = sum(lengths)
    padded = {
        name: torch.cat(
            [value, torch.full_like(value[:1], float("nan")).expand(9, *value.shape[1:])]
        )
        if rows
        else torch.full((9, *value.shape[1:]), float("nan"), dtype=value.dtype)
        for name, value in inputs.items()
    }
    state = inputs["initial_state"]
    padded["initial_state"] = torch.cat(
        [state, torch.zeros_like(state[:1]).expand(3, *state.shape[1:])]
    )
    more = torch.cat([bounds, bounds[-1:].expand(3)])
    found, found_state = gated_delta_rule(**padded, cu_seqlens=more, form=form)
    assert torch.equal(found[:rows], want)
    assert torch.equal(found_state[: len(lengths)], want_state)
    assert not found_state[len(lengths) :].any()
