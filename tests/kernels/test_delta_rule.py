"""The gated delta rule on CUDA against the reference in float64 (marked gpu)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octopus_trl.kernels import delta_rule as kernels
from octopus_trl.kernels._chunks import chunk_table, keep_chunk_indices, most_chunks
from octopus_trl.kernels.delta_rule import gated_delta_rule, gated_delta_step
from octopus_trl.maths import delta_rule as maths

pytestmark = pytest.mark.gpu

LENGTHS = [1, 63, 64, 0, 65, 200, 3]


def make(lengths: list[int]) -> tuple[dict[str, Any], Tensor]:
    """Draw bfloat16 inputs with slow decay, so that a state that leaks is seen far away."""
    rows, runs, heads, values, dim = sum(lengths), len(lengths), 2, 4, 128
    inputs: dict[str, Any] = {
        "q": torch.randn(rows, heads, dim),
        "k": torch.randn(rows, heads, dim),
        "v": torch.randn(rows, values, dim),
        "g": -0.05 * torch.rand(rows, values),
        "beta": torch.rand(rows, values),
        "initial_state": torch.randn(runs, values, dim, dim) / dim**0.5,
    }
    for name, value in inputs.items():
        dtype = torch.bfloat16 if name in ("q", "k", "v") else torch.float32
        inputs[name] = value.to("cuda", dtype).requires_grad_()
    return inputs, torch.tensor([0, *lengths], device="cuda").cumsum(0)


def exact(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: value.detach().cpu().double().requires_grad_() for name, value in inputs.items()}


def error(fast: Tensor, reference: Tensor) -> float:
    return float((fast.detach().cpu().double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("longest", [65_536, 0], ids=["fla's lengths", "our lengths"])
@pytest.mark.parametrize("lengths", [LENGTHS, [1], [65], [200]], ids=str)
def test_values_and_every_gradient_equal_float64(
    lengths: list[int], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_TUNED_ROWS", longest)
    inputs, cu_seqlens = make(lengths)
    wide = exact(inputs)
    o, state = gated_delta_rule(**inputs, cu_seqlens=cu_seqlens)
    o_exact, state_exact = maths.gated_delta_rule(
        **wide, cu_seqlens=cu_seqlens.cpu(), form="recurrent"
    )
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert error(o, o_exact) < 1e-2
    assert error(state, state_exact) < 1e-2
    weight, state_weight = torch.randn_like(o_exact), torch.randn_like(state_exact)
    grads = torch.autograd.grad(
        (o * weight.to(o)).sum() + (state * state_weight.to(state)).sum(), list(inputs.values())
    )
    wanted = torch.autograd.grad(
        (o_exact * weight).sum() + (state_exact * state_weight).sum(), list(wide.values())
    )
    for name, grad, want in zip(inputs, grads, wanted, strict=True):
        assert error(grad, want) < 1e-2, name


def test_a_sibling_never_moves_a_run() -> None:
    inputs, cu_seqlens = make([37, 51, 40])
    o, state = gated_delta_rule(**inputs, cu_seqlens=cu_seqlens)
    other = {name: value.detach().clone() for name, value in inputs.items()}
    other["v"][37:88] += 1
    moved, moved_state = gated_delta_rule(**other, cu_seqlens=cu_seqlens)
    keep = [*range(37), *range(88, 128)]
    assert torch.equal(moved[keep], o[keep])
    assert torch.equal(moved_state[[0, 2]], state[[0, 2]])


def test_a_step_equals_the_reference_and_does_not_depend_on_its_batch() -> None:
    inputs, _ = make([1] * 33)
    inputs["state"] = inputs.pop("initial_state")
    with torch.no_grad():
        o, state = gated_delta_step(**inputs)
        wide = {name: value.detach().cpu().double() for name, value in inputs.items()}
        o_exact, state_exact = maths.gated_delta_step(**wide)
        assert error(o, o_exact) < 1e-2
        assert error(state, state_exact) < 1e-5
        part, part_state = gated_delta_step(**{n: x[5:9] for n, x in inputs.items()})
    assert torch.equal(part, o[5:9])
    assert torch.equal(part_state, state[5:9])


@pytest.mark.parametrize("lengths", [[1], [63], [64, 1], [5, 0, 65]], ids=str)
def test_padded_to_a_size_a_run_keeps_its_bits_and_an_empty_run_its_state(
    lengths: list[int],
) -> None:
    """Rows of no run hold NaN, and further chunks lie past the end, as in a captured pass."""
    inputs, bounds = make(lengths)
    rows, num, runs = 128, sum(lengths), len(lengths)
    more = torch.cat([bounds, bounds[-1:].expand(4)])
    padded: dict[str, Any] = {
        name: torch.cat([value, value.new_full((rows - num, *value.shape[1:]), float("nan"))])
        for name, value in inputs.items()
    }
    state = inputs["initial_state"]
    padded["initial_state"] = torch.cat([state, state.new_zeros(4, *state.shape[1:])])
    table = chunk_table(more.cpu().numpy(), most_chunks(rows, runs + 4))
    keep_chunk_indices(more, torch.from_numpy(table).cuda())
    with torch.no_grad():
        want, want_state = gated_delta_rule(**inputs, cu_seqlens=bounds)
        found, found_state = gated_delta_rule(**padded, cu_seqlens=more)
    assert torch.equal(found[:num], want)
    assert torch.equal(found_state[:runs], want_state)
    assert not found_state[runs:].any()
