"""What a packed pass launches: recurrent calls by branching depth, one plan for every layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octopus_trl import Trace, prepare_model
from octopus_trl.maths import attention, delta_rule
from octopus_trl.models import spec_of
from octopus_trl.models.context import LevelRows, by_level
from octopus_trl.models.packed import run_packed
from octopus_trl.trace import Segment, ThreadRecord
from octopus_trl.train.rows import Tree, build_row
from tests.tiny import tiny_hybrid


def tree(parents: list[int | None]) -> Trace:
    """Segments of three tokens; the kinds alternate, so that turns are many."""
    segments = [
        Segment(i, 0, parent, "prompt" if i == 0 else ("tool", "action")[i % 2], [i % 90, 5, 7])
        for i, parent in enumerate(parents)
    ]
    threads = [ThreadRecord(0, None, head=len(parents) - 1)]
    return Trace("e", "p", threads=threads, segments=segments).place()


def score(model: Any, trace: Trace) -> torch.Tensor:
    row = build_row([Tree(trace, 1.0)], mounts="live")
    return run_packed(model, spec_of(model), row.packed, row.rows, row.targets)


def comb(teeth: int) -> list[int | None]:
    """A trunk that forks a one-segment child at each of its turns."""
    parents: list[int | None] = [None]
    trunk = 0
    for _ in range(teeth):
        parents += [trunk, trunk]
        trunk = len(parents) - 1
    return parents


@pytest.mark.parametrize(
    ("parents", "depth"),
    [
        ([None, *range(40)], 1),  # forty turns of one thread
        ([None, *[0] * 30], 2),  # thirty children of one turn
        ([None, *[0] * 9, *range(1, 10), *range(10, 19)], 2),  # nine children of three turns
        (comb(5), 6),  # a fork at each of five turns
    ],
    ids=["turns", "children", "turns of children", "comb"],
)
def test_recurrent_calls_grow_with_branching_depth_alone(
    monkeypatch: pytest.MonkeyPatch, parents: list[int | None], depth: int
) -> None:
    calls = []
    rule = delta_rule.gated_delta_rule

    def count(q: torch.Tensor, **named: Any) -> Any:
        calls.append(len(named["cu_seqlens"]) - 1)
        return rule(q, **named)

    monkeypatch.setattr(delta_rule, "gated_delta_rule", count)
    model = prepare_model(tiny_hybrid(layers=4))
    with torch.no_grad():
        score(model, tree(parents))
    assert len(calls) == 3 * depth
    leaves = len(set(range(len(parents))) - set(parents))
    assert sum(calls) <= 3 * 2 * leaves


@pytest.mark.parametrize("mount_layers", ["attention", [3]])
def test_checkpointing_keeps_one_plan_for_all_layers_and_both_directions(
    monkeypatch: pytest.MonkeyPatch, mount_layers: Any
) -> None:
    plans = []
    attend = attention.dag_attention

    def note(q: torch.Tensor, *, plan: Any, **named: Any) -> torch.Tensor:
        plans.append(plan)
        return attend(q, plan=plan, **named)

    monkeypatch.setattr(attention, "dag_attention", note)
    model = prepare_model(tiny_hybrid(layers=8), mount_layers=mount_layers)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    score(model, tree([None, 0, 0, 1, 2])).sum().backward()
    assert len(plans) == 4, "two layers, forward and computed again"
    distinct = {id(plan) for plan in plans}
    assert len(distinct) == (1 if mount_layers == "attention" else 2)


def test_levels_share_one_split_whose_gradient_is_one_concatenation() -> None:
    bounds = [(0, 4), (4, 5), (5, 9)]
    levels = [LevelRows(lo, hi, torch.tensor([0, hi - lo]), hi - lo == 1) for lo, hi in bounds]
    x, y = (torch.randn(9, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found = list(by_level(levels, x * 2, y))
    assert [level for level, _ in found] == levels
    assert len({part.grad_fn for _, (part, _) in found}) == 1
    total = torch.stack([(a * b).sum() * (at + 1) for at, (_, (a, b)) in enumerate(found)]).sum()
    times = torch.tensor([1.0] * 4 + [2.0] + [3.0] * 4)[:, None]
    assert torch.equal(torch.autograd.grad(total, x)[0], 2 * times * y)
