"""Turns that pages are too few for: they pause and go on as if they had not."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from octopus_trl.engine import Cursor, Engine
from octopus_trl.errors import PagesExhausted
from octopus_trl.protocols import Finished, SamplingParams
from tests.engine.conftest import small_engine, tokens

PROMPT = 7
Outcome = tuple[list[int], list[float], torch.Tensor]


def submit(engine: Engine, count: int, given: int = 5, drawn: int = 12) -> dict[int, Cursor]:
    """Fork turns from one prompt; each gets some text and draws a number of tokens of its own."""
    root = engine.open(tokens(PROMPT))
    cursors = [engine.fork(root) for _ in range(count)]
    engine.close(root)
    return {
        engine.submit(
            cursor,
            tokens(given + index, index),
            SamplingParams(temperature=0.8, seed=index, max_tokens=drawn + 2 * index),
            until=(),
        ): cursor
        for index, cursor in enumerate(cursors)
    }


def drain(engine: Engine, cursors: dict[int, Cursor]) -> dict[int, Finished | Outcome]:
    """Step until all have ended; each cursor is looked at and closed when its turn ends."""
    ended: dict[int, Finished | Outcome] = {}
    for _ in range(2000):
        if not engine.has_work:
            return ended
        for finished in engine.step():
            cursor = cursors[finished.ticket]
            ended[finished.ticket] = finished
            if finished.reason != "error":
                outcome = (finished.tokens, finished.logps, engine.logits(cursor))
                ended[finished.ticket] = outcome
            engine.close(cursor)
        engine.check_integrity()
    raise AssertionError("turns do not end")


def assert_equal(found: Any, want: Any) -> None:
    assert (found[0], found[1]) == (want[0], want[1])
    assert torch.equal(found[2], want[2])


def test_a_turn_that_paused_ends_with_the_same_bits(model: Any) -> None:
    plenty = small_engine(model, prefill_chunk=8)
    want = drain(plenty, submit(plenty, 6))
    few = small_engine(model, prefill_chunk=8, num_pages=16)
    found = drain(few, submit(few, 6))
    for ticket, outcome in found.items():
        assert_equal(outcome, want[ticket])
    stats, calm = few.stats(), plenty.stats()
    assert stats["preempted"] > 0
    assert stats["re_prefilled"] == stats["misses"]["paused"] > 0
    assert (calm["preempted"], calm["re_prefilled"]) == (0, 0)
    for name in ("prefilled", "decoded", "turns"):
        assert stats[name] == calm[name]


def test_drawn_tokens_may_come_back_in_chunks(model: Any) -> None:
    """As a GPU does it: the same draws, logits within a tolerance."""
    plenty = small_engine(model)
    want = drain(plenty, submit(plenty, 6))
    few = small_engine(model, num_pages=16, prefill_chunk=8)
    few._scheduler.exact = False
    found = drain(few, submit(few, 6))
    stats = few.stats()
    assert stats["misses"]["paused"] > 0
    for ticket, outcome in found.items():
        assert not isinstance(outcome, Finished)
        assert outcome[0] == want[ticket][0]  # type: ignore[index]
        assert outcome[1] == pytest.approx(want[ticket][1], abs=1e-5)  # type: ignore[index]
    assert stats["decoded"] == plenty.stats()["decoded"]


def test_the_youngest_pauses_and_the_oldest_never_does(model: Any) -> None:
    engine = small_engine(model, num_pages=16)
    cursors = submit(engine, 6, drawn=20)
    order: list[int] = []
    oldest_drew = 0
    while engine.has_work:
        running = [turn.ticket for turn in engine._scheduler._running]
        waiting = [turn.ticket for turn in engine._scheduler._waiting]
        assert max(running, default=-1) < min(waiting, default=99)
        for finished in engine.step():
            order.append(finished.ticket)
            engine.close(cursors[finished.ticket])
        turns = engine._scheduler._running
        if turns and turns[0].ticket == 0:
            assert len(turns[0].tokens) >= oldest_drew
            oldest_drew = len(turns[0].tokens)
    assert order == sorted(order)


def test_a_turn_that_no_other_can_make_room_for_is_refused_and_leaves_its_cursor(
    model: Any,
) -> None:
    """Both outgrow the pool: the younger pauses, the elder stops at the wall with all it drew."""
    engine = small_engine(model, num_pages=8)
    root = engine.open(tokens(PROMPT))
    one, other = engine.fork(root), engine.fork(root)
    first, second = (
        engine.submit(cursor, tokens(3), SamplingParams(seed=1, max_tokens=90), until=())
        for cursor in (one, other)
    )
    ended: dict[int, Finished] = {}
    while engine.has_work:
        ended.update({finished.ticket: finished for finished in engine.step()})
        engine.check_integrity()
    assert engine.stats()["preempted"] >= 1
    assert {ended[first].reason, ended[second].reason} == {"error"}
    assert one.num_tokens == PROMPT + 3 + len(ended[first].tokens) == 4 * 8
    assert (other.num_tokens, ended[second].tokens) == (PROMPT, [])
    for finished in ended.values():
        assert "PagesExhausted" in (finished.error or "")
        assert "needed, 0 free" in (finished.error or "")
    engine.close(one)
    with pytest.raises(PagesExhausted) as caught:
        engine.generate([engine.fork(root)], SamplingParams(seed=1, max_tokens=90), until=())
    assert caught.value.needed > caught.value.free + caught.value.evictable


def test_given_text_that_does_not_fit_the_pool_is_refused_before_any_pass(model: Any) -> None:
    engine = small_engine(model, num_pages=6)
    cursor = engine.open(tokens(PROMPT))
    passes = engine.stats()["prefill_passes"]
    engine.submit(cursor, tokens(17), SamplingParams(max_tokens=1), until=())
    [finished] = engine.step()
    assert (finished.reason, finished.tokens, cursor.num_tokens) == ("error", [], PROMPT)
    assert "5 pages needed, 4 free" in (finished.error or "")
    assert engine.stats()["prefill_passes"] == passes
    engine.check_integrity()


def paused(engine: Engine, cursors: dict[int, Cursor]) -> int:
    """Step until a turn that has drawn something pauses; gives its ticket."""
    for _ in range(300):
        engine.step()
        for turn in engine._scheduler._waiting:
            if turn.tokens:
                return turn.ticket
    raise AssertionError("no turn paused")


def test_a_paused_turn_that_is_cancelled_keeps_exactly_what_it_drew(model: Any) -> None:
    plenty = small_engine(model)
    want = drain(plenty, submit(plenty, 4))
    engine = small_engine(model, num_pages=15)
    cursors = submit(engine, 4)
    ticket = paused(engine, cursors)
    held = cursors[ticket].num_tokens
    for other in cursors:
        if other != ticket and cursors[other]._turn is not None:
            engine.cancel(other)
            engine.close(cursors[other])
    ids, logps = engine.cancel(ticket)
    engine.check_integrity()
    assert len(ids) == len(logps) > 0
    assert ids == want[ticket][0][: len(ids)]  # type: ignore[index]
    assert cursors[ticket].num_tokens == held + 5 + ticket + len(ids)
    chain = tokens(PROMPT) + tokens(5 + ticket, ticket) + ids
    with torch.no_grad():
        plain = model(input_ids=torch.tensor([chain]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(engine.logits(cursors[ticket]), plain, atol=1e-4, rtol=0)


def test_a_paused_turn_without_room_is_cancelled_with_nothing(model: Any) -> None:
    engine = small_engine(model, num_pages=15)
    cursors = submit(engine, 4)
    ticket = paused(engine, cursors)
    assert engine.cancel(ticket) == ([], [])
    assert cursors[ticket].num_tokens == PROMPT
    engine.check_integrity()
    drain(engine, cursors)


def test_a_paused_turn_may_be_closed_or_overtaken_by_new_weights(model: Any) -> None:
    engine = small_engine(model, num_pages=15)
    cursors = submit(engine, 5)
    ticket = paused(engine, cursors)
    engine.close(cursors[ticket])
    engine.check_integrity()
    engine.set_policy_version(1)
    ended = engine.step()
    assert {finished.reason for finished in ended} == {"error"}
    for finished in ended:
        engine.close(cursors[finished.ticket])
    assert not engine.has_work
    assert engine.num_free_pages == engine.num_pages
    engine.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_random_turns_on_random_pools_all_end(model: Any, seed: int) -> None:
    """Neither a deadlock nor a lost turn, and whoever ends well ends with the same bits."""
    draws = random.Random(seed)
    count, given, drawn = draws.randint(3, 7), draws.randint(1, 9), draws.randint(3, 14)
    options = {"page_size": draws.choice([1, 3, 4]), "prefill_chunk": draws.choice([4, 16])}
    plenty = small_engine(model, **options)
    want = drain(plenty, submit(plenty, count, given, drawn))
    longest = PROMPT + given + count + drawn + 2 * count
    least = -(-longest // options["page_size"]) + 2
    few = small_engine(
        model, num_pages=least + draws.randint(0, least // 2), num_states=draws.randint(2, 9),
        **options,
    )  # fmt: skip
    found = drain(few, submit(few, count, given, drawn))
    assert len(found) == count
    for ticket, outcome in found.items():
        assert not isinstance(outcome, Finished), outcome
        assert_equal(outcome, want[ticket])
    few.check_integrity()
    assert few.num_free_pages == few.num_pages
