"""An episode over the cap: taken apart between roots without a change of the loss, or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octopus_trl import prepare_model
from octopus_trl.models import spec_of
from octopus_trl.models.packed import run_packed
from octopus_trl.trace import Segment, ThreadRecord, Trace
from octopus_trl.train.loss import MEANS, PEAKS, LossSettings, row_loss
from octopus_trl.train.meter import Meter
from octopus_trl.train.parts import parts, take
from octopus_trl.train.rows import (
    TokenRule,
    Tree,
    build_row,
    logical_tokens,
    num_scored,
    plan_rows,
)
from tests.tiny import random_trace, tiny_hybrid

SETTINGS = LossSettings(
    beta=0.0, epsilon_low=0.2, epsilon_high=0.2, weight_cap=None, correct_kl=False
)


def three_roots() -> Trace:
    """Three fresh contexts: the second mounts the first, the third stands alone and rewinds."""
    segments = [
        Segment(0, 0, None, "prompt", [1, 2, 3]),
        Segment(1, 0, 0, "action", [4, 5], start=3, logps=[-1.0, -2.0]),
        Segment(2, 1, None, "prompt", [6, 7]),
        Segment(3, 1, 2, "tool", [8], mounts=[1], start=5),
        Segment(4, 1, 3, "action", [9, 10, 11], start=6, logps=[-1.0, -0.5, -3.0]),
        Segment(5, 2, None, "action", [12, 13, 14], logps=[-0.1, -0.2, -0.3]),
        Segment(6, 2, 5, "tool", [15], start=3),
        Segment(7, 2, 6, "action", [16, 17], start=4, logps=[-1.5, -2.5]),
        Segment(8, 2, 5, "tool", [18], start=3),
        Segment(9, 2, 8, "action", [19], start=4, logps=[-0.7]),
    ]
    threads = [ThreadRecord(0, None, head=1), ThreadRecord(1, None, head=4)]
    threads.append(ThreadRecord(2, None, head=9))
    return Trace("e", "p", threads=threads, segments=segments).check()


def test_parts_follow_forks_and_mounts() -> None:
    assert parts(three_roots()) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize("seed", range(8))
def test_a_part_is_a_sound_trace_and_nothing_is_lost(seed: int) -> None:
    trace = random_trace(seed, roots=4, steps=9)
    found = parts(trace)
    assert sorted(segment for part in found for segment in part) == list(range(len(trace.segments)))
    cut = [take(trace, part).check() for part in found]
    assert sum(map(logical_tokens, cut)) == logical_tokens(trace)
    for part, piece in zip(found, cut, strict=True):
        for old, segment in zip(part, piece.segments, strict=True):
            assert segment.tokens == trace.segments[old].tokens
            assert segment.start == trace.segments[old].start


@pytest.mark.parametrize("rule", [TokenRule(), TokenRule("per_leaf", rewound_loss=False)])
def test_loss_and_gradient_of_the_parts_are_those_of_the_whole(rule: TokenRule) -> None:
    model = prepare_model(tiny_hybrid(layers=4))
    trace = three_roots()
    old = np.linspace(-3, -1, num_scored(trace))
    tree = Tree(trace, 0.7, old_logps=old, credit={1: 0.2, 2: -0.4})
    whole, _ = plan_rows([tree], max_row_tokens=99, max_path_tokens=None)
    apart, left_out = plan_rows([tree], max_row_tokens=11, max_path_tokens=None)
    assert (len(whole), len(apart), left_out) == (1, 2, [])
    results = []
    for planned in (whole, apart):
        rows = [build_row(part, mounts="live", tokens=rule) for part in planned]
        meter = Meter(MEANS, PEAKS)
        losses = [
            row_loss(
                run_packed(model, spec_of(model), row.packed, row.rows, row.targets),
                row,
                SETTINGS,
                num_trees=1,
                meter=meter,
            )
            for row in rows
        ]
        total = torch.stack(losses).sum()
        gradient = torch.autograd.grad(total, model.model.embed_tokens.weight)[0]
        results.append((total.detach(), gradient, rows))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-6)
    places = np.concatenate([row.places[0] for row in results[1][2]])
    assert sorted(places.tolist()) == list(range(num_scored(trace)))
    where = np.concatenate([row.where for row in results[1][2]])
    assert where[np.argsort(places)].tolist() == results[0][2][0].where.tolist()


def test_a_part_larger_than_a_row_refuses_the_whole_episode_by_name() -> None:
    planned, left_out = plan_rows(
        [Tree(three_roots(), 1.0)], max_row_tokens=10, max_path_tokens=None
    )
    assert planned == []
    assert left_out == [
        "episode e: 11 unique tokens in its largest of 2 parts, max_row_tokens is 10"
    ]
