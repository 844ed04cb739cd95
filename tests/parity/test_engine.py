"""The engine computes what the packed pass, a plain forward and the brute force compute."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from octopus_trl import Engine, score_traces
from octopus_trl.protocols import SamplingParams
from tests import tolerances
from tests.ledger import Ledger, Place
from tests.oracles import brute_hidden, logits_of
from tests.parity.conftest import FAMILIES, Pair
from tests.tiny import VOCAB

STOP = 0
SMALL = pytest.mark.parametrize("backbone", ["hybrid", "dense", "bamba"], indirect=True)


class Play:
    """Random moves on an engine, each written to a ledger."""

    def __init__(self, engine: Any, seed: int) -> None:
        self.engine, self.ledger = engine, Ledger()
        self.draw = random.Random(seed)
        self.pairs: list[tuple[Any, Place]] = []
        self.heard: list[tuple[int, Tensor]] = []  # token, logits after it
        self.sampled: list[tuple[int, float]] = []  # token, its log-probability when it was drawn

    def tokens(self, most: int) -> list[int]:
        return [self.draw.randrange(1, VOCAB) for _ in range(self.draw.choice([1, 1, 2, 3, most]))]

    def open(self, most: int = 20) -> None:
        # A first token of its own: prompts of separate roots share nothing.
        tokens = [1 + sum(p is None for p in self.ledger.thread_parents), *self.tokens(most)]
        self.pairs.append((self.engine.open(tokens), self.ledger.open(tokens)))

    def move(self, mounts: bool) -> None:
        cursor, place = self.draw.choice(self.pairs)
        kind = self.draw.random()
        if kind < 0.05 and len(self.pairs) < 8:
            self.open()
        elif kind < 0.25 and len(self.pairs) < 8:
            self.pairs.append((self.engine.fork(cursor), self.ledger.fork(place)))
        elif kind < 0.5 and mounts:
            source, read = self.draw.choice(self.pairs)
            since, after = self.draw.choice([(None, None), self.draw.choice(self.pairs)])
            assert self.engine.mount(cursor, source, since) is cursor
            self.ledger.mount(place, read, after)
        elif kind < 0.65 and len(place.chain) > 1:
            length = self.draw.randrange(1, len(place.chain))
            assert self.engine.rewind(cursor, length) is cursor
            self.ledger.rewind(place, length)
        elif kind < 0.8:
            tokens = self.tokens(30)
            assert self.engine.extend(cursor, tokens) is cursor
            self.ledger.extend(place, tokens)
        elif kind < 0.95:
            self.generate(self.draw.sample(self.pairs, self.draw.randint(1, len(self.pairs))))
        elif len(self.pairs) > 2:
            self.pairs.remove((cursor, place))
            self.engine.close(cursor)

    def generate(self, pairs: list[tuple[Any, Place]]) -> None:
        sampling = [
            SamplingParams(
                temperature=self.draw.choice([0.0, 1.0, 1.0]),
                top_k=self.draw.choice([0, 0, 5]),
                max_tokens=self.draw.randint(1, 6),
                seed=self.draw.randrange(10**6),
            )
            for _ in pairs
        ]
        outs = self.engine.generate([cursor for cursor, _ in pairs], sampling, until={STOP})
        for (_, place), params, (tokens, logps) in zip(pairs, sampling, outs, strict=True):
            assert 1 <= len(tokens) == len(logps) <= params.max_tokens
            assert STOP not in tokens[:-1]
            assert len(tokens) == params.max_tokens or tokens[-1] == STOP
            self.ledger.extend(place, tokens, kind="action")
            self.sampled += zip(place.chain[-len(tokens) :], logps, strict=True)

    def listen(self) -> None:
        """Compare what a cursor tells of itself, and keep some logits for the end."""
        for cursor, place in self.pairs:
            assert cursor.num_tokens == len(place.chain)
            assert cursor.position == self.ledger.position(place)
            if self.draw.random() < 0.3:
                logits = self.engine.logits(cursor)
                assert logits.shape == (VOCAB,)
                assert logits.dtype == torch.float32
                self.heard.append((place.chain[-1], logits.clone()))


def play(engine: Any, seed: int, *, moves: int = 40, mounts: bool = True) -> Play:
    game = Play(engine, seed)
    game.open()
    game.open(70)
    for _ in range(moves):
        game.move(mounts)
        game.listen()
        engine.check_integrity()
    game.heard += [(place.chain[-1], engine.logits(cursor)) for cursor, place in game.pairs]
    return game


@torch.no_grad()
def verify(game: Play, pair: Pair) -> float:
    """Compare all that was heard and sampled with the brute force and the packed pass."""
    trace, where = game.ledger.trace()
    if not any(segment.mounts and segment.kind != "tool" for segment in trace.segments):
        trace.check(vocab_size=VOCAB)
    flat, hidden = brute_hidden(pair.stock, trace, mount_layers=pair.mount_layers)
    exact = torch.log_softmax(logits_of(pair.stock, hidden), dim=-1)
    rows = [flat.first[segment] + offset for segment, offset in where]
    worst = 0.0
    for token, logits in game.heard:
        got = torch.log_softmax(logits, dim=-1)
        worst = max(worst, (got - exact[rows[token]]).abs().max().item())
    [scores] = score_traces(pair.ours, [trace])
    for token, logp in game.sampled:
        above = game.ledger.parents[token]
        assert above is not None
        segment, offset = where[token]
        brute = exact[rows[above], game.ledger.tokens[token]].item()
        packed = scores[segment][offset].item()
        worst = max(worst, abs(logp - brute), abs(logp - packed))
    assert worst <= tolerances.LOGP
    return worst


def engine_for(pair: Pair, **options: Any) -> Any:
    return Engine(pair.ours, **{"page_size": 4, "num_pages": 800, "num_states": 64, **options})


@pytest.mark.parametrize(
    "backbone", [*FAMILIES, "hybrid8-one-layer", "bamba-one-layer"], indirect=True
)
@pytest.mark.parametrize("seed", range(2))
def test_random_moves_equal_packed_pass_and_brute_force(backbone: Pair, seed: int) -> None:
    engine = engine_for(backbone)
    verify(play(engine, seed), backbone)


@pytest.mark.parametrize("seed", range(10, 14))
def test_random_moves_without_mounts_equal_packed_pass_and_brute_force(
    hybrid: Pair, seed: int
) -> None:
    verify(play(engine_for(hybrid), seed, mounts=False), hybrid)


@pytest.mark.parametrize("page_size", [1, 3, 48, 256, 768])
def test_every_page_size_gives_the_same(hybrid: Pair, page_size: int) -> None:
    """Case PC-11: accepted at construction means right at every later step."""
    engine = engine_for(hybrid, page_size=page_size, num_pages=max(60, 3000 // page_size))
    verify(play(engine, 20, moves=25), hybrid)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_every_prefill_chunk_gives_the_same(hybrid: Pair, chunk: int) -> None:
    verify(play(engine_for(hybrid, prefill_chunk=chunk), 21, moves=25), hybrid)


@pytest.mark.parametrize("snapshots", [1, 2, 50])
def test_every_number_of_snapshots_gives_the_same(hybrid: Pair, snapshots: int) -> None:
    engine = engine_for(hybrid, max_snapshots=snapshots)
    verify(play(engine, 22, moves=40), hybrid)


@pytest.mark.parametrize("seed", range(30, 33))
def test_few_state_slots_cost_replays_and_never_a_wrong_state(hybrid: Pair, seed: int) -> None:
    """Case PC-04: pages for all threads, slots for few."""
    engine = engine_for(hybrid, num_states=10)
    verify(play(engine, seed, moves=40), hybrid)


def test_eight_forks_that_alternate_over_four_slots_stay_right(hybrid: Pair) -> None:
    engine = engine_for(hybrid, num_states=4)
    game = Play(engine, 34)
    game.open(60)
    cursor, place = game.pairs[0]
    for _ in range(7):
        game.pairs.append((engine.fork(cursor), game.ledger.fork(place)))
    for _ in range(3):
        for child, where in game.pairs:
            tokens = game.tokens(5)
            engine.extend(child, tokens)
            game.ledger.extend(where, tokens)
            game.heard.append((where.chain[-1], engine.logits(child)))
    engine.check_integrity()
    verify(game, hybrid)
    stats = engine.stats()
    assert stats["evicted_states"] > 0
    assert stats["replayed"] > 0
    assert stats["re_prefilled"] == 0
    assert stats["peak_slots"] <= 4


def fresh_logits(pair: Pair, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return pair.stock(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()


def assert_next(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(
        got.log_softmax(-1), want.log_softmax(-1), rtol=0.0, atol=tolerances.LOGP
    )


@SMALL
@pytest.mark.parametrize("back", [1, 7, 65])
def test_a_rewind_takes_the_recurrent_state_back_too(backbone: Pair, back: int) -> None:
    """Case PC-01: decode, go back, decode again: as a fresh run of the prefix."""
    engine = engine_for(backbone)
    draw = random.Random(back)
    tokens = [draw.randrange(1, VOCAB) for _ in range(40)]
    cursor = engine.open(tokens)
    params = SamplingParams(max_tokens=back + 2, seed=1)
    [(sampled, _)] = engine.generate([cursor], params, until=set())
    tokens += sampled
    engine.rewind(cursor, len(tokens) - back)
    tokens = tokens[:-back]
    assert_next(engine.logits(cursor), fresh_logits(backbone, tokens))
    [(again, _)] = engine.generate([cursor], params, until=set())
    tokens += again
    assert_next(engine.logits(cursor), fresh_logits(backbone, tokens))
    engine.check_integrity()


@SMALL
@pytest.mark.parametrize("more", [1, 2, 3, 4, 17, 70])
@pytest.mark.parametrize("after", ["open", "fork", "rewind"])
def test_many_tokens_fed_at_once_go_on_from_state_and_convolution_tail(
    backbone: Pair, after: str, more: int
) -> None:
    """Case PC-02: 50 tokens, then a tool result in one call, equals one prefill of all."""
    engine = engine_for(backbone)
    draw = random.Random(more)
    tokens = [draw.randrange(1, VOCAB) for _ in range(50)]
    cursor = engine.open(tokens)
    if after == "fork":
        cursor = engine.fork(cursor)
    elif after == "rewind":
        engine.rewind(engine.extend(cursor, [5, 6, 7]), 50)
    new = [draw.randrange(1, VOCAB) for _ in range(more)]
    engine.extend(cursor, new)
    assert_next(engine.logits(cursor), fresh_logits(backbone, tokens + new))


@SMALL
def test_tokens_fed_one_by_one_or_at_once_give_the_same(backbone: Pair) -> None:
    engine = engine_for(backbone)
    draw = random.Random(3)
    tokens = [draw.randrange(1, VOCAB) for _ in range(20)]
    slow = engine.open(tokens[:1])
    for token in tokens[1:]:
        engine.extend(slow, [token])
    assert_next(engine.logits(slow), fresh_logits(backbone, tokens))


@SMALL
def test_cursors_forked_earlier_are_untouched_by_everything_later(backbone: Pair) -> None:
    engine = engine_for(backbone)
    cursor = engine.open(list(range(1, 30)))
    other = engine.open([50, 51, 52])
    kept = engine.fork(cursor)
    before, place = engine.logits(kept).clone(), kept.position
    engine.extend(cursor, [3, 4, 5])
    engine.rewind(cursor, 7)
    engine.mount(cursor, other)
    engine.extend(cursor, [6])
    engine.generate([cursor], SamplingParams(max_tokens=5, seed=0), until=set())
    engine.close(cursor)
    assert (kept.num_tokens, kept.position) == (29, place)
    assert torch.equal(engine.logits(kept), before)
    engine.extend(kept, [9, 8])
    assert_next(engine.logits(kept), fresh_logits(backbone, [*range(1, 30), 9, 8]))


@SMALL
def test_a_mount_changes_no_logits_until_the_next_token(backbone: Pair) -> None:
    engine = engine_for(backbone)
    reader, source = engine.open([1, 2, 3]), engine.open(list(range(20, 60)))
    before = engine.logits(reader).clone()
    engine.mount(reader, source)
    assert torch.equal(engine.logits(reader), before)
    assert reader.position == 40
    assert reader.num_tokens == 3
    engine.extend(reader, [4])
    assert reader.position == 41
    assert not torch.allclose(
        engine.logits(reader), fresh_logits(backbone, [1, 2, 3, 4]), atol=1e-3
    )


def test_a_reader_at_2000_that_mounts_1500_to_4000_goes_on_at_4001(dense: Pair) -> None:
    engine = Engine(dense.ours, page_size=64, num_pages=100)
    root = engine.open([1] * 1500)
    writer = engine.extend(engine.fork(root), [2] * 2501)
    reader = engine.extend(engine.fork(root), [3] * 501)
    engine.mount(reader, writer)
    assert reader.position == 4001
    engine.extend(reader, [4])
    assert reader.position == 4002
    assert reader.num_tokens == 2002


def test_reading_again_adds_only_what_is_new(hybrid: Pair) -> None:
    engine = engine_for(hybrid)
    game = Play(engine, 40)
    game.open(20)
    (root, place) = game.pairs[0]
    writer, written = engine.fork(root), game.ledger.fork(place)
    for _ in range(3):
        engine.extend(writer, [7, 8, 9])
        game.ledger.extend(written, [7, 8, 9])
        engine.mount(root, writer)
        assert game.ledger.mount(place, written) == 3
        position = root.position
        engine.mount(root, writer)
        assert game.ledger.mount(place, written) == 0
        assert root.position == position
        engine.extend(root, [5])
        game.ledger.extend(place, [5])
        game.heard.append((place.chain[-1], engine.logits(root)))
    verify(game, hybrid)


def test_closed_and_rewound_sources_stay_readable(hybrid: Pair) -> None:
    """Their pages are filled anew by nobody while a reader holds them."""
    engine = engine_for(hybrid, num_pages=60, num_states=16)
    game = Play(engine, 41)
    game.open(10)
    reader, place = game.pairs[0]
    for way in ("close", "rewind"):
        source, written = engine.fork(reader), game.ledger.fork(place)
        tokens = [game.draw.randrange(1, VOCAB) for _ in range(21)]
        engine.extend(source, tokens)
        game.ledger.extend(written, tokens)
        engine.mount(reader, source)
        game.ledger.mount(place, written)
        if way == "close":
            engine.close(source)
        else:
            engine.rewind(source, source.num_tokens - 20)
            engine.close(source)
        for _ in range(6):
            engine.close(engine.open([game.draw.randrange(1, VOCAB) for _ in range(40)]))
        engine.extend(reader, [5, 6])
        game.ledger.extend(place, [5, 6])
        game.heard.append((place.chain[-1], engine.logits(reader)))
        engine.check_integrity()
    verify(game, hybrid)
