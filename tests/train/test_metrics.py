"""Figures: every one is in the table, FLOPs and speed by hand, histograms where wandb is."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from octopus_trl import prepare_model
from octopus_trl.errors import ConfigError
from octopus_trl.models import spec_of
from octopus_trl.models.packed import pack
from octopus_trl.train import credit, flops, histograms, loss, metrics, records
from octopus_trl.train.meter import Meter
from octopus_trl.train.rows import logical_tokens
from tests.oracles import flatten
from tests.tiny import random_trace, tiny_dense, tiny_hybrid, with_lora
from tests.train.runs import asked_rows, make_trainer, replayed


def test_the_table_of_metrics_is_current() -> None:
    assert metrics.DOCUMENT.read_text(encoding="utf-8") == metrics.render(), (
        "docs/metrics.md is old: run python -m octopus_trl.train.metrics"
    )


def test_every_figure_that_is_measured_is_in_the_table() -> None:
    names = [
        *loss.MEANS, *loss.PEAKS, *flops.MEANS, *flops.PEAKS, *credit.MEANS,
        *records.GENERATION_MEANS, *records.GENERATION_PEAKS,
    ]  # fmt: skip
    assert [name for name in names if not metrics.is_known(name)] == []
    assert set(metrics.HISTOGRAMS) == set(histograms.distributions([], []))


class Tracker(TrainerCallback):
    """A tracker like any other: it gets what the Trainer logs."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Any]]]:
    tracker = Tracker()
    trainer = make_trainer(
        tmp_path_factory.mktemp("tracked"),
        None,
        asked_rows(2),
        eval_rows=asked_rows(2),
        eval_strategy="steps",
        eval_steps=1,
        max_steps=2,
        beta=0.1,
        peak_tflops=1e-3,
        callbacks=[tracker],
    )
    with replayed():
        trainer.train()
    return trainer, tracker.logs


def test_a_tracker_gets_every_figure_and_each_is_in_the_table(tracked: Any) -> None:
    _, logs = tracked
    assert {name for entry in logs for name in entry if not metrics.is_known(name)} == set()
    steps = [entry for entry in logs if "loss" in entry]
    held_out = [entry for entry in logs if "eval_loss" in entry]
    assert (len(steps), len(held_out)) == (2, 2)
    for name in ("tree/z", "advantage/abs", "ratio/mean", "speed/train_tokens_per_s", "speed/mfu"):
        assert all(name in entry for entry in steps), name
    for name in ("reward", "rollout_kl/mean", "tree/z", "time/generate_s"):
        assert all(f"eval_{name}" in entry for entry in held_out), name
    assert steps[0]["memory/peak_host_gib"] > 0
    assert "memory/peak_gib" not in steps[0]  # no CUDA device


def test_speed_is_work_over_time(tracked: Any) -> None:
    _, logs = tracked
    for entry in logs:
        if "loss" not in entry:
            continue
        tflops = entry["speed/train_tflops_per_s"]
        assert entry["speed/mfu"] == pytest.approx(tflops / 1e-3)
        packed = entry["speed/train_tokens_per_s"] * entry["time/train_s"]
        assert packed == pytest.approx(entry["packing/row_tokens"], rel=1e-6)  # of one row
        assert entry["speed/train_logical_tokens_per_s"] > entry["speed/train_tokens_per_s"]


def test_tensorboard_gets_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is an extra: pip install tensorboard")
    trainer = make_trainer(tmp_path, None, asked_rows(2), report_to="tensorboard")
    with replayed():
        trainer.train()
    assert list(tmp_path.rglob("events.out.tfevents*"))


@pytest.mark.parametrize("seed", range(3))
def test_visible_pairs_are_those_of_the_written_out_mask(seed: int) -> None:
    trace = random_trace(seed)
    row, flat = pack([trace]), flatten(trace)
    assert flops.visible_pairs(row, mounts=False) == int(flat.tree.sum())
    assert flops.visible_pairs(row, mounts=True) == int((flat.tree | flat.mounted).sum())
    assert flops.row_logical_tokens(row) == logical_tokens(trace)


def test_flops_of_a_row_follow_the_equation() -> None:
    model = prepare_model(tiny_dense(0, layers=2), mount_layers=[1])
    spec, row = spec_of(model), pack([random_trace(1)])
    tokens, scored = row.num_rows, 7
    linear = sum(
        m.weight.numel()
        for n, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and n != "lm_head"
    )
    head = model.lm_head.weight.numel()
    pairs = flops.visible_pairs(row, mounts=False) + flops.visible_pairs(row, mounts=True)
    attention = 4 * spec.num_heads * spec.head_dim * pairs
    counted = flops.ModelFlops.of(model, spec)
    forward = 2 * tokens * linear + 2 * scored * head
    assert counted.of_row(row, scored, trains=False) == forward + attention
    whole = 2 * forward + 2 * tokens * linear + 3 * attention
    assert counted.of_row(row, scored, trains=True) == whole


def test_frozen_weights_pay_for_no_gradient_of_their_own() -> None:
    model = prepare_model(with_lora(tiny_hybrid(0)))
    spec, row = spec_of(model), pack([random_trace(1)])
    counted = flops.ModelFlops.of(model, spec)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert counted.trained == adapters < counted.linear
    state = 6 * np.prod(spec.state_shape) * row.num_rows * len(spec.recurrent_layers)
    mixers = state + counted.attention(row, spec.attention_layers[0])
    forward = counted.of_row(row, 5, trains=False) - mixers
    expected = 2 * forward + 2 * row.num_rows * adapters + 3 * mixers
    assert counted.of_row(row, 5, trains=True) == pytest.approx(expected)


def test_a_cpu_has_no_peak_and_so_no_mfu_unless_one_is_given() -> None:
    assert flops.peak_tflops(torch.device("cpu"), None) is None
    assert flops.peak_tflops(torch.device("cpu"), 2.0) == 2.0
    meter = Meter(flops.MEANS, flops.PEAKS)
    model = prepare_model(tiny_hybrid(0))
    speed = flops.Speed(model, spec_of(model), None)
    speed.row(pack([random_trace(0)]), 3, trains=True)
    speed.seconds(2.0)
    speed.flush(meter, torch.device("cpu"))
    found = meter.reduce(SimpleNamespace(num_processes=1))
    assert "speed/mfu" not in found
    tokens = sum(random_trace(0).lengths)
    assert found["speed/train_tokens_per_s"] == tokens / 2


def test_active_tokens_are_what_no_rewind_left_and_branches_are_leaf_chains() -> None:
    trace = random_trace(3)
    meter = Meter(records.GENERATION_MEANS, records.GENERATION_PEAKS)
    records.measure_episodes(meter, [trace])
    found = meter.reduce(SimpleNamespace(num_processes=1))
    live: set[int] = set()
    for thread in trace.threads:
        node = thread.head
        while node is not None and trace.segments[node].thread == thread.id:
            live.add(node)
            node = trace.segments[node].parent
    gone = sum(
        len(s.tokens) for s in trace.segments if s.id not in live and trace.threads[s.thread].head
        is not None
    )  # fmt: skip
    total = sum(trace.lengths)
    assert found["episode/explored_tokens"] == total
    assert total - gone <= found["episode/active_tokens"] <= total
    parents = set(trace.parents)
    assert found["episode/branches"] == sum(s.id not in parents for s in trace.segments)


class Wandb:
    """As much of wandb as is used."""

    def __init__(self, run: Any) -> None:
        self.run, self.logged = run, []  # type: ignore[var-annotated]
        self.Histogram = list

    def log(self, values: Any, commit: bool) -> None:
        self.logged.append((values, commit))


ALONE = SimpleNamespace(is_main_process=True, num_processes=1)


def test_histograms_go_to_the_wandb_run_and_to_no_other_tracker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = Wandb(run=object())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(histograms, "gather_object", lambda found: found)
    values = histograms.distributions([random_trace(0), random_trace(1)], [0.5, -0.5])
    histograms.send(ALONE, ["tensorboard"], values)
    assert fake.logged == []
    histograms.send(ALONE, ["wandb"], values)
    ((drawn, commit),) = fake.logged
    assert not commit
    assert drawn["histogram/advantage"] == [0.5, -0.5]
    assert len(drawn["histogram/owned_tokens"]) == 2
    idle = Wandb(run=None)
    monkeypatch.setitem(sys.modules, "wandb", idle)
    histograms.send(ALONE, ["wandb"], values)
    assert idle.logged == []


def test_without_wandb_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(histograms, "gather_object", lambda found: found)
    with pytest.raises(ConfigError, match="pip install"):
        histograms.send(ALONE, ["wandb"], {"reward": [1.0]})
