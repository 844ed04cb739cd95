"""Mamba-2 recurrence: chunk form, recurrent form and single steps against the rule itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, get_args

import pytest
import torch
from torch import Tensor
from transformers.models.bamba.modeling_bamba import (
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)

from octopus_trl.maths.ssd import ssd, ssd_step

Form = Literal["chunk", "recurrent"]
FORMS = get_args(Form)
LENGTHS = [1, 63, 0, 64, 65, 200, 31, 129]


def make(
    lengths: list[int], dtype: torch.dtype = torch.float64, heads: int = 6, groups: int = 2
) -> tuple[dict[str, Any], Tensor]:
    """Draw inputs; slow decay, so that a state that leaks is seen far away."""
    rows, dim, size = sum(lengths), 3, 5
    inputs: dict[str, Any] = {
        "x": torch.randn(rows, heads, dim, dtype=dtype),
        "dt": 0.1 + torch.rand(rows, heads, dtype=dtype),
        "rate": -0.1 * torch.rand(heads, dtype=dtype) - 0.001,
        "keys": torch.randn(rows, groups, size, dtype=dtype),
        "queries": torch.randn(rows, groups, size, dtype=dtype),
        "skip": torch.randn(heads, dtype=dtype),
        "initial_state": torch.randn(len(lengths), heads, dim, size, dtype=dtype),
    }
    for value in inputs.values():
        value.requires_grad_()
    return inputs, torch.tensor([0, *lengths]).cumsum(0)


def naive(inputs: dict[str, Any], bounds: list[int]) -> tuple[Tensor, Tensor]:
    """Apply the rule one row and one head at a time."""
    x, dt, rate, keys, queries, skip, initial = inputs.values()
    per_group = x.shape[1] // keys.shape[1]
    outs, states = [], []
    for run, (low, high) in enumerate(pairwise(bounds)):
        heads = list(initial[run])
        for row in range(low, high):
            outputs = []
            for head in range(x.shape[1]):
                group = head // per_group
                heads[head] = heads[head] * (dt[row, head] * rate[head]).exp() + dt[
                    row, head
                ] * torch.outer(x[row, head], keys[row, group])
                outputs.append(heads[head] @ queries[row, group] + skip[head] * x[row, head])
            outs.append(torch.stack(outputs))
        states.append(torch.stack(heads))
    return torch.stack(outs), torch.stack(states)


@pytest.mark.parametrize("form", FORMS)
def test_both_forms_are_the_rule(form: Form) -> None:
    inputs, cu_seqlens = make([1, 0, 70, 3])
    y, state = ssd(**inputs, cu_seqlens=cu_seqlens, form=form)
    expected, expected_state = naive(inputs, cu_seqlens.tolist())
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, expected_state, atol=1e-12, rtol=1e-12)


def test_forms_agree_with_every_gradient_at_odd_lengths() -> None:
    inputs, cu_seqlens = make(LENGTHS)
    results = []
    for form in FORMS:
        y, state = ssd(**inputs, cu_seqlens=cu_seqlens, form=form)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        loss = (y * weights).sum() + state.square().sum()
        results.append((y, state, *torch.autograd.grad(loss, list(inputs.values()))))
    for chunk, recurrent in zip(*results, strict=True):
        torch.testing.assert_close(chunk, recurrent, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form: Form) -> None:
    inputs, cu_seqlens = make([2, 3], heads=2, groups=1)
    names = list(inputs)

    def run(*values: Tensor) -> tuple[Tensor, Tensor]:
        return ssd(**dict(zip(names, values, strict=True)), cu_seqlens=cu_seqlens, form=form)

    assert torch.autograd.gradcheck(run, tuple(inputs.values()))


def test_steps_continue_a_run_and_no_row_depends_on_its_batch() -> None:
    inputs, cu_seqlens = make([40, 40, 40], dtype=torch.float32)
    with torch.no_grad():
        _, expected = ssd(**inputs, cu_seqlens=cu_seqlens, form="recurrent")
        state, alone = inputs["initial_state"], inputs["initial_state"][1:2]
        fixed = {name: inputs[name] for name in ("rate", "skip")}
        for row in range(40):
            moving = {name: inputs[name][row::40] for name in ("x", "dt", "keys", "queries")}
            y, state = ssd_step(**moving, **fixed, state=state)
            single = {name: value[1:2] for name, value in moving.items()}
            lone, alone = ssd_step(**single, **fixed, state=alone)
            assert torch.equal(lone[0], y[1])
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(alone[0], state[1])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_equal_to_transformers(length: int) -> None:
    inputs, cu_seqlens = make([length], dtype=torch.float32)
    inputs = {name: value.detach() for name, value in inputs.items()}
    y, state = ssd(**inputs, cu_seqlens=cu_seqlens)
    scan, end = mamba2_chunk_scan(
        inputs["x"][None],
        inputs["dt"][None],
        inputs["rate"],
        inputs["keys"][None],
        inputs["queries"][None],
        chunk_size=64,
        D=inputs["skip"],
        initial_states=inputs["initial_state"],
        return_final_states=True,
    )
    torch.testing.assert_close(y, scan[0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(state, end, atol=2e-5, rtol=1e-5)
    if length == 1:
        carried = inputs["initial_state"].clone()
        wide = inputs["x"].shape
        stepped = mamba2_selective_state_update(
            carried,
            inputs["x"],
            inputs["dt"][..., None].expand(wide),
            inputs["rate"][:, None, None].expand(carried.shape[1:]),
            inputs["keys"],
            inputs["queries"],
            inputs["skip"][:, None].expand(wide[1:]),
        )
        torch.testing.assert_close(y, stepped, atol=1e-5, rtol=1e-5)


def test_nothing_leaks_between_runs_and_empty_packs_keep_their_states() -> None:
    inputs, cu_seqlens = make([5, 70, 3])
    inputs = {name: value.detach().clone() for name, value in inputs.items()}
    y, state = ssd(**inputs, cu_seqlens=cu_seqlens)
    for name in ("x", "dt", "keys", "queries"):
        inputs[name][5:75] = float("nan")
    inputs["initial_state"][1] = float("nan")
    poisoned, poisoned_state = ssd(**inputs, cu_seqlens=cu_seqlens)
    assert torch.equal(poisoned[:5], y[:5])
    assert torch.equal(poisoned[75:], y[75:])
    assert torch.equal(poisoned_state[::2], state[::2])
    empty, cu_seqlens = make([0, 0])
    y, state = ssd(**empty, cu_seqlens=cu_seqlens)
    assert y.shape == (0, 6, 3)
    assert torch.equal(state, empty["initial_state"])
