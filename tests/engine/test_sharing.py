"""Prompts share what they have in common; whatever is computed all the same says why."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from octopus_trl.engine import Engine
from octopus_trl.engine.prompts import REMEMBERED, Forgotten
from octopus_trl.errors import StatesExhausted
from octopus_trl.protocols import SamplingParams
from tests.engine.conftest import small_engine, tokens
from tests.tolerances import LOGP

SYSTEM = tokens(37, 50)


def question(index: int, length: int = 6) -> list[int]:
    """Draw a prompt: the system text, then a question whose first token is its own."""
    return [*SYSTEM, index, *tokens(length - 1, 60 + index)]


def assert_plain(engine: Engine, cursor: Any, ids: list[int]) -> None:
    with torch.no_grad():
        plain = engine.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    ours = engine.logits(cursor).log_softmax(-1)
    torch.testing.assert_close(ours, plain.log_softmax(-1), atol=LOGP, rtol=0)


def computed(engine: Engine) -> int:
    """Sum what went through the model and was not drawn; each token has one reason."""
    stats = engine.stats()
    parts = ("prefilled", "re_prefilled", "replayed", "branched")
    total = sum(stats[part] for part in parts)
    assert total == sum(stats["misses"].values())
    return total


def test_the_second_prompt_makes_the_state_where_it_parts_and_the_third_finds_it(
    hybrid: Any,
) -> None:
    engine = small_engine(hybrid, prefill_chunk=16)
    prompts = [question(index) for index in range(4)]
    seen = []
    for prompt in prompts:
        before = engine.stats()
        cursor = engine.open(prompt)
        after = engine.stats()
        seen.append(
            {name: after[name] - before[name] for name in ("prefilled", "reused", "branched")}
        )
        assert_plain(engine, cursor, prompt)
        engine.check_integrity()
    assert seen[0] == {"prefilled": 43, "reused": 0, "branched": 0}
    assert seen[1] == {"prefilled": 6, "reused": 37, "branched": 37}
    assert seen[2] == seen[3] == {"prefilled": 6, "reused": 37, "branched": 0}
    stats = engine.stats()
    assert (stats["replayed"], stats["misses"]["branch"]) == (0, 37)
    assert computed(engine) == 43 + 37 + 3 * 6


def test_a_later_branch_point_is_built_from_the_nearest_state(hybrid: Any) -> None:
    engine = small_engine(hybrid)
    long = tokens(30, 1)
    engine.open(long)
    for prompt, known, branched in (
        ([*long[:20], 96, *tokens(5, 9)], 20, 20),
        ([*long[:24], 96, *tokens(3, 8)], 24, 4),
        ([*long[:24], 95], 24, 0),
        (long[:22], 22, 2),
        (long, 30, 0),
        ([*long, 3], 30, 0),
        ([*long[:7], 96], 7, 7),
    ):
        before = engine.stats()
        cursor = engine.open(prompt)
        after = engine.stats()
        assert after["reused"] - before["reused"] == known
        assert after["branched"] - before["branched"] == branched
        assert after["prefilled"] - before["prefilled"] == len(prompt) - known
        assert_plain(engine, cursor, prompt)
        engine.check_integrity()
    assert engine.stats()["replayed"] == 0


def test_shared_tokens_take_no_page_twice(model: Any) -> None:
    engine = small_engine(model, page_size=1)
    for index in range(5):
        engine.open(question(index))
    assert engine.stats()["pages"] == 37 + 5 * 6
    assert engine.stats()["reused"] == 4 * 37


def test_a_branch_whose_state_was_dropped_says_so(hybrid: Any) -> None:
    engine = small_engine(hybrid, num_states=3)
    for index in range(2):
        engine.close(engine.open(question(index)))
    cursors = [engine.open(tokens(4, 70 + index)) for index in range(3)]
    assert engine.stats()["evicted_states"] > 0
    before = engine.stats()["misses"]
    cursor = engine.open(question(2))
    after = engine.stats()["misses"]
    assert after["state_dropped"] - before["state_dropped"] == 37
    assert after["branch"] == before["branch"] == 37
    assert_plain(engine, cursor, question(2))
    computed(engine)
    assert len(cursors) == 3


def test_without_a_slot_an_opening_is_refused_before_any_change(hybrid: Any) -> None:
    engine = small_engine(hybrid, num_states=2)
    engine.close(engine.open(question(0)))
    busy = [engine.open(tokens(4, seed)) for seed in (1, 2)]
    for cursor in busy:
        engine.submit(cursor, [5], SamplingParams(max_tokens=30, seed=1), until=())
    engine.step()
    engine.step()
    before = engine.stats()
    with pytest.raises(StatesExhausted):
        engine.open(question(1))
    engine.check_integrity()
    after = engine.stats()
    for name in ("opens", "prefilled", "reused", "pages", "cursors", "context_tokens"):
        assert after[name] == before[name], name


def test_text_that_was_evicted_and_comes_back_is_told_from_new_text(model: Any) -> None:
    engine = small_engine(model, num_pages=14)
    engine.close(engine.open(question(0)))
    engine.close(engine.open(tokens(52, 3)))  # 13 of 14 pages: everything else goes
    before = engine.stats()
    engine.open(question(1, length=8))
    after = engine.stats()
    assert after["misses"]["evicted"] - before["misses"]["evicted"] == 37
    assert after["misses"]["first_seen"] - before["misses"]["first_seen"] == 8
    assert after["re_prefilled"] - before["re_prefilled"] == 37
    computed(engine)
    engine.check_integrity()


@pytest.mark.parametrize("by", ["weights", "sleep"])
def test_text_of_older_weights_is_prefilled_again_and_counted_as_stale(model: Any, by: str) -> None:
    engine = small_engine(model)
    engine.open(question(0))
    if by == "weights":
        engine.set_policy_version(1)
    else:
        engine.sleep()
        engine.wake()
    before = engine.stats()
    engine.open(question(1))
    after = engine.stats()
    gained = {name: after["misses"][name] - before["misses"][name] for name in after["misses"]}
    assert (gained["stale"], gained["first_seen"], sum(gained.values())) == (37, 6, 43)
    assert after["prefilled"] - before["prefilled"] == 43
    assert (after["reused"], after["re_prefilled"]) == (0, 0)


def test_what_is_remembered_of_evicted_prompts_is_bounded() -> None:
    forgotten = Forgotten()
    size = REMEMBERED // 4
    for index in range(9):
        forgotten.add(forgotten.evicted, [index, *range(size)])
    assert forgotten.evicted.num_tokens <= REMEMBERED
    assert forgotten.evicted.overlap([8, 0, 1])[0] == 3
    assert forgotten.evicted.overlap([0, 0, 1])[0] == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_prompts_reuse_exactly_what_an_earlier_one_begins_with(
    model: Any, seed: int
) -> None:
    draws = random.Random(seed)
    engine = small_engine(model, num_pages=2000, num_states=200)
    opened: list[list[int]] = []
    for _ in range(12):
        stem = draws.choice(opened)[: draws.randint(0, 25)] if opened else []
        prompt = [*stem, *(draws.randrange(3) for _ in range(draws.randint(1, 9)))]
        shareable = max((_common(prompt, other) for other in opened), default=0)
        before = engine.stats()
        cursor = engine.open(prompt)
        after = engine.stats()
        assert after["reused"] - before["reused"] == shareable
        assert after["prefilled"] - before["prefilled"] == len(prompt) - shareable
        if draws.random() < 0.4:
            assert_plain(engine, cursor, prompt)
        engine.check_integrity()
        opened.append(prompt)
    stats = engine.stats()
    assert (stats["replayed"], stats["re_prefilled"]) == (0, 0)
    assert stats["context_tokens"] == sum(map(len, opened))
    assert stats["hit_rate"] == pytest.approx(1 - computed(engine) / sum(map(len, opened)))


def _common(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other))
    )


def test_hit_rate_is_the_share_of_flat_re_prefill_that_is_saved(model: Any) -> None:
    """Every turn of a flat agent puts its whole chain through the model."""
    engine = small_engine(model)
    flat = new = 0

    def turn(cursor: Any, given: list[int], seed: int) -> None:
        nonlocal flat, new
        flat += cursor.num_tokens + len(given)
        new += len(given)
        engine.submit(cursor, given, SamplingParams(max_tokens=7, seed=seed), until=())
        while engine.has_work:
            engine.step()

    for rollout in range(2):
        root = engine.open(question(0))
        if rollout == 0:
            new += len(question(0))
        turn(root, [], 10 * rollout)
        child = engine.fork(root)
        turn(child, tokens(5, 1), 10 * rollout + 1)
        turn(child, tokens(9, 2), 10 * rollout + 2)
        boundary = root.num_tokens
        engine.mount(root, child)
        turn(root, tokens(4, 3), 10 * rollout + 3)
        engine.rewind(root, boundary)
        turn(root, tokens(6, 4), 10 * rollout + 4)
    stats = engine.stats()
    assert stats["context_tokens"] == flat
    assert computed(engine) == stats["prefilled"] == new
    assert stats["hit_rate"] == pytest.approx(1 - new / flat)
    assert stats["hit_rate"] > 0.75


def test_text_fed_between_turns_counts_once(model: Any) -> None:
    engine = small_engine(model)
    cursor = engine.open(tokens(10))
    engine.extend(cursor, tokens(4, 1))
    assert engine.stats()["hit_rate"] == 0.0
    params = SamplingParams(max_tokens=3, seed=1)
    engine.generate([cursor], params, until=())
    assert engine.stats()["context_tokens"] == 14
    engine.generate([cursor], params, until=())
    assert engine.stats()["context_tokens"] == 14 + 17
    assert engine.stats()["hit_rate"] == pytest.approx(17 / 31)
    engine.extend(cursor, tokens(6, 1))
    engine.rewind(cursor, 12)
    engine.generate([cursor], params, until=())
    assert engine.stats()["context_tokens"] >= 14 + 17 + 6
