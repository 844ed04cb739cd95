"""The update's benchmark: frozen mixes at their ratios, honest rows beside them, right counts."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octopus_trl import Trace, prepare_model
from octopus_trl.maths import dag
from octopus_trl.train.rows import logical_tokens
from scripts.bench_cases import command, layers, mix, train, train_mix, train_ways
from scripts.bench_cases.limits import H200, Rates, Shapes
from scripts.bench_cases.setting import Setting, WrongResult
from scripts.bench_cases.sizes import SIZES
from scripts.bench_cases.train_ways import Way
from scripts.bench_cases.train_work import UpdateFlops, chain_rows, seen_pairs, without_reads
from tests.tiny import VOCAB, random_trace, tiny_hybrid


def frozen(name: str, scale: int = 1) -> Trace:
    return mix.trace_of(mix.read(train_mix.path_of(name)).shortened(scale), VOCAB)


@pytest.mark.parametrize("name", train_mix.SHAPES)
def test_a_frozen_mix_is_what_its_function_makes_and_has_its_ratio(name: str) -> None:
    made = mix.dumps(train_mix.train_mix(name))
    assert gzip.decompress(train_mix.path_of(name).read_bytes()) == made
    trace = frozen(name)
    ratio = train_mix.SHAPES[name].ratio
    assert ratio <= train_mix.dedup_ratio(trace) < 1.02 * ratio
    kinds = {segment.kind for segment in trace.segments}
    assert kinds == {"prompt", "tool", "action"}
    assert any(segment.mounts for segment in trace.segments)


@pytest.mark.parametrize("seed", range(5))
def test_separate_rows_hold_each_chain_and_count_each_sampled_token_once(seed: int) -> None:
    trace = random_trace(seed)
    rows = chain_rows(trace)
    assert sum(sum(row.trace.lengths) for row in rows) == logical_tokens(trace)
    counted = [source for row in rows for source in row.sources]
    actions = [segment.id for segment in trace.segments if segment.kind == "action"]
    assert sorted(counted) == actions
    for row in rows:
        kept = [s.tokens for s in row.trace.segments if s.kind == "action"]
        assert kept == [trace.segments[source].tokens for source in row.sources]
        assert all(s.kind != "prompt" and not s.mounts for s in row.trace.segments)


@pytest.mark.parametrize("seed", range(4))
def test_attending_pairs_are_those_of_the_dense_mask(seed: int) -> None:
    trace = random_trace(seed, max_tokens=200)
    plan = dag.layout(trace.parents, trace.mounts, trace.lengths).plan
    segment = plan.segment_of_row
    mask = (plan.visible | plan.mounted)[segment][:, segment]
    mask |= (segment[:, None] == segment) & np.tri(len(segment), dtype=bool)
    assert seen_pairs(plan) == mask.sum()


@pytest.fixture(scope="module")
def model() -> Any:
    return prepare_model(tiny_hybrid()).requires_grad_(False)


def test_flops_count_each_weight_twice_either_way(model: Any) -> None:
    """A chain of one root: 4 FLOPs a weight of linear layers a token, 4 of the head a target."""
    shapes = Shapes.of(model)
    row = train.row_of([frozen("train_r3", scale=512)])
    flops = UpdateFlops(shapes, hidden_size=48, vocab_size=VOCAB, adapter_weights=0).count(row)
    rows, scored = row.packed.num_rows, len(row.targets)
    rest = flops - rows * 2 * shapes.product_flops - 4 * 48 * VOCAB * scored
    pairs = seen_pairs(row.packed.layout.plan) * 4 * shapes.num_attention * 4 * 16
    assert rest == 3 * pairs + 18 * rows * shapes.num_recurrent * shapes.state_elements


def test_rows_that_differ_end_the_case(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = frozen("train_r3", scale=512)
    train.check_rows(model, trace, torch.float32, Way())
    honest = train.score
    calls = iter((0.0, 0.01))
    monkeypatch.setattr(train, "score", lambda *given: honest(*given) + next(calls))
    with pytest.raises(WrongResult, match="packed against rows: .*: they differ"):
        train.check_rows(model, trace, torch.float32, Way())


def test_layers_that_compute_something_else_end_the_case(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = frozen("train_r3", scale=512)
    train_ways.check_ways(model, trace, torch.float32)
    honest = train_ways.score
    calls = iter((0.0, 0.0, 0.01))
    monkeypatch.setattr(train_ways, "score", lambda *given: honest(*given) + next(calls))
    with pytest.raises(WrongResult, match="fused layers against stock layers: .*: they differ"):
        train_ways.check_ways(model, trace, torch.float32)


def test_what_does_not_fit_the_budget_is_not_run(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rates, "of", lambda *_: H200)
    trace = frozen("train_r3", scale=512)
    setting = Setting(sizes=SIZES["tiny"], budget_s=0.0, kept={"model": model})
    found = list(train_ways.ways(setting, model, trace, Way(), (1.0, 1.0), 0.1))
    assert [line.value for line in found] == [None] * 4
    assert all("budget 0 s" in line.case for line in found)
    flops = UpdateFlops(Shapes.of(model), hidden_size=48, vocab_size=VOCAB, adapter_weights=0)
    rows, rate = train.compare(setting, model, trace, flops, Way(), (1.0, 1.0))
    assert rows.value is None
    assert rate.value == sum(trace.lengths)


def test_without_reads_nothing_is_mounted_and_all_tokens_stay() -> None:
    trace = frozen("train_r8", scale=64)
    tree = without_reads(trace).check()
    assert tree.lengths == trace.lengths
    assert not any(segment.mounts for segment in tree.segments)


def test_the_case_runs_on_a_cpu_and_leaves_the_model_as_it_was(
    model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Rates, "of", lambda *_: H200)
    monkeypatch.setattr(train_ways, "REPEATS", 1)
    profiled: list[str] = []
    monkeypatch.setattr(train, "write_profile", lambda path, *_, **__: profiled.append(path.name))
    names = [name for name, _ in model.named_parameters()]
    sizes = replace(SIZES["tiny"], train_scale=512, train_tokens=240)
    setting = Setting(
        sizes=sizes, mixes=["train_r3"], fused_layers=True, profile=tmp_path, kept={"model": model}
    )
    found = list(command.run_case("train", setting, asked=True))
    assert not any(failed for _, failed in found), found
    lines = [line for line, _ in found]
    ways, (speed, tokens, memory), rest = lines[:4], lines[4:7], lines[7:]
    host, longest, peak, *tiled = rest
    assert [line.unit for line in ways] == [
        *["times faster than stock layers"] * 2,
        *["times as long"] * 2,
    ]
    assert all(line.value and line.baseline[1] for line in ways)
    assert profiled == ["train_r3.txt", "row_226.txt", "row_706.txt"]
    assert speed.unit == "times faster than separate rows"
    assert speed.limit == pytest.approx(train_mix.dedup_ratio(frozen("train_r3", scale=512)))
    assert tokens.share is not None
    assert 0 < tokens.share < 1
    assert memory.value is None
    assert peak.value is None
    assert host.value is not None
    assert longest.value is not None
    what = "706 unique tokens in one row, fused layers, MLPs by 30 and inputs"
    assert tiled[1].case.startswith(what)
    assert tiled[1].case.endswith("first call")
    assert "first call" not in longest.case
    assert [line.value is None for line in tiled] == [False, False, True]
    assert not any(getattr(module, "octopus_tile_tokens", None) for module in model.modules())
    assert [name for name, _ in model.named_parameters()] == names
    assert not any(p.requires_grad for p in model.parameters())


def test_single_layers_are_timed_on_a_cpu(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rates, "of", lambda *_: H200)
    monkeypatch.setattr(layers, "REPEATS", 1)
    setting = Setting(sizes=replace(SIZES["tiny"], layer_tokens=192), kept={"model": model})
    found = list(command.run_case("layers", setting, asked=True))
    assert not any(failed for _, failed in found), found
    assert [line.unit for line, _ in found] == ["ms"] * 4
    assert all(line.value for line, _ in found)
