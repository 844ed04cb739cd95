"""A splice: the reader's recurrent state steps through what a sibling's layers were given."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from octopus_trl import Engine, EpisodeRunner, Trace, prepare_model, score_traces
from octopus_trl.agent.config import RolloutConfig
from octopus_trl.errors import ConfigError, StatesExhausted
from octopus_trl.models.packed import pack, packed_tokens
from tests import tolerances
from tests.agent.fakes import byte_tokenizer
from tests.oracles import brute_logps, gradients
from tests.parity.conftest import Pair
from tests.parity.test_engine import assert_next, engine_for, fresh_logits
from tests.parity.test_positions import play, verify
from tests.tiny import SHORT_LENGTHS, VOCAB, random_trace, tiny_dense, tiny_hybrid

# The decay's own parameters are part of what the producer computed and is cut with it; the stock
# module has no place to cut there.
DECAY = ("A_log", "dt_bias")


def spliced(trace: Trace, position: str = "jump") -> Trace:
    return replace(trace, exchange="splice", position=position).place().check(vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("backbone", "rule", "options"),
    [
        ("hybrid", "jump", {"num_states": 9}),
        ("bamba", "rerotate", {"page_size": 3}),
        ("granite", "unshifted", {"prefill_chunk": 3, "max_snapshots": 1}),
    ],
    indirect=["backbone"],
)
def test_random_moves_equal_packed_pass_and_brute_force(
    backbone: Pair, rule: str, options: dict[str, int]
) -> None:
    game = play(backbone, rule, 13, exchange="splice", moves=40, **options)
    assert game.engine.stats()["misses"]["spliced"] > 25
    verify(game, backbone)
    for cursor, _ in game.pairs:
        game.engine.close(cursor)
    game.engine.check_integrity()
    assert game.engine.stats()["pages"] == 0


@pytest.mark.parametrize("position", ["jump", "rerotate"])
@pytest.mark.parametrize("backbone", ["hybrid", "bamba", "granite"], indirect=True)
def test_the_packed_pass_is_the_brute_force(backbone: Pair, position: str) -> None:
    plain = [random_trace(seed, steps=12, roots=2) for seed in range(2)]
    traces = [spliced(copy.deepcopy(trace), position) for trace in plain]
    assert sum(bool(s.mounts) for trace in traces for s in trace.segments) > 3
    assert pack(traces).num_rows == sum(packed_tokens(trace) for trace in traces)
    moved = 0.0
    with torch.no_grad():
        mounted = score_traces(backbone.ours, [replace(t, exchange="mount") for t in traces])
        for trace, scores, others in zip(
            traces, score_traces(backbone.ours, traces), mounted, strict=True
        ):
            for got, want, other in zip(scores, brute_logps(backbone.stock, trace), others):
                torch.testing.assert_close(got, want, rtol=0, atol=tolerances.LOGP, equal_nan=True)
                moved = max(moved, (got - other).nan_to_num().abs().max().item())
    assert moved > 0.1, "a splice is no mount"


@pytest.mark.parametrize("mounts", ["live", "detached", "dropped"])
@pytest.mark.parametrize("backbone", ["hybrid", "bamba"], indirect=True)
def test_gradients_are_those_of_the_brute_force(backbone: Pair, mounts: Any) -> None:
    stock, ours = copy.deepcopy(backbone.stock), copy.deepcopy(backbone.ours)
    for model in (stock, ours):
        model.requires_grad_(True)
    trace = spliced(random_trace(4, steps=12))
    want = gradients(stock, brute_logps(stock, trace, mounts=mounts))
    got = gradients(ours, score_traces(ours, [trace], mounts=mounts)[0])
    for name, each in want.items():
        if mounts != "detached" or not name.endswith(DECAY):
            bound = tolerances.GRAD_OTHER * each.norm() + 1e-7
            assert (got[name] - each).norm() <= bound, name


def test_a_reader_moves_and_nobody_else_does_when_a_siblings_text_changes(hybrid: Pair) -> None:
    trace = spliced(random_trace(7, steps=14, lengths=SHORT_LENGTHS))
    changed = next(m for s in trace.segments for m in s.mounts if trace.segments[m].parent)
    other = copy.deepcopy(trace)
    segment = other.segments[changed]
    segment.tokens = [(token + 1) % VOCAB for token in segment.tokens]
    touched = {changed}
    for each in trace.segments:
        if each.parent in touched or touched & set(each.mounts):
            touched.add(each.id)
    with torch.no_grad():
        before, after = (score_traces(hybrid.ours, [one])[0] for one in (trace, other))
    for index, (one, two) in enumerate(zip(before, after, strict=True)):
        far = (one - two).nan_to_num().abs().max().item()
        if index not in touched:
            assert far == tolerances.EXACT, index
    readers = [s.id for s in trace.segments if changed in s.mounts]
    assert any((before[r] - after[r]).nan_to_num().abs().max() > 1e-3 for r in readers)


def test_a_span_is_stepped_through_when_its_reader_goes_on_and_outlives_its_thread(
    hybrid: Pair,
) -> None:
    engine = engine_for(hybrid)
    root = engine.open(list(range(1, 9)))
    writer, reader = engine.extend(engine.fork(root), [7] * 10), engine.fork(root)
    before = engine.logits(reader).clone()
    for _ in range(2):  # reading again adds nothing
        engine.mount(reader, writer, exchange="splice")
    assert torch.equal(engine.logits(reader), before)
    stats = engine.stats()
    assert (stats["mounts"], stats["misses"]["spliced"], stats["replayed"]) == (1, 0, 0)
    assert not any(stats["bytes_copied"].values())
    engine.rewind(writer, 8)
    engine.close(writer)
    child = engine.fork(reader)
    engine.extend(reader, [5])
    stats = engine.stats()
    assert (stats["misses"]["spliced"], stats["replayed"]) == (10, 10)
    engine.extend(child, [5])
    torch.testing.assert_close(engine.logits(child), engine.logits(reader), atol=0, rtol=0)
    engine.rewind(reader, 8)
    engine.extend(reader, [5])
    assert_next(engine.logits(reader), fresh_logits(hybrid, [*range(1, 9), 5]))
    for cursor in (root, reader, child):
        engine.close(cursor)
        engine.check_integrity()
    assert engine.stats()["pages"] == 0


def test_a_splice_that_finds_no_state_slot_changes_nothing(hybrid: Pair) -> None:
    engine = engine_for(hybrid, num_states=2)
    reader, source = engine.open([1, 2, 3]), engine.open([9, 8])
    engine.mount(reader, source, exchange="splice")
    try:
        engine.extend(reader, [4])
    except StatesExhausted:
        assert (reader.num_tokens, reader.position) == (3, 3)
    engine.check_integrity()
    engine.logits(reader)


def test_a_splice_without_meaning_is_refused_with_the_reason(hybrid: Pair) -> None:
    trace = spliced(random_trace(0, steps=12))
    dense = prepare_model(tiny_dense(0), mount_layers=[1, 2])
    some = prepare_model(tiny_hybrid(1, layers=8), mount_layers=[7])
    for model, words in ((dense, "no recurrent layer"), (some, "every layer")):
        engine = Engine(model, page_size=4, num_pages=64, num_states=8)
        reader, source = engine.open([1]), engine.open([2])
        with pytest.raises(ConfigError, match=words):
            engine.mount(reader, source, exchange="splice")
        engine.check_integrity()
        with pytest.raises(ConfigError, match=words):
            score_traces(model, [trace])
        with pytest.raises(ConfigError, match=words):
            EpisodeRunner(engine, byte_tokenizer(), None, RolloutConfig(exchange="splice"))
    engine = engine_for(hybrid)
    reader, source = engine.open([1]), engine.open([2])
    with pytest.raises(ConfigError, match="nothing of its to step through"):
        engine.mount(reader, source, exchange="splice", position="reencode")
    with pytest.raises(ConfigError, match="exchange='paste': must be one of mount, splice"):
        engine.mount(reader, source, exchange="paste")
