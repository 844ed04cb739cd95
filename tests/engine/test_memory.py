"""Pools that run out, prompts that are shared and evicted, weights that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from octopus_trl.engine import Engine
from octopus_trl.errors import (
    ClosedCursor,
    ConfigError,
    IntegrityError,
    PagesExhausted,
    StaleVersion,
    StatesExhausted,
)
from octopus_trl.models import prepare_model
from octopus_trl.protocols import SamplingParams
from tests.engine.conftest import poison, small_engine, tokens
from tests.engine.replay import play
from tests.tiny import random_trace, tiny_dense, tiny_hybrid
from tests.tolerances import LOGP


def plain_logps(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    return logits.log_softmax(-1)


def assert_at(engine: Engine, cursor: Any, ids: list[int]) -> None:
    logps = engine.logits(cursor).log_softmax(-1)
    torch.testing.assert_close(logps, plain_logps(engine.model, ids), atol=LOGP, rtol=0)


# Prompts


@pytest.mark.parametrize("length", [1, 4, 9, 30])
def test_a_prompt_is_prefilled_once_for_a_whole_group(model: Any, length: int) -> None:
    engine = small_engine(model, prefill_chunk=8)
    prompt = tokens(length)
    cursors = [engine.open(prompt) for _ in range(8)]
    stats = engine.stats()
    assert (stats["prefilled"], stats["reused"]) == (length, 7 * length)
    assert stats["hit_rate"] == 7 / 8
    assert stats["pages"] == -(-length // 4)
    assert torch.equal(engine.logits(cursors[0]), engine.logits(cursors[7]))
    assert_at(engine, cursors[3], prompt)
    engine.check_integrity()


def test_closed_prompts_stay_until_their_pages_are_needed(model: Any) -> None:
    engine = small_engine(model, num_pages=10, prefill_chunk=8)
    first, second, third = tokens(16), tokens(16, 1), tokens(20, 2)
    engine.close(engine.open(first))
    engine.close(engine.open(second))
    assert (engine.stats()["pages"], engine.stats()["cached_pages"]) == (0, 8)
    assert engine.num_free_pages == 10
    engine.close(engine.open(first))  # used again: now the second is the oldest
    keeper = engine.open(third)  # 5 pages: 2 free, so 3 must be evicted
    engine.check_integrity()
    before = engine.stats()
    assert before["re_prefilled"] == 0
    engine.close(keeper)
    cursor = engine.open(second)
    after = engine.stats()
    lost = after["re_prefilled"] - before["re_prefilled"]
    assert lost > 0
    assert after["prefilled"] - before["prefilled"] == 0
    assert after["reused"] - before["reused"] == 16 - lost
    assert_at(engine, cursor, second)
    engine.check_integrity()


def test_a_prompt_in_use_is_not_evicted(model: Any) -> None:
    engine = small_engine(model, num_pages=8)
    root = engine.open(tokens(12))
    child = engine.fork(root)
    engine.extend(child, tokens(8, 1))
    engine.close(root)
    with pytest.raises(PagesExhausted) as caught:
        engine.open(tokens(20, 2))
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (5, 3, 0)
    engine.check_integrity()
    assert_at(engine, child, tokens(12) + tokens(8, 1))
    engine.close(child)
    assert_at(engine, engine.open(tokens(20, 2)), tokens(20, 2))
    engine.check_integrity()


# Pages


@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 768])
def test_pc11_any_page_size_gives_the_same_logits(model: Any, page_size: int) -> None:
    engine = small_engine(model, page_size=page_size, num_pages=max(4, 400 // page_size))
    cursor = engine.open(tokens(40))
    engine.extend(cursor, tokens(30, 1))
    assert_at(engine, cursor, tokens(40) + tokens(30, 1))


def test_a_context_longer_than_the_pool_is_refused_before_any_change(model: Any) -> None:
    engine = small_engine(model, num_pages=5)
    cursor = engine.open(tokens(9))
    before = engine.logits(cursor)
    for call in (
        lambda: engine.open(tokens(21, 1)),
        lambda: engine.extend(cursor, tokens(12, 1)),
    ):
        with pytest.raises(PagesExhausted, match="pages needed"):
            call()
        engine.check_integrity()
        assert (cursor.num_tokens, cursor.position, engine.num_free_pages) == (9, 9, 2)
    assert torch.equal(engine.logits(cursor), before)
    engine.extend(cursor, tokens(11, 1))
    assert_at(engine, cursor, tokens(9) + tokens(11, 1))


def test_random_episodes_release_everything(model: Any) -> None:
    engine = small_engine(model, page_size=3)
    cursors, _, _ = play(engine, random_trace(11))
    for cursor in list(cursors.values())[::2] + list(cursors.values())[1::2]:
        engine.close(cursor)
        engine.check_integrity()
    stats = engine.stats()
    assert (stats["pages"], stats["cursors"]) == (0, 0)
    assert engine.num_free_pages == engine.num_pages


# States


def test_pc04_few_states_cost_replays_and_never_a_wrong_result(hybrid: Any) -> None:
    """Four slots, eight threads that take turns; the brute force judges every step."""
    engine = small_engine(hybrid, num_states=4)
    root = engine.open(tokens(10))
    forks = [engine.fork(root) for _ in range(8)]
    chains = [tokens(10) for _ in forks]
    for lap in range(3):
        for index, cursor in enumerate(forks):
            new = tokens(3 + index, 100 * lap + index)
            engine.extend(cursor, new)
            chains[index] += new
            assert_at(engine, cursor, chains[index])
            engine.check_integrity()
    stats = engine.stats()
    assert stats["replayed"] > 0
    assert stats["evicted_states"] > 0
    assert stats["peak_slots"] == 4
    assert stats["prefilled"] == 10 + sum(len(chain) - 10 for chain in chains)


@pytest.mark.parametrize("num_states", [1, 2, 3])
def test_even_one_state_is_enough(hybrid: Any, num_states: int) -> None:
    trace = random_trace(2)
    few, many = small_engine(hybrid, num_states=num_states), small_engine(hybrid)
    for ours, want in zip(play(few, trace)[1], play(many, trace)[1], strict=True):
        torch.testing.assert_close(ours.log_softmax(-1), want.log_softmax(-1), atol=LOGP, rtol=0)
    few.check_integrity()
    assert few.stats()["replayed"] > many.stats()["replayed"] == 0


def test_more_turns_than_states_wait_for_one_another(hybrid: Any) -> None:
    few, many = small_engine(hybrid, num_states=3), small_engine(hybrid)
    drawn = []
    for engine in (few, many):
        root = engine.open(tokens(7))
        cursors = [engine.fork(root) for _ in range(6)]
        params = [SamplingParams(seed=i, max_tokens=4 + i) for i in range(6)]
        drawn.append(engine.generate(cursors, params, until=()))
        engine.check_integrity()
    assert [ids for ids, _ in drawn[0]] == [ids for ids, _ in drawn[1]]


def test_states_that_running_turns_use_are_refused_before_any_change(hybrid: Any) -> None:
    engine = small_engine(hybrid, num_states=2)
    root = engine.open(tokens(7))
    running = [engine.fork(root) for _ in range(2)]
    for cursor in running:
        engine.submit(cursor, [], SamplingParams(max_tokens=9), until=())
    engine.step()
    engine.step()  # the second turn could only begin when the first had read the root's state
    other = engine.fork(root)
    with pytest.raises(StatesExhausted):
        engine.extend(other, tokens(3))
    assert other.num_tokens == 7
    engine.check_integrity()
    while engine.has_work:
        engine.step()
    engine.extend(other, tokens(3))
    assert_at(engine, other, tokens(7) + tokens(3))


def test_a_cursor_keeps_its_fork_point_and_its_last_snapshots(hybrid: Any) -> None:
    engine = small_engine(hybrid, max_snapshots=3)
    root = engine.open(tokens(5))
    cursor = engine.fork(root)
    ends = [5]
    for turn in range(5):
        engine.extend(cursor, tokens(2 + turn, turn))
        ends.append(cursor.num_tokens)
    assert engine.stats()["slots"] == 3  # the fork point is the root's end too
    for back, replayed in ((ends[5], 0), (ends[4], 0), (ends[2], ends[2] - ends[0]), (ends[0], 0)):
        before = engine.stats()["replayed"]
        engine.rewind(cursor, back)
        assert engine.stats()["replayed"] - before == replayed
        engine.check_integrity()
    assert engine.stats()["slots"] == 1


def test_replay_counts_exactly_the_tokens_since_the_nearest_snapshot(hybrid: Any) -> None:
    engine = small_engine(hybrid)
    cursor = engine.open(tokens(10))
    engine.extend(cursor, tokens(20, 1))
    pages = engine.num_free_pages
    engine.rewind(cursor, 17)
    assert engine.stats()["replayed"] == 7
    assert engine.num_free_pages > pages
    assert_at(engine, cursor, (tokens(10) + tokens(20, 1))[:17])
    engine.rewind(cursor, 4)  # within the prompt, before every snapshot
    assert engine.stats()["replayed"] == 7 + 4
    assert_at(engine, cursor, tokens(4 + 6)[:4])
    assert engine.stats()["prefilled"] == 30
    engine.check_integrity()


# Weights and sleep


def test_pc08_nothing_of_an_older_policy_is_used_again(model: Any) -> None:
    engine = small_engine(model)
    old = engine.open(tokens(9))
    other = engine.fork(old)
    engine.set_policy_version(3)
    assert engine.policy_version == 3
    fresh = engine.open(tokens(9))
    assert engine.stats()["reused"] == 0
    for call in (
        lambda: engine.fork(old),
        lambda: engine.extend(old, [1]),
        lambda: engine.rewind(old, 2),
        lambda: engine.mount(fresh, old),
        lambda: engine.mount(old, fresh),
        lambda: engine.mount(fresh, fresh, old),
        lambda: engine.logits(old),
        lambda: engine.submit(old, [], SamplingParams(), until=()),
        lambda: engine.generate([old], SamplingParams(), until=()),
    ):
        with pytest.raises(StaleVersion):
            call()
    engine.check_integrity()
    engine.close(old)
    engine.close(other)
    assert engine.stats()["pages"] == 3
    with pytest.raises(ConfigError, match="at least 3"):
        engine.set_policy_version(2)
    engine.policy_version = 4
    assert engine.policy_version == 4


def test_a_turn_that_a_new_policy_overtakes_ends_in_an_error(model: Any) -> None:
    engine = small_engine(model)
    cursor = engine.open(tokens(9))
    engine.submit(cursor, [], SamplingParams(max_tokens=9), until=())
    engine.step()
    engine.set_policy_version(1)
    [finished] = engine.step()
    assert (finished.reason, len(finished.tokens)) == ("error", 1)
    assert "StaleVersion" in (finished.error or "")
    engine.check_integrity()


def test_sleep_gives_memory_back_and_wake_takes_it_again(model: Any) -> None:
    engine = small_engine(model)
    cursor = engine.open(tokens(9))
    want = engine.logits(cursor)
    engine.submit(cursor, [], SamplingParams(max_tokens=1), until=())
    with pytest.raises(ConfigError, match="turns are running"):
        engine.sleep()
    engine.step()
    engine.sleep()
    assert not engine._memory.allocated
    assert engine.num_free_pages == engine.num_pages
    with pytest.raises(StaleVersion):
        engine.fork(cursor)
    with pytest.raises(ConfigError, match="sleeps"):
        engine.open(tokens(9))
    engine.check_integrity()
    engine.wake()
    engine.wake()
    poison(engine)
    engine.close(cursor)
    assert torch.equal(engine.logits(engine.open(tokens(9))), want)
    stats = engine.stats()
    assert stats["peak_pages"] >= 3
    assert stats["seconds"]["sleep"] > 0
    assert stats["seconds"]["wake"] > 0
    engine.check_integrity()


# Bad input


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"page_size": 0}, "page_size"),
        ({"page_size": -3}, "page_size"),
        ({"page_size": 2.0}, "page_size"),
        ({"page_size": True}, "page_size"),
        ({"num_pages": 0}, "num_pages"),
        ({"num_states": 0}, "num_states"),
        ({"max_snapshots": 0}, "max_snapshots"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"decode_width": 0}, "decode_width"),
        ({"device": "meta"}, "device"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    hybrid: Any, options: dict[str, Any], name: str
) -> None:
    settings = {"page_size": 4, "num_pages": 4, "num_states": 4, **options}
    with pytest.raises(ConfigError, match=name):
        Engine(hybrid, **settings)


def test_a_model_that_is_not_prepared_is_refused() -> None:
    with pytest.raises(ConfigError, match="prepare_model"):
        Engine(tiny_dense(), page_size=4)


def test_sizes_come_from_free_memory_when_nobody_gives_them(model: Any) -> None:
    engine = Engine(model, page_size=16)
    assert engine.num_pages > 1000
    assert (engine.num_states > 100) == engine.spec.is_hybrid
    assert_at(engine, engine.open(tokens(40)), tokens(40))


BadCall = Callable[[Engine, Any], object]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e, c: e.open([]), "0 tokens"),
        (lambda e, c: e.open([97]), "0..96"),
        (lambda e, c: e.extend(c, [1, -1]), "-1..1"),
        (lambda e, c: e.submit(c, [200], SamplingParams(), until=()), "200..200"),
        (lambda e, c: e.rewind(c, 0), "1..9"),
        (lambda e, c: e.rewind(c, 10), "1..9"),
        (lambda e, c: e.rewind(c, 2.5), "1..9"),
        (lambda e, c: e.fork("root"), "no cursor"),
        (lambda e, c: e.close(None), "no cursor"),
        (lambda e, c: small_engine(e.model).fork(c), "another engine"),
        (lambda e, c: e.mount(c, small_engine(e.model).open([1])), "another engine"),
    ],
)
def test_wrong_calls_say_value_and_rule(model: Any, call: BadCall, words: str) -> None:
    engine = small_engine(model)
    cursor = engine.open(tokens(9))
    with pytest.raises(ConfigError, match=words):
        call(engine, cursor)
    assert cursor.num_tokens == 9
    engine.check_integrity()


def test_a_closed_cursor_is_refused_and_closing_twice_is_nothing(model: Any) -> None:
    engine = small_engine(model)
    root = engine.open(tokens(9))
    cursor = engine.fork(root)
    engine.close(cursor)
    engine.close(cursor)
    assert cursor.closed
    for call in (
        lambda: engine.fork(cursor),
        lambda: engine.extend(cursor, [1]),
        lambda: engine.mount(root, cursor),
        lambda: engine.mount(cursor, root),
        lambda: engine.rewind(cursor, 1),
        lambda: engine.logits(cursor),
        lambda: engine.submit(cursor, [], SamplingParams(), until=()),
    ):
        with pytest.raises(ClosedCursor):
            call()
    engine.check_integrity()


def test_a_mount_of_what_is_visible_changes_nothing(model: Any) -> None:
    engine = small_engine(model)
    root = engine.open(tokens(9))
    child = engine.fork(root)
    engine.extend(child, tokens(3, 1))
    engine.mount(child, root)
    engine.mount(child, child)
    engine.mount(root, engine.fork(root))
    assert (child.position, root.position, engine.stats()["mounts"]) == (12, 9, 0)
    engine.mount(root, child)
    engine.mount(root, child)
    assert (root.position, engine.stats()["mounts"]) == (12, 1)
    # A mount that no token has stepped past yet is dropped by going back to where it was made.
    engine.rewind(root, 9)
    assert root.position == 9
    engine.check_integrity()


def test_integrity_check_finds_a_lost_reference(hybrid: Any) -> None:
    engine = small_engine(hybrid)
    cursor = engine.open(tokens(9))
    engine.check_integrity()
    cursor._tail.refs += 1
    with pytest.raises(IntegrityError, match="holders of a node"):
        engine.check_integrity()
    cursor._tail.refs -= 1
    cursor._tail.slot = None
    with pytest.raises(IntegrityError, match="state slots"):
        engine.check_integrity()


def test_counters_are_what_the_trace_implies(model: Any) -> None:
    """Given tokens after sharing are prefilled, sampled ones decoded, nothing twice."""
    engine = small_engine(model)
    given = sampled = 0
    for rollout in range(3):
        root = engine.open(tokens(20))
        children = [engine.fork(root) for _ in range(2)]
        for index, child in enumerate(children):
            engine.submit(
                child,
                tokens(4 + index, index),
                SamplingParams(seed=rollout, max_tokens=6),
                until={5},
            )
            given += 4 + index
        while engine.has_work:
            sampled += sum(len(finished.tokens) for finished in engine.step())
        engine.mount(root, children[0])
        engine.extend(root, tokens(3))
        given += 3
    stats = engine.stats()
    assert stats["prefilled"] == 20 + given
    assert stats["reused"] == 2 * 20
    flat = 3 * 20 + 3 * 2 * 20 + given  # three openings, six turns on 20 tokens, all later text
    assert stats["context_tokens"] == flat
    assert stats["hit_rate"] == pytest.approx(1 - (20 + given) / flat)
    assert stats["decoded"] == sampled
    counted = [stats[name] for name in ("opens", "forks", "mounts", "turns", "rewinds")]
    assert counted == [3, 6, 3, 6, 0]
    assert (stats["replayed"], stats["re_prefilled"]) == (0, 0)


def test_float64_models_keep_float64_states() -> None:
    engine = small_engine(prepare_model(tiny_hybrid().double()))
    cursor = engine.open(tokens(9))
    assert engine._memory.states[0].dtype == torch.float64
    torch.testing.assert_close(
        engine.logits(cursor).log_softmax(-1),
        plain_logps(tiny_hybrid().double(), tokens(9)).float(),
        atol=1e-6,
        rtol=0,
    )
