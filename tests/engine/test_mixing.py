"""Turns that draw and turns that are given text share iterations, and neither starves the other."""

from __future__ import annotations

from typing import Any

import pytest

from octopus_trl.engine import Engine, pipelined
from octopus_trl.engine.fused_runner import FusedRunner
from octopus_trl.engine.graphs import DecodeSteps
from octopus_trl.engine.runner import Runner
from octopus_trl.protocols import SamplingParams
from tests.engine.conftest import small_engine, tokens

CHUNK, BESIDE = 16, 8
GIVEN = (70, 3, 41, 16, 90)


@pytest.fixture(params=["own", "fused", "exact"])
def engine(request: pytest.FixtureRequest, hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(pipelined, "MOST_BESIDE", BESIDE)
    monkeypatch.setattr(pipelined, "MOST_ALONG", 0)
    settings: dict[str, Any] = {"prefill_chunk": CHUNK, "fused": request.param != "own"}
    if request.param == "exact":
        settings["decode_width"] = 8
    return small_engine(hybrid, **settings)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Given tokens of each prefill pass, and 0 for each decode step, in order."""
    seen: list[int] = []
    prefill, decode = Runner.prefill, Runner.decode
    feed, step = FusedRunner.feed, DecodeSteps.feed

    def prefills(self: Any, growth: Any, text: Any) -> None:
        seen.append(len(text))
        prefill(self, growth, text)

    def feeds(self: Any, parts: Any) -> None:
        seen.append(sum(len(part.tokens) for part in parts))
        feed(self, parts)

    def decodes(*args: Any) -> None:
        seen.append(0)
        decode(*args)

    def steps(*args: Any, **options: Any) -> Any:
        seen.append(0)
        return step(*args, **options)

    monkeypatch.setattr(Runner, "prefill", prefills)
    monkeypatch.setattr(Runner, "decode", decodes)
    monkeypatch.setattr(FusedRunner, "feed", feeds)
    monkeypatch.setattr(DecodeSteps, "feed", steps)
    return seen


def between_steps(passes: list[int]) -> list[int]:
    """Given tokens between each two decode steps."""
    sums = [0]
    for count in passes:
        if count:
            sums[-1] += count
        else:
            sums.append(0)
    return sums[1:-1]


def run_beside(engine: Engine, passes: list[int]) -> dict[int, tuple[list[int], list[int]]]:
    """Draws and the iteration of the last one, by what a turn was given; 0 drew from the start."""
    root = engine.open(tokens(9))
    turns: dict[int, int] = {}
    params = SamplingParams(seed=3, max_tokens=60)
    turns[engine.submit(engine.fork(root), [], params, until=())] = 0
    for _ in range(3):
        engine.step()
    passes.clear()
    for index, count in enumerate(GIVEN):
        params = SamplingParams(seed=index, max_tokens=4)
        ticket = engine.submit(engine.fork(root), tokens(count, index), params, until=())
        turns[ticket] = count
    found: dict[int, tuple[list[int], list[int]]] = {}
    iteration = 0
    while engine.has_work:
        iteration += 1
        for one in engine.step():
            found[turns[one.ticket]] = (one.tokens, [iteration])
        engine.check_integrity()
    return found


def test_a_turn_that_draws_waits_for_one_pass_between_two_tokens(
    engine: Engine, passes: list[int]
) -> None:
    run_beside(engine, passes)
    assert sum(passes) == sum(GIVEN), "the text was fed in passes beside the steps"
    exact = engine._paths.passes is not None and engine._paths.passes.exact
    own = engine._paths.passes is None
    most = 2 * CHUNK - 1 if exact else CHUNK if own else BESIDE
    # The first turn draws 60 tokens, which is longer than the text takes.
    assert max(between_steps(passes)) <= most


def test_text_gets_on_at_every_step_and_the_oldest_first(engine: Engine, passes: list[int]) -> None:
    found = run_beside(engine, passes)
    gaps = between_steps(passes)
    last = max(place for place, count in enumerate(gaps) if count)
    assert all(gaps[: last + 1]), "no step goes by without text while there is some"
    ends = {count: iterations[0] for count, (_, iterations) in found.items()}
    assert ends[70] < ends[41] < ends[90], "turns of more than a chunk end in their order"


def test_what_a_turn_draws_does_not_depend_on_the_text_beside_it(
    hybrid: Any, engine: Engine, passes: list[int]
) -> None:
    found = run_beside(engine, passes)
    alone = small_engine(hybrid, prefill_chunk=CHUNK)
    for seed, count in [(3, 0), *enumerate(GIVEN)]:
        cursor = alone.extend(alone.open(tokens(9)), tokens(count, seed) if count else [])
        params = SamplingParams(seed=seed, max_tokens=4 if count else 60)
        [(want, _)] = alone.generate([cursor], params, until=())
        assert found[count][0] == want
