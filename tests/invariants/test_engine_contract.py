"""What the engine promises besides numbers: no copies, right counts, clean failures."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octopus_trl import Engine, prepare_model, score_traces
from octopus_trl.errors import (
    ClosedCursor,
    ConfigError,
    PagesExhausted,
    StaleVersion,
    StatesExhausted,
)
from octopus_trl.protocols import SamplingParams
from octopus_trl.trace import Segment, ThreadRecord, Trace
from tests import tolerances
from tests.tiny import VOCAB, tiny_dense, tiny_hybrid, with_lora

MODELS = {
    "hybrid": prepare_model(tiny_hybrid(0)).requires_grad_(False),
    "dense": prepare_model(tiny_dense(0), mount_layers=[1, 2]).requires_grad_(False),
}
EACH = pytest.mark.parametrize("name", MODELS)


def engine_of(name: str = "hybrid", **options: Any) -> Any:
    return Engine(MODELS[name], **{"page_size": 8, "num_pages": 200, "num_states": 64, **options})


def words(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, VOCAB) for _ in range(length)]


class Dispatched(TorchDispatchMode):
    """Notes every operation that reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@EACH
@pytest.mark.parametrize("length", [5, 200, 1000])
def test_fork_mount_and_rewind_to_a_snapshot_dispatch_no_operation(name: str, length: int) -> None:
    engine = engine_of(name)
    root = engine.open(words(1, length))
    source = engine.extend(engine.fork(root), words(2, 21))
    engine.extend(root, words(3, 9))
    with Dispatched() as dispatched:
        child = engine.fork(root)
        engine.mount(child, source)
        engine.mount(root, source)
        engine.rewind(root, length)
        engine.rewind(root, length)
        engine.close(child)
    assert dispatched.seen == []
    assert set(engine.stats()["bytes_copied"].values()) == {0}
    engine.check_integrity()


@EACH
def test_a_rewind_without_recurrent_state_or_to_any_token_moves_no_keys(name: str) -> None:
    """Replaying rebuilds a state and writes no key: pages stay as they were."""
    engine = engine_of(name)
    cursor = engine.open(words(4, 100))
    held = engine.stats()["pages"] + engine.stats()["cached_pages"]
    for length in (93, 64, 63, 1):
        engine.rewind(cursor, length)
    stats = engine.stats()
    assert stats["pages"] + stats["cached_pages"] <= held
    assert (stats["replayed"] > 0) == (name == "hybrid")
    assert stats["re_prefilled"] == 0


@EACH
def test_counters_are_what_the_calls_imply(name: str) -> None:
    engine = engine_of(name)
    root = engine.open(words(5, 40))
    twin = engine.open(words(5, 40))
    child = engine.fork(root)
    engine.extend(child, words(6, 13))
    outs = engine.generate(
        [root, child, twin], SamplingParams(max_tokens=7, seed=3), until={VOCAB - 1}
    )
    engine.mount(root, child)
    engine.extend(root, words(7, 4))
    engine.rewind(root, 40)
    stats = engine.stats()
    assert stats["prefilled"] == 40 + 13 + 4
    assert stats["reused"] == 40
    assert stats["re_prefilled"] == 0
    assert stats["replayed"] == 0
    assert stats["decoded"] == sum(len(tokens) for tokens, _ in outs)
    assert (stats["opens"], stats["forks"], stats["mounts"], stats["rewinds"]) == (2, 1, 1, 1)
    assert stats["turns"] == 3
    assert stats["cursors"] == 3


@EACH
def test_equal_prompts_share_pages_and_differ_in_nothing(name: str) -> None:
    engine = engine_of(name)
    one = engine.open(words(8, 64))
    pages = engine.stats()["pages"]
    many = [engine.open(words(8, 64)) for _ in range(7)]
    assert engine.stats()["pages"] == pages
    first = engine.logits(one)
    assert all(torch.equal(engine.logits(cursor), first) for cursor in many)
    params = [SamplingParams(max_tokens=6, seed=seed) for seed in range(8)]
    shared = engine.generate([one, *many], params, until=set())
    for param, out in zip(params, shared, strict=True):
        fresh = engine_of(name)
        assert fresh.generate([fresh.open(words(8, 64))], param, until=set()) == [out]


@EACH
@pytest.mark.parametrize("width", [1, 16])
def test_what_a_cursor_samples_does_not_depend_on_the_batch_around_it(
    name: str, width: int
) -> None:
    """Exact, token by token and bit by bit, alone or among 20 others of other lengths."""
    params = SamplingParams(max_tokens=9, seed=11)
    alone = engine_of(name, decode_width=width)
    cursor = alone.open(words(9, 33))
    want = alone.generate([cursor], params, until={0})
    logits = alone.logits(cursor)
    crowd = engine_of(name, decode_width=width)
    others = [crowd.open(words(100 + i, 1 + 7 * i % 50)) for i in range(10)]
    mine = crowd.open(words(9, 33))
    others += [crowd.open(words(200 + i, 1 + 5 * i % 50)) for i in range(10)]
    settings = [SamplingParams(max_tokens=1 + i % 12, seed=i, temperature=0.7) for i in range(20)]
    outs = crowd.generate(
        [*others[:10], mine, *others[10:]], [*settings[:10], params, *settings[10:]], until={0}
    )
    assert outs[10] == want[0]
    assert torch.equal(crowd.logits(mine), logits)


@EACH
def test_the_same_seed_draws_the_same_turn_and_another_seed_another(name: str) -> None:
    engine = engine_of(name)
    root = engine.open(words(10, 30))
    forks = [engine.fork(root) for _ in range(3)]
    params = [SamplingParams(max_tokens=20, seed=seed) for seed in (5, 5, 6)]
    first, second, third = engine.generate(forks, params, until=set())
    assert first == second
    assert first != third


@EACH
def test_temperature_zero_takes_the_likeliest_token(name: str) -> None:
    engine = engine_of(name)
    cursor = engine.open(words(11, 30))
    for _ in range(5):
        logits = engine.logits(cursor)
        [([token], [logp])] = engine.generate(
            [cursor], SamplingParams(temperature=0.0, max_tokens=1), until=set()
        )
        assert token == int(logits.argmax())
        assert logp == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-6)


@pytest.mark.parametrize(
    "limits", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.5}, {"top_k": 4, "top_p": 0.5}]
)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_log_probabilities_are_of_the_distribution_before_it_was_cut(
    limits: dict[str, Any], temperature: float
) -> None:
    engine = engine_of()
    root = engine.open(words(12, 30))
    logits = engine.logits(root)
    full = (logits / temperature).log_softmax(-1)
    probs = full.exp()
    kept = set(range(VOCAB))
    if "top_k" in limits:
        kept &= set(full.topk(limits["top_k"]).indices.tolist())
    if "min_p" in limits:
        kept &= set((probs >= limits["min_p"] * probs.max()).nonzero().flatten().tolist())
    for seed in range(25):
        params = SamplingParams(max_tokens=1, seed=seed, temperature=temperature, **limits)
        [([token], [logp])] = engine.generate([engine.fork(root)], params, until=set())
        assert token in kept
        assert logp == pytest.approx(float(full[token]), abs=1e-5)


@EACH
def test_the_step_0_kl_of_an_episode_is_at_most_1e_8(name: str) -> None:
    """Rollout against training, unmounted, mounted and after a rewind, before any update."""
    engine = engine_of(name)
    prompt = words(13, 50)
    root = engine.open(prompt)
    segments = [Segment(0, 0, None, "prompt", prompt)]
    params = SamplingParams(max_tokens=24, seed=1)

    def act(cursor: Any, thread: int, parent: int) -> int:
        start = cursor.position
        [(tokens, logps)] = engine.generate([cursor], params, until=set())
        segments.append(
            Segment(len(segments), thread, parent, "action", tokens, start=start, logps=logps)
        )
        return len(segments) - 1

    def tell(cursor: Any, thread: int, parent: int, tokens: list[int], mounts: list[int]) -> int:
        start = cursor.position
        engine.extend(cursor, tokens)
        segments.append(Segment(len(segments), thread, parent, "tool", tokens, mounts, start))
        return len(segments) - 1

    asked = act(root, 0, 0)
    child = engine.fork(root)
    told = tell(child, 1, asked, words(14, 65), [])
    found = act(child, 1, told)
    engine.mount(root, child)
    read = tell(root, 0, asked, words(15, 3), [told, found])
    act(root, 0, read)
    engine.rewind(root, len(prompt) + 24)
    note = tell(root, 0, asked, words(16, 5), [])
    act(root, 0, note)
    threads = [ThreadRecord(0, None), ThreadRecord(1, 0)]
    trace = Trace("kl", "p", threads=threads, segments=segments).check(vocab_size=VOCAB)
    [scores] = score_traces(MODELS[name], [trace])
    for segment, score in zip(trace.segments, scores, strict=True):
        if segment.logps is None:
            continue
        gap = score.double() - torch.tensor(segment.logps, dtype=torch.float64)
        assert (gap.expm1() - gap).mean() <= tolerances.KL_CPU
        assert gap.abs().max() <= tolerances.LOGP
    stats = engine.stats()
    not_sampled = sum(len(s.tokens) for s in trace.segments if s.kind != "action")
    assert stats["prefilled"] == not_sampled
    assert stats["decoded"] == trace.num_owned
    assert stats["re_prefilled"] == 0


@EACH
def test_when_pages_run_out_the_call_fails_and_nothing_has_changed(name: str) -> None:
    engine = engine_of(name, num_pages=10)
    keep = engine.open(words(17, 40))
    before, logits = engine.stats(), engine.logits(keep)
    attempts: list[Callable[[], Any]] = [
        lambda: engine.open(words(18, 81)),
        lambda: engine.open(words(17, 40) + words(18, 90)),
        lambda: engine.extend(keep, words(19, 60)),
    ]
    for attempt in attempts:
        with pytest.raises(PagesExhausted) as caught:
            attempt()
        assert caught.value.needed > caught.value.free + caught.value.evictable
        engine.check_integrity()
        after = engine.stats()
        for count in ("pages", "cursors", "prefilled", "slots"):
            assert after[count] == before[count], count
        assert torch.equal(engine.logits(keep), logits)
    engine.extend(keep, words(19, 30))
    assert keep.num_tokens == 70


@EACH
def test_a_turn_that_outgrows_the_pool_fails_alone(name: str) -> None:
    engine = engine_of(name, num_pages=12, prefill_chunk=16)
    small, large = engine.open(words(20, 9)), engine.open(words(21, 9))
    settings = [SamplingParams(max_tokens=5, seed=1), SamplingParams(max_tokens=500, seed=2)]
    tickets = [
        engine.submit(cursor, [], params, until=set())
        for cursor, params in zip((small, large), settings, strict=True)
    ]
    done = {}
    while engine.has_work:
        for finished in engine.step():
            done[finished.ticket] = finished
    assert done[tickets[0]].reason == "length"
    assert done[tickets[1]].reason == "error"
    assert done[tickets[1]].error
    assert len(done[tickets[1]].tokens) > 5
    engine.check_integrity()
    fresh = engine_of(name)
    want = fresh.generate([fresh.open(words(20, 9))], settings[0], until=set())
    assert (done[tickets[0]].tokens, done[tickets[0]].logps) == want[0]


@EACH
def test_closing_everything_gives_every_page_and_slot_back(name: str) -> None:
    engine = engine_of(name)
    total = engine.num_free_pages
    draw = random.Random(22)
    cursors = [engine.open(words(i, 20)) for i in range(4)]
    for index in range(30):
        cursor = draw.choice(cursors)
        if index % 5 == 0:
            cursors.append(engine.fork(cursor))
        elif index % 5 == 1:
            engine.mount(cursor, draw.choice(cursors))
            engine.extend(cursor, words(index, 5))
        elif index % 5 == 2:
            engine.rewind(cursor, draw.randint(1, cursor.num_tokens))
        else:
            engine.generate([cursor], SamplingParams(max_tokens=3, seed=index), until=set())
    assert engine.num_free_pages < total
    draw.shuffle(cursors)
    for cursor in cursors:
        engine.close(cursor)
        engine.check_integrity()
    assert engine.num_free_pages == total
    assert engine.stats()["pages"] == 0
    assert engine.stats()["cursors"] == 0
    engine.set_policy_version(engine.policy_version + 1)
    assert engine.stats()["slots"] == 0
    assert engine.stats()["cached_pages"] == 0


@EACH
def test_nothing_of_an_old_policy_is_used_under_a_new_one(name: str) -> None:
    """Case PC-08: a live thread is held open over an optimizer step."""
    build = tiny_hybrid if name == "hybrid" else tiny_dense
    model = build(0)
    model = prepare_model(model) if name == "hybrid" else prepare_model(model, mount_layers=[1])
    engine = Engine(model, page_size=8, num_pages=100, num_states=32)
    old = engine.open(words(23, 30))
    other = engine.open(words(24, 10))
    before = engine.logits(old).clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    engine.set_policy_version(1)
    new = engine.open(words(23, 30))
    assert not torch.allclose(engine.logits(new), before, atol=1e-3)
    with torch.no_grad():
        want = model(torch.tensor([words(23, 30)]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(engine.logits(new), want, rtol=0, atol=tolerances.LOGITS)
    params = SamplingParams(max_tokens=2)
    stale: list[Callable[[], Any]] = [
        lambda: engine.fork(old),
        lambda: engine.mount(new, old),
        lambda: engine.mount(new, new, old),
        lambda: engine.mount(old, new),
        lambda: engine.extend(old, [1]),
        lambda: engine.rewind(old, 3),
        lambda: engine.logits(old),
        lambda: engine.generate([old], params, until=set()),
        lambda: engine.submit(old, [1], params, until=set()),
    ]
    for use in stale:
        with pytest.raises(StaleVersion):
            use()
    engine.close(old)
    engine.close(other)
    engine.check_integrity()
    assert engine.policy_version == 1


def test_an_adapter_that_learned_is_seen_after_the_version_moves() -> None:
    model = prepare_model(with_lora(tiny_hybrid(0)))
    engine = Engine(model, page_size=8, num_pages=100, num_states=32)
    before = engine.logits(engine.open(words(25, 30))).clone()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.5)
        want = model(torch.tensor([words(25, 30)]), use_cache=False).logits[0, -1]
    engine.set_policy_version(1)
    after = engine.logits(engine.open(words(25, 30)))
    torch.testing.assert_close(after, want, rtol=0, atol=tolerances.LOGITS)
    assert not torch.allclose(after, before, atol=1e-3)


@EACH
def test_sleep_gives_memory_back_and_wake_computes_the_same(name: str) -> None:
    engine = engine_of(name)
    old = engine.open(words(26, 20))
    want = engine.logits(old).clone()
    engine.sleep()
    with pytest.raises(ConfigError, match="wake"):
        engine.open(words(26, 20))
    engine.wake()
    with pytest.raises(StaleVersion):
        engine.extend(old, [1])
    assert torch.equal(engine.logits(engine.open(words(26, 20))), want)
    engine.check_integrity()


@EACH
def test_a_cancelled_turn_keeps_exactly_what_it_drew(name: str) -> None:
    engine = engine_of(name)
    cursor, other = engine.open(words(27, 20)), engine.open(words(28, 20))
    params = SamplingParams(max_tokens=30, seed=4)
    ticket = engine.submit(cursor, words(29, 3), params, until=set())
    engine.submit(other, [], SamplingParams(max_tokens=10, seed=5), until=set())
    for _ in range(6):
        engine.step()
    tokens, logps = engine.cancel(ticket)
    assert 0 < len(tokens) == len(logps) < 30
    assert cursor.num_tokens == 20 + 3 + len(tokens)
    engine.check_integrity()
    fresh = engine_of(name)
    again = fresh.extend(fresh.open(words(27, 20)), words(29, 3))
    [(full, full_logps)] = fresh.generate([again], params, until=set())
    assert full[: len(tokens)] == tokens
    assert full_logps[: len(tokens)] == logps
    queued = engine.submit(cursor, [5], params, until=set())
    assert engine.cancel(queued) == ([], [])
    assert cursor.num_tokens == 20 + 3 + len(tokens)
    with pytest.raises(ConfigError):
        engine.cancel(queued)


@EACH
def test_submitted_turns_give_what_extend_and_generate_give(name: str) -> None:
    engine, other = engine_of(name), engine_of(name)
    params = [SamplingParams(max_tokens=3 + i, seed=i) for i in range(5)]
    cursors = [engine.open(words(40 + i, 10 + 13 * i)) for i in range(5)]
    tickets = [
        engine.submit(cursor, words(50 + i, 1 + 20 * i), params[i], until={0})
        for i, cursor in enumerate(cursors)
    ]
    done = {}
    while engine.has_work:
        for finished in engine.step():
            done[finished.ticket] = finished
    for i, ticket in enumerate(tickets):
        cursor = other.extend(other.open(words(40 + i, 10 + 13 * i)), words(50 + i, 1 + 20 * i))
        [(tokens, logps)] = other.generate([cursor], params[i], until={0})
        assert (done[ticket].tokens, done[ticket].logps) == (tokens, logps)
        assert done[ticket].reason == ("stop" if tokens[-1] == 0 else "length")
        assert cursors[i].num_tokens == cursor.num_tokens
        assert torch.equal(engine.logits(cursors[i]), other.logits(cursor))


def test_a_stop_token_is_kept_and_fed() -> None:
    engine = engine_of()
    cursor = engine.open(words(30, 12))
    likely = int(engine.logits(cursor).argmax())
    params = SamplingParams(temperature=0.0, max_tokens=50)
    assert engine.generate([cursor], params, until={likely})[0][0] == [likely]
    assert cursor.num_tokens == 13
    again = engine.open([*words(30, 12), likely])
    torch.testing.assert_close(
        engine.logits(cursor), engine.logits(again), rtol=0, atol=tolerances.LOGITS
    )


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 0},
        {"page_size": -1},
        {"page_size": 1.5},
        {"page_size": True},
        {"num_pages": 0},
        {"num_states": 0},
        {"device": "cuda"},
    ],
)
def test_an_impossible_size_is_refused_at_construction(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        engine_of("hybrid", **options)


def test_a_model_that_was_not_prepared_is_refused() -> None:
    with pytest.raises(ConfigError, match="prepare_model"):
        Engine(tiny_hybrid(0), page_size=8, num_pages=8)


@EACH
def test_wrong_arguments_are_refused_and_change_nothing(name: str) -> None:
    engine = engine_of(name)
    cursor, closed = engine.open(words(31, 10)), engine.open(words(32, 10))
    foreign = engine_of(name).open(words(31, 10))
    engine.close(closed)
    engine.close(closed)
    params = SamplingParams(max_tokens=1)
    refused: list[tuple[type[Exception], Callable[[], Any]]] = [
        (ConfigError, lambda: engine.open([])),
        (ConfigError, lambda: engine.open([VOCAB])),
        (ConfigError, lambda: engine.open([-1])),
        (ConfigError, lambda: engine.extend(cursor, [3, VOCAB])),
        (ConfigError, lambda: engine.rewind(cursor, 11)),
        (ConfigError, lambda: engine.rewind(cursor, 0)),
        (ConfigError, lambda: engine.rewind(cursor, -1)),
        (ConfigError, lambda: engine.fork(foreign)),
        (ConfigError, lambda: engine.mount(cursor, foreign)),
        (ConfigError, lambda: engine.fork(3)),
        (ConfigError, lambda: engine.generate([cursor, cursor], params, until=set())),
        (ConfigError, lambda: engine.generate([cursor], [params] * 2, until=set())),
        (ClosedCursor, lambda: engine.fork(closed)),
        (ClosedCursor, lambda: engine.extend(closed, [1])),
        (ClosedCursor, lambda: engine.mount(cursor, closed)),
        (ClosedCursor, lambda: engine.generate([cursor, closed], params, until=set())),
    ]
    before = engine.logits(cursor).clone()
    for error, call in refused:
        with pytest.raises(error):
            call()
    assert (cursor.num_tokens, cursor.position) == (10, 10)
    assert torch.equal(engine.logits(cursor), before)
    assert not engine.has_work
    engine.check_integrity()


def test_when_states_run_out_the_call_fails_and_nothing_has_changed() -> None:
    engine = engine_of(num_states=1)
    keep = engine.open(words(33, 10))
    logits = engine.logits(keep).clone()
    for _ in range(3):
        with contextlib.suppress(StatesExhausted):
            engine.extend(engine.fork(keep), [1, 2])
        engine.check_integrity()
        assert torch.equal(engine.logits(keep), logits)
        assert keep.num_tokens == 10
