"""Real episodes of the shipped policy: engine, agent, trace and packed pass tell one story."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octopus_trl import Engine, EpisodeRunner, Trace, prepare_model, score_traces
from octopus_trl.agent.config import RolloutConfig
from octopus_trl.eval.seal_join_backend import SealJoinBackend, load_world
from octopus_trl.eval.seal_join_studio import WORLD_ROLLOUT
from octopus_trl.maths.objective import rollout_training_kl

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "data" / "policy" / "tiny-hybrid"
GROUP = 2


@pytest.fixture(scope="module")
def model() -> Any:
    return prepare_model(AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)).eval()


@pytest.fixture(scope="module")
def backend() -> SealJoinBackend:
    return load_world(ROOT / "data" / "seal_join", snippet_tokens=0)


def roll(
    model: Any, backend: SealJoinBackend, *, live: int, width: int | None, questions: int = 2
) -> tuple[Engine, list[Trace]]:
    engine = Engine(model, page_size=16, num_pages=2048, num_states=256, decode_width=width)
    config = replace(RolloutConfig(**WORLD_ROLLOUT), max_live_episodes=live)
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    rows = backend.world.questions("test", 2, arms=("late",), branches=(1, 2), salt_seed=3)
    rows = rows[:questions]
    runner = EpisodeRunner(engine, tokenizer, backend, config)
    return engine, runner.run(rows, group_size=GROUP, seed=7)


@pytest.fixture(scope="module")
def episodes(model: Any, backend: SealJoinBackend) -> tuple[Engine, list[Trace]]:
    return roll(model, backend, live=8, width=None)


def test_traces_keep_every_rule_and_really_branch(episodes: tuple[Engine, list[Trace]]) -> None:
    _, traces = episodes
    for trace in traces:
        trace.check()
    assert len(traces) == 2 * GROUP
    assert all(len(trace.threads) > 1 for trace in traces)
    assert any(segment.mounts for trace in traces for segment in trace.segments)


def test_the_packed_pass_gives_the_log_probabilities_that_were_sampled(
    model: Any, episodes: tuple[Engine, list[Trace]]
) -> None:
    _, traces = episodes
    with torch.no_grad():
        scores = score_traces(model, traces)
    pairs = [
        (scores[index][segment.id], torch.tensor(segment.logps))
        for index, trace in enumerate(traces)
        for segment in trace.segments
        if segment.kind == "action"
    ]
    train, rollout = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    mean, largest = rollout_training_kl(train, rollout_logps=rollout)
    assert float(mean) <= 1e-8
    assert float(largest) <= 1e-5


def test_counters_agree_with_what_the_traces_imply(episodes: tuple[Engine, list[Trace]]) -> None:
    engine, traces = episodes
    stats = engine.stats()
    prompts = {trace.prompt_id: trace.segments[0].tokens for trace in traces}
    inserted = sum(
        len(segment.tokens)
        for trace in traces
        for segment in trace.segments
        if segment.kind != "action" and segment.id
    )
    opened = sum(map(len, prompts.values()))
    assert stats["prefilled"] + stats["reused"] == inserted + GROUP * opened
    assert stats["reused"] >= (GROUP - 1) * opened
    assert stats["decoded"] == sum(trace.num_owned for trace in traces)
    assert stats["re_prefilled"] == 0
    # A flat agent would prefill the whole chain before every turn.
    flat = sum(
        len(trace.linearize(segment.parent)[0])
        for trace in traces
        for segment in trace.segments
        if segment.kind == "action" and segment.parent is not None
    )
    assert stats["context_tokens"] == flat
    computed = sum(stats["misses"].values())
    assert computed == stats["prefilled"] + stats["branched"] + stats["replayed"]
    assert stats["hit_rate"] == pytest.approx(1 - computed / flat)
    assert not any(stats["bytes_copied"].values())
    engine.check_integrity()


def test_the_same_seed_gives_the_same_traces_whatever_runs_beside(
    model: Any, backend: SealJoinBackend, episodes: tuple[Engine, list[Trace]]
) -> None:
    _, again = roll(model, backend, live=1, width=4, questions=1)
    assert len(again) == GROUP
    for one, other in zip(episodes[1], again, strict=False):
        assert [s.tokens for s in one.segments] == [s.tokens for s in other.segments]
        for segment, twin in zip(one.segments, other.segments, strict=True):
            if segment.logps is not None:
                assert segment.logps == pytest.approx(twin.logps, abs=1e-5)
