"""Likelihood and greedy choice of a trace's last segment agree with the pass that trains."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from octopus_trl import Engine, SamplingParams, prepare_model, score_traces
from octopus_trl.errors import TraceError
from octopus_trl.eval.extra_kv import extra_tokens
from octopus_trl.eval.readings import READINGS, Crossing, question_episode
from octopus_trl.trace import Trace
from octopus_trl.train.choices import score_last
from octopus_trl.train.measured import read_layers
from tests.tiny import VOCAB, random_trace, tiny_hybrid, tiny_llama

DENSE = [name for name in READINGS if name != "splice"]


def drawn(seed: int, sibling: int = 17, own: int = 9) -> Crossing:
    draw = random.Random(seed)

    def some(num: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCAB) for _ in range(num))

    return Crossing("c", some(5), some(sibling), some(own), some(4), some(3), own_next=some(2))


@pytest.mark.parametrize(
    ("build", "layers", "names"),
    [(tiny_hybrid, "attention", list(READINGS)), (tiny_llama, [1, 2], DENSE)],
)
def test_scores_and_choices_are_those_of_the_packed_pass_for_every_reading(
    build: Any, layers: Any, names: list[str]
) -> None:
    model = prepare_model(build(3), mount_layers=layers)
    traces = [question_episode(drawn(seed, 3 + seed), name) for seed in (0, 63) for name in names]
    said = score_last(model, traces, max_row_tokens=200)
    for trace, (logps, choices) in zip(traces, said, strict=True):
        with torch.no_grad():
            alone = score_traces(model, [trace])[0][-1]
        found = torch.tensor(logps, dtype=torch.float64)
        torch.testing.assert_close(found, alone.double(), rtol=0, atol=2e-5)
        for place, choice in enumerate(choices):
            other = Trace.from_dict(trace.to_dict())
            other.segments[-1].tokens[place] = choice
            with torch.no_grad():
                best = score_traces(model, [other])[0][-1][place]
            assert best >= alone[place] - 1e-5
    ahead = said[len(names) :]  # behind its reader, a sibling is jumped past by nothing
    assert len({tuple(logps) for logps, _ in ahead}) == len(names), "two readings read the same"


def test_choices_are_what_greedy_decoding_writes() -> None:
    model = prepare_model(tiny_llama(1), mount_layers=[1, 2])
    probe = drawn(5)
    engine = Engine(model, page_size=4)
    root = engine.open(probe.prompt)
    sibling, reader = engine.fork(root), engine.fork(root)
    engine.extend(sibling, probe.sibling)
    engine.extend(reader, probe.own)
    engine.mount(reader, sibling)
    engine.extend(reader, probe.question)
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    ((tokens, _),) = engine.generate([reader], greedy, until=set())
    exact = Crossing(
        "c", probe.prompt, probe.sibling, probe.own, probe.question, tuple(tokens), own_next=(1,)
    )
    ((_, choices),) = score_last(model, [question_episode(exact, "mount")])
    assert choices == tokens


@pytest.mark.parametrize("name", [n for n in READINGS if n != "none"])
def test_the_rule_of_extra_kv_is_what_the_engine_holds(name: str) -> None:
    probe, reading = drawn(7, sibling=32, own=8), READINGS[name]
    engine = Engine(prepare_model(tiny_hybrid(2)), page_size=1, num_pages=256)

    def pages(reads: bool) -> int:
        root = engine.open(probe.prompt)
        sibling, reader = engine.fork(root), engine.fork(root)
        engine.extend(sibling, probe.sibling)
        engine.extend(reader, probe.own)
        before = engine.stats()["pages"]
        if reads and reading.mounts:
            how = {"position": reading.position} if reading.exchange == "mount" else {}
            if reading.exchange == "splice":
                how = {"exchange": "splice"}
            engine.mount(reader, sibling, **how)  # type: ignore[arg-type]
        told = [*(probe.sibling if reads and reading.pastes else ()), *probe.question]
        engine.extend(reader, told)
        held = engine.stats()["pages"] - before
        for cursor in (root, sibling, reader):
            engine.close(cursor)
        return int(held)

    told = len(probe.sibling) if reading.pastes else 0
    extra = extra_tokens(reading.exchange, reading.position, len(probe.sibling), told)
    assert pages(reads=True) - pages(reads=False) == extra


def test_a_last_segment_without_a_parent_is_refused() -> None:
    trace = random_trace(0, steps=0, roots=1)
    with pytest.raises(TraceError, match="its first token needs one"):
        score_last(prepare_model(tiny_hybrid(0)), [trace])


def test_layers_are_read_from_a_command_line() -> None:
    assert read_layers("0,3-5", 8) == [0, 3, 4, 5]
    assert read_layers("attention", 3) == "attention"
    for wrong in ("3,x", "", "-1"):
        with pytest.raises(ValueError, match="must be attention, all, or indices"):
            read_layers(wrong, 8)
    with pytest.raises(ValueError, match="9-5 is empty, give 5-9"):
        read_layers("3,9-5", 12)
