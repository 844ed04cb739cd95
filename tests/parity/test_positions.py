"""Where a reader goes on after a mount: engine, packed pass and brute force follow one rule."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from octopus_trl import Engine, Trace, prepare_model, score_traces
from octopus_trl.errors import ConfigError, PagesExhausted
from octopus_trl.models.packed import pack, packed_tokens
from tests import tolerances
from tests.ledger import Ledger
from tests.oracles import brute_hidden, brute_logps, gradients, logits_of, spell_out
from tests.parity.conftest import Pair, pair
from tests.parity.test_engine import Play, assert_next, engine_for, fresh_logits
from tests.tiny import VOCAB, random_trace, tiny_dense

RULES = ("unshifted", "rerotate", "reencode")


class Placing:
    """An engine whose mounts follow one rule."""

    def __init__(self, engine: Engine, **rule: str) -> None:
        self._engine, self._rule = engine, rule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def mount(self, cursor: Any, source: Any, since: Any = None) -> Any:
        return self._engine.mount(cursor, source, since, **self._rule)


def placed(trace: Trace, rule: str) -> Trace:
    return replace(trace, position=rule).place().check(vocab_size=VOCAB)


def brute(stock: Any, trace: Trace, **options: Any) -> list[torch.Tensor]:
    if trace.position != "reencode":
        return brute_logps(stock, trace, **options)
    spelled = spell_out(trace)
    scores = brute_logps(stock, spelled, **options)
    return [scores[index] for index in spelled.where]


def play(
    pair: Pair,
    rule: str,
    seed: int,
    *,
    exchange: str = "mount",
    moves: int = 30,
    **options: Any,
) -> Play:
    engine = Placing(engine_for(pair, **options), position=rule, exchange=exchange)
    game = Play(engine, seed)
    game.ledger = Ledger(rule, exchange)
    game.open()
    game.open(20)
    for _ in range(moves):
        game.move(mounts=True)
        game.listen()
        game.engine.check_integrity()
    game.heard += [(place.chain[-1], game.engine.logits(cursor)) for cursor, place in game.pairs]
    return game


@torch.no_grad()
def verify(game: Play, pair: Pair) -> None:
    """Compare all that was heard and sampled with the brute force and the packed pass."""
    trace, where = game.ledger.trace()
    spelled = spell_out(trace) if trace.position == "reencode" else None
    told: Any = trace if spelled is None else spelled
    flat, hidden = brute_hidden(pair.stock, told, mount_layers=pair.mount_layers)
    exact = torch.log_softmax(logits_of(pair.stock, hidden), dim=-1)

    def row(token: int) -> int:
        segment, offset = where[token]
        return flat.first[segment if spelled is None else spelled.where[segment]] + offset

    for token, logits in game.heard:
        got = torch.log_softmax(logits, dim=-1)
        assert (got - exact[row(token)]).abs().max() <= tolerances.LOGP
    [scores] = score_traces(pair.ours, [trace])
    for token, logp in game.sampled:
        above = game.ledger.parents[token]
        assert above is not None
        segment, offset = where[token]
        assert abs(logp - exact[row(above), game.ledger.tokens[token]]) <= tolerances.LOGP
        assert abs(logp - scores[segment][offset]) <= tolerances.LOGP


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backbone", ["hybrid", "dense", "bamba-one-layer"], indirect=True)
def test_random_moves_equal_packed_pass_and_brute_force(backbone: Pair, rule: str) -> None:
    verify(play(backbone, rule, 1), backbone)


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("reencode", {"num_states": 6}),
        ("reencode", {"page_size": 1}),
        ("reencode", {"prefill_chunk": 3}),
        ("rerotate", {"num_states": 6, "page_size": 3}),
    ],
)
def test_copies_stay_right_with_few_states_any_page_and_any_chunk(
    hybrid: Pair, rule: str, options: dict[str, Any]
) -> None:
    verify(play(hybrid, rule, 5, **options), hybrid)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backbone", ["hybrid8-one-layer", "dense", "granite"], indirect=True)
def test_the_packed_pass_is_the_brute_force(backbone: Pair, rule: str) -> None:
    traces = [placed(random_trace(seed, steps=12, roots=2), rule) for seed in range(3)]
    assert sum(bool(s.mounts) for trace in traces for s in trace.segments) > 5
    with torch.no_grad():
        scores = score_traces(backbone.ours, traces)
        for trace, scored in zip(traces, scores, strict=True):
            exact = brute(backbone.stock, trace, mount_layers=backbone.mount_layers)
            for got, want in zip(scored, exact, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=tolerances.LOGP, equal_nan=True)


@pytest.mark.parametrize("rule", ["rerotate", "reencode"])
@pytest.mark.parametrize("mounts", ["live", "detached"])
def test_gradients_through_copies_are_those_of_the_brute_force(
    hybrid: Pair, mounts: Any, rule: str
) -> None:
    stock, ours = copy.deepcopy(hybrid.stock), copy.deepcopy(hybrid.ours)
    for model in (stock, ours):
        model.requires_grad_(True)
    trace = placed(random_trace(4, steps=12), rule)
    want = gradients(stock, brute(stock, trace, mounts=mounts))
    got = gradients(ours, score_traces(ours, [trace], mounts=mounts)[0])
    assert set(got) == set(want)
    for name, each in want.items():
        assert (got[name] - each).norm() <= 1e-4 * each.norm() + 1e-7, name


@pytest.mark.parametrize("rule", RULES)
def test_a_mount_changes_no_logits_until_the_next_token(hybrid: Pair, rule: str) -> None:
    engine = engine_for(hybrid)
    reader, source = engine.open([1, 2, 3]), engine.open(list(range(20, 60)))
    before = engine.logits(reader).clone()
    engine.mount(reader, source, position=rule)
    assert torch.equal(engine.logits(reader), before)
    assert reader.position == {"unshifted": 3, "rerotate": 3, "reencode": 43}[rule]
    assert reader.num_tokens == 3
    engine.extend(reader, [4])
    assert not torch.allclose(engine.logits(reader), fresh_logits(hybrid, [1, 2, 3, 4]), atol=1e-3)


@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_with_every_layer_mounted_a_dense_reader_of_copies_is_one_plain_forward(
    length: int,
) -> None:
    stock = pair("dense").stock
    ours = prepare_model(copy.deepcopy(stock), mount_layers=range(stock.config.num_hidden_layers))
    engine = Engine(ours, page_size=16, num_pages=64)
    draw = torch.Generator().manual_seed(length)
    own, first, second, more = (
        torch.randint(1, VOCAB, (size,), generator=draw).tolist() for size in (9, length, 5, 4)
    )
    reader = engine.open(own)
    for text in (first, second):
        engine.mount(reader, engine.open(text), position="reencode")
    engine.extend(reader, more)
    with torch.no_grad():
        plain = stock(torch.tensor([own + first + second + more]), use_cache=False).logits[0, -1]
    assert_next(engine.logits(reader), plain.float())


def test_a_copy_is_counted_and_given_back_with_its_reader(hybrid: Pair) -> None:
    engine = engine_for(hybrid)
    root = engine.open(list(range(1, 9)))
    writer, reader = engine.extend(engine.fork(root), [7] * 10), engine.fork(root)
    for _ in range(2):  # reading again adds nothing
        engine.mount(reader, writer, position="reencode")
    stats = engine.stats()
    assert stats["misses"]["reencoded"] == 10
    assert stats["mounts"] == 1
    engine.close(writer)
    child = engine.fork(reader)
    engine.extend(reader, [5])
    engine.extend(child, [6])
    engine.check_integrity()
    for cursor in (root, reader, child):
        engine.close(cursor)
        engine.check_integrity()
    assert engine.stats()["pages"] == 0


def test_moved_keys_are_counted_shared_by_forks_and_given_back_with_their_reader(
    hybrid: Pair,
) -> None:
    engine = engine_for(hybrid)
    root = engine.open(list(range(1, 9)))
    writer, reader = engine.extend(engine.fork(root), [7] * 10), engine.fork(root)
    for _ in range(2):  # reading again adds nothing
        engine.mount(reader, writer, position="rerotate")
    spec, stats = engine.spec, engine.stats()
    token = 2 * len(spec.mount_layers) * spec.num_kv_heads * spec.head_dim * 4
    assert (stats["mounts"], stats["rerotated"]) == (1, 10)
    assert stats["bytes_copied"] == {"fork": 0, "mount": 0, "rewind": 0, "rerotate": 10 * token}
    engine.close(writer)
    child = engine.fork(reader)
    engine.extend(writer := engine.fork(root), [3] * 6)
    engine.mount(child, writer, position="rerotate")  # what the fork inherited moves with it
    assert engine.stats()["rerotated"] == 10 + 16
    engine.close(writer)
    engine.extend(reader, [5])
    engine.extend(child, [6])
    engine.check_integrity()
    for cursor in (root, reader, child):
        engine.close(cursor)
        engine.check_integrity()
    assert engine.stats()["pages"] == 0


def test_a_model_without_positions_has_no_keys_to_move() -> None:
    granite = pair("granite")
    engine = engine_for(granite)
    reader, source = engine.open([1, 2, 3]), engine.open(list(range(20, 60)))
    engine.mount(reader, source, position="rerotate")
    assert engine.stats()["rerotated"] == 0
    assert not any(engine.stats()["bytes_copied"].values())
    engine.extend(reader, [4])
    other = engine.extend(engine.mount(engine.open([1, 2, 3]), source), [4])
    assert_next(engine.logits(reader), engine.logits(other))


def test_keys_of_a_rotation_that_follows_the_length_are_not_moved() -> None:
    model = tiny_dense(
        0, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    )
    engine = Engine(prepare_model(model, mount_layers=[1]), page_size=4, num_pages=64)
    reader, source = engine.open([1]), engine.open([2])
    with pytest.raises(ConfigError, match="rope_type='dynamic'"):
        engine.mount(reader, source, position="rerotate")
    engine.mount(reader, source)


@pytest.mark.parametrize("rule", ["rerotate", "reencode"])
def test_a_copy_that_finds_no_page_changes_nothing(hybrid: Pair, rule: str) -> None:
    engine = engine_for(hybrid, page_size=4, num_pages=16)
    reader, writer = engine.open([1, 2, 3]), engine.open([9, *range(10, 50)])
    before = engine.logits(reader).clone()
    with pytest.raises(PagesExhausted):
        engine.mount(reader, writer, position=rule)
    engine.check_integrity()
    assert (reader.position, reader.num_tokens) == (3, 3)
    assert torch.equal(engine.logits(reader), before)


def test_an_unknown_rule_is_refused(hybrid: Pair) -> None:
    engine = engine_for(hybrid)
    reader, source = engine.open([1]), engine.open([2])
    with pytest.raises(ConfigError, match="position='here': must be one of jump, unshifted"):
        engine.mount(reader, source, position="here")


def test_rows_of_copies_are_counted_before_a_row_is_planned() -> None:
    trace = placed(random_trace(4, steps=12), "reencode")
    assert pack([trace]).num_rows == packed_tokens(trace) > sum(trace.lengths)
    assert packed_tokens(replace(trace, position="jump")) == sum(trace.lengths)
    assert pack([trace], mounts="dropped").num_rows == sum(trace.lengths)
