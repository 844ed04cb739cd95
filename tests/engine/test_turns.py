"""Turns: what a thread samples is its own affair."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from octopus_trl.engine import Cursor, Engine
from octopus_trl.engine.widths import decode_widths
from octopus_trl.errors import ConfigError, PagesExhausted
from octopus_trl.protocols import EngineLike, Finished, SamplingParams
from tests.engine.conftest import small_engine, tokens

LENGTHS = (5, 17, 64, 33, 1, 90)
Result = tuple[list[int], list[float], torch.Tensor]


def run_turns(
    model: Any, order: list[int], strangers: int = 0, **options: Any
) -> dict[int, Result]:
    """Run threads `order` together, with other turns beside them."""
    engine = small_engine(model, num_pages=900, **options)
    root = engine.open(tokens(11))
    others = [engine.extend(engine.fork(root), tokens(3 + i, 50 + i)) for i in range(strangers)]
    cursors: dict[int, Cursor] = {}
    tickets: dict[int, int] = {}

    def submit_strangers(part: list[Cursor]) -> None:
        for index, cursor in enumerate(part):
            params = SamplingParams(seed=900 + index, max_tokens=1 + 5 * index, top_k=7)
            engine.submit(cursor, tokens(2 + index), params, until={0})

    submit_strangers(others[::2])
    for thread in order:
        cursors[thread] = engine.open(tokens(LENGTHS[thread], thread))
        # One thread reads another root, as any thread may.
        if thread == 1:
            engine.mount(cursors[thread], root)
        params = SamplingParams(temperature=0.7, seed=thread, max_tokens=12 + thread)
        tickets[thread] = engine.submit(cursors[thread], tokens(thread, 7), params, until={0})
    submit_strangers(others[1::2])
    ended: dict[int, Finished] = {}
    while engine.has_work:
        for finished in engine.step():
            ended[finished.ticket] = finished
        engine.check_integrity()
    results = {}
    for thread in order:
        finished = ended[tickets[thread]]
        assert finished.reason in ("stop", "length")
        results[thread] = (finished.tokens, finished.logps, engine.logits(cursors[thread]))
    return results


def assert_same(found: dict[int, Result], want: dict[int, Result]) -> None:
    for thread, (ids, logps, logits) in found.items():
        assert ids == want[thread][0]
        assert logps == want[thread][1]
        assert torch.equal(logits, want[thread][2])


@pytest.fixture(scope="module")
def six_threads() -> Callable[[Any], dict[int, Result]]:
    """Results of the six threads run together and nothing beside them, once a model."""
    results: dict[int, dict[int, Result]] = {}

    def run(model: Any) -> dict[int, Result]:
        if id(model) not in results:
            results[id(model)] = run_turns(model, list(range(6)))
        return results[id(model)]

    return run


@pytest.mark.parametrize(
    ("order", "strangers", "options"),
    [
        ([5, 4, 3, 2, 1, 0], 0, {}),
        ([2], 0, {}),
        ([1, 5, 2, 0, 4, 3], 9, {}),
        ([4, 1, 2, 3, 0, 5], 23, {}),
        ([1, 4], 2, {"page_size": 7}),
    ],
)
def test_a_thread_is_bitwise_independent_of_its_batch(
    model: Any, six_threads: Any, order: list[int], strangers: int, options: dict[str, int]
) -> None:
    """Other order, other company, more rows than the least width, other pages."""
    assert_same(run_turns(model, order, strangers, **options), six_threads(model))


def test_at_a_fixed_width_too_and_with_more_rows_than_one_pass_holds(model: Any) -> None:
    want = run_turns(model, [0, 1, 2], decode_width=4)
    assert_same(run_turns(model, [2, 1], 5, decode_width=4), want)


def test_wider_passes_are_used_only_where_products_agree(
    hybrid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cpu")
    found = decode_widths(hybrid, device)
    assert found[0] == 16
    assert all(wide == 2 * narrow for narrow, wide in pairwise(found))
    product = torch.nn.functional.linear

    def rounds_by_width(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return product(x, weight) + (1e-6 if len(x) > 16 else 0.0)

    monkeypatch.setattr(torch.nn.functional, "linear", rounds_by_width)
    assert decode_widths(hybrid, device) == (16,)


def test_logps_are_those_of_the_plain_forward_at_the_temperature(model: Any) -> None:
    engine = small_engine(model)
    cursor = engine.open(tokens(13))
    params = SamplingParams(temperature=0.6, top_k=5, top_p=0.9, seed=4, max_tokens=20)
    [(ids, logps)] = engine.generate([cursor], params, until=())
    chain = tokens(13) + ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([chain]), use_cache=False).logits[0] / 0.6
    want = logits.log_softmax(-1)[12:-1].gather(1, torch.tensor(ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logps), want, atol=2e-5, rtol=0)
    assert cursor.num_tokens == len(chain)
    torch.testing.assert_close(engine.logits(cursor), logits[-1] * 0.6, atol=1e-4, rtol=0)


def test_stop_token_is_kept_fed_and_counted(model: Any) -> None:
    engine = small_engine(model)
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    root = engine.open(tokens(8))
    [(ids, _)] = engine.generate([engine.fork(root)], greedy, until=())
    cursor = engine.fork(root)
    ticket = engine.submit(cursor, [], greedy, until={ids[3]})
    ended: list[Finished] = []
    while engine.has_work:
        ended += engine.step()
    stop = ids.index(ids[3])
    assert (ended[0].ticket, ended[0].reason, ended[0].tokens) == (ticket, "stop", ids[: stop + 1])
    assert cursor.num_tokens == 8 + stop + 1


def test_settings_of_one_batch_may_differ(model: Any) -> None:
    engine = small_engine(model)
    root = engine.open(tokens(8))
    cursors = [engine.fork(root) for _ in range(3)]
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    seeded = SamplingParams(seed=1, max_tokens=9)
    results = engine.generate(cursors, [greedy, seeded, seeded], until=())
    assert [len(ids) for ids, _ in results] == [5, 9, 9]
    assert results[1] == results[2]


def test_unseeded_turns_differ(model: Any) -> None:
    engine = small_engine(model)
    root = engine.open(tokens(8))
    cursors = [engine.fork(root) for _ in range(4)]
    results = engine.generate(cursors, SamplingParams(max_tokens=12), until=())
    assert len({tuple(ids) for ids, _ in results}) > 1


def test_cancelled_turn_leaves_exactly_what_it_returns(model: Any) -> None:
    engine = small_engine(model)
    root = engine.open(tokens(8))
    params = SamplingParams(seed=3, max_tokens=20)
    [(want, _)] = engine.generate([engine.fork(root)], params, until=())
    cursor, untouched = engine.fork(root), engine.fork(root)
    running = engine.submit(cursor, [], params, until=())
    for _ in range(5):
        engine.step()
    queued = engine.submit(untouched, tokens(4), params, until=())
    ids, logps = engine.cancel(running)
    assert ids == want[:5]
    assert len(logps) == 5
    assert engine.cancel(queued) == ([], [])
    assert (cursor.num_tokens, untouched.num_tokens) == (13, 8)
    assert not engine.has_work
    engine.check_integrity()
    [(rest, _)] = engine.generate([untouched], params, until=())
    assert rest == want
    with pytest.raises(ConfigError, match="no turn"):
        engine.cancel(running)


def test_turn_cancelled_in_its_prefill_is_taken_back(model: Any) -> None:
    engine = small_engine(model, prefill_chunk=4)
    cursor = engine.open(tokens(6))
    free = engine.num_free_pages
    ticket = engine.submit(cursor, tokens(11, 1), SamplingParams(max_tokens=3), until=())
    engine.step()
    assert engine.num_free_pages < free
    assert engine.cancel(ticket) == ([], [])
    assert (cursor.num_tokens, engine.num_free_pages) == (6, free)
    assert engine.stats()["prefilled"] == 6
    engine.check_integrity()


def test_closing_a_cursor_ends_its_turn(model: Any) -> None:
    engine = small_engine(model)
    cursor = engine.open(tokens(6))
    engine.submit(cursor, [], SamplingParams(max_tokens=9), until=())
    engine.step()
    engine.close(cursor)
    assert not engine.has_work
    assert engine.num_free_pages == engine.num_pages
    engine.check_integrity()


def test_a_busy_cursor_is_forked_and_read_at_its_last_boundary_and_not_moved(model: Any) -> None:
    engine = small_engine(model)
    cursor, reader = engine.open(tokens(6)), engine.open(tokens(5, 1))
    engine.submit(cursor, [], SamplingParams(seed=1, max_tokens=9), until=())
    engine.step()
    assert engine.fork(cursor).num_tokens == 6
    engine.mount(reader, cursor)
    for call in (
        lambda: engine.extend(cursor, [1]),
        lambda: engine.rewind(cursor, 3),
        lambda: engine.mount(cursor, reader),
        lambda: engine.submit(cursor, [], SamplingParams(), until=()),
        lambda: engine.generate([cursor], SamplingParams(), until=()),
    ):
        with pytest.raises(ConfigError, match="is in turn"):
            call()


def test_generate_leaves_the_ends_of_other_turns_to_step(model: Any) -> None:
    engine = small_engine(model)
    one, other = engine.open(tokens(6)), engine.open(tokens(5, 1))
    ticket = engine.submit(one, [], SamplingParams(seed=1, max_tokens=2), until=())
    engine.generate([other], SamplingParams(seed=1, max_tokens=8), until=())
    assert engine.has_work
    assert [finished.ticket for finished in engine.step()] == [ticket]
    assert not engine.has_work


def test_a_row_without_pages_fails_alone(model: Any) -> None:
    engine = small_engine(model, page_size=2, num_pages=12)
    # Same prompt: 3 pages; then one page each two tokens of either turn.
    root = engine.open(tokens(6))
    long, short = engine.fork(root), engine.fork(root)
    first = engine.submit(short, [], SamplingParams(seed=1, max_tokens=4), until=())
    second = engine.submit(long, [], SamplingParams(seed=2, max_tokens=40), until=())
    ended = {}
    while engine.has_work:
        ended.update({finished.ticket: finished for finished in engine.step()})
        engine.check_integrity()
    assert (ended[first].reason, len(ended[first].tokens)) == ("length", 4)
    assert ended[second].reason == "error"
    assert "PagesExhausted" in (ended[second].error or "")
    assert long.num_tokens == 6 + len(ended[second].tokens) == 6 + 2 * 7
    engine.close(short)
    engine.extend(long, [1])
    engine.close(long)
    with pytest.raises(PagesExhausted):
        engine.generate([root], SamplingParams(seed=2, max_tokens=40), until=())
    engine.check_integrity()


def test_a_failing_pass_takes_its_growth_back(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine(model)
    cursor = engine.open(tokens(6))
    [(want, _)] = engine.generate(
        [engine.fork(cursor)], SamplingParams(seed=1, max_tokens=9), until=()
    )
    layer = model.model.layers[-1].mlp
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("out of memory")

    free = engine.num_free_pages
    handle = layer.register_forward_pre_hook(fail)
    try:
        ticket = engine.submit(cursor, [], SamplingParams(seed=1, max_tokens=9), until=())
        ended: list[Finished] = []
        while engine.has_work:
            ended += engine.step()
            engine.check_integrity()
        assert (ended[0].ticket, ended[0].reason, ended[0].tokens) == (ticket, "error", want[:3])
        engine.rewind(cursor, 6)
        calls = 3
        with pytest.raises(RuntimeError):
            engine.extend(cursor, [1, 2, 3])
    finally:
        handle.remove()
    engine.check_integrity()
    assert engine.num_free_pages == free
    # What comes after equals what would have come.
    [(again, _)] = engine.generate([cursor], SamplingParams(seed=1, max_tokens=9), until=())
    assert again == want


def test_engine_runs_in_eval_mode_without_gradients_and_puts_modes_back(hybrid: Any) -> None:
    engine = small_engine(hybrid)
    seen: list[tuple[bool, bool]] = []

    def look(module: nn.Module, *_: Any) -> None:
        seen.append((module.training, torch.is_grad_enabled()))

    handle = hybrid.model.layers[0].mlp.register_forward_pre_hook(look)
    hybrid.train()
    hybrid.model.layers[1].eval()
    try:
        before = [module.training for module in hybrid.modules()]
        cursor = engine.extend(engine.open(tokens(5)), tokens(3))
        engine.generate([cursor], SamplingParams(max_tokens=2), until=())
        engine.logits(cursor)
        engine.rewind(cursor, 2)
        assert [module.training for module in hybrid.modules()] == before
    finally:
        handle.remove()
        hybrid.eval()
    assert set(seen) == {(False, False)}


def test_engine_follows_the_agents_protocol(hybrid: Any) -> None:
    engine: EngineLike = small_engine(hybrid)
    assert isinstance(engine, Engine)


@pytest.mark.parametrize(
    ("sampling", "words"), [([], "0 sampling settings"), (None, "listed twice")]
)
def test_generate_refuses_what_does_not_fit(hybrid: Any, sampling: Any, words: str) -> None:
    engine = small_engine(hybrid)
    cursor = engine.open(tokens(5))
    cursors = [cursor] if sampling is not None else [cursor, cursor]
    with pytest.raises(ConfigError, match=words):
        engine.generate(cursors, SamplingParams() if sampling is None else sampling, until=())


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"seed": "a"}, "seed='a': must be an integer"),
        ({"max_tokens": None}, "max_tokens=None: must be an integer"),
        ({"max_tokens": 1.5}, r"max_tokens=1\.5: must be an integer"),
        ({"top_k": 2.0}, r"top_k=2\.0: must be an integer"),
        ({"temperature": None}, "temperature=None: must be a number"),
    ],
    ids=str,
)
def test_a_setting_of_the_wrong_type_is_refused_before_any_turn_runs(
    setting: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        SamplingParams(**setting)


@pytest.mark.parametrize("given", [[1.5], ["a"], None, 5, "abc", torch.ones(1, 2)], ids=repr)
def test_tokens_that_are_no_integers_are_refused_and_never_rounded(hybrid: Any, given: Any) -> None:
    engine = small_engine(hybrid)
    cursor = engine.open(tokens(5))
    for call in (engine.open, partial(engine.extend, cursor)):
        with pytest.raises(ConfigError, match="must be a sequence of integer token ids"):
            call(given)
    assert cursor.num_tokens == 5


def test_tokens_may_be_integers_of_torch_and_numpy(hybrid: Any) -> None:
    engine = small_engine(hybrid)
    plain = engine.logits(engine.open([1, 2, 3]))
    given: Any
    for given in (torch.tensor([1, 2, 3]), np.asarray([1, 2, 3])):
        assert torch.equal(engine.logits(engine.open(given)), plain)
