"""Turns on fused passes: what the host knows, what is under way, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from octopus_trl.engine import Cursor, Engine, fused_runner
from octopus_trl.engine.graphs import DecodeSteps
from octopus_trl.engine.sampler import uniforms
from octopus_trl.engine.staging import Device, Event
from octopus_trl.errors import ConfigError
from octopus_trl.maths.sampling import uniform
from octopus_trl.models import prepare_model
from octopus_trl.protocols import Finished, SamplingParams
from tests.engine.conftest import small_engine, tokens
from tests.engine.replay import play
from tests.tiny import random_trace, tiny_hybrid, with_lora
from tests.tolerances import LOGP

GIVEN = (0, 3, 70, 1, 9)


class LateDevice(Device):
    """A device that does nothing before somebody waits for it."""

    def __init__(self, place: torch.device) -> None:
        super().__init__(place)
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self.behind: list[int] = []  # launches behind the awaited one, at each wait

    def launch(self, work: Callable[[], object]) -> None:
        self.queue.append(work)

    def mark(self) -> Event:
        return _Mark(self, len(self.queue))

    def settle(self) -> None:
        self.run(len(self.queue))

    @torch.no_grad()
    def run(self, until: int) -> None:
        while self.done < until:
            self.queue[self.done]()
            self.done += 1


class _Mark(Event):
    def __init__(self, device: LateDevice, place: int) -> None:
        super().__init__("cpu")
        self._device, self._place = device, place

    def wait(self) -> None:
        self._device.behind.append(len(self._device.queue) - self._place)
        self._device.run(self._place)


@pytest.fixture(params=["at once", "late"])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make engines with fused passes, on a device that runs at once or as late as it may."""
    if request.param == "late":
        monkeypatch.setattr(fused_runner, "Device", LateDevice)

    def make(model: Any, **options: Any) -> Engine:
        return small_engine(model, fused=True, **options)

    return make


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(fused_runner, "Device", LateDevice)

    def make(model: Any, **options: Any) -> tuple[Engine, LateDevice]:
        engine = small_engine(model, fused=True, **options)
        assert engine._paths.passes is not None
        device = engine._paths.passes.device
        assert isinstance(device, LateDevice)
        return engine, device

    return make


def run_turns(engine: Engine, *, top_k: int = 0) -> list[tuple[list[int], list[float], Any]]:
    """Turns that join and leave at different times, some after a fork, one after a mount."""
    root = engine.open(tokens(11))
    other = engine.extend(engine.fork(root), tokens(5, 3))
    cursors: list[Cursor] = []
    tickets: list[int] = []
    ended: dict[int, Finished] = {}
    for index, given in enumerate(GIVEN):
        cursor = engine.fork(root)
        if index % 2:
            engine.mount(cursor, other)
        params = SamplingParams(
            temperature=0.8, seed=index, max_tokens=3 + 4 * index, top_k=top_k if index == 1 else 0
        )
        cursors.append(cursor)
        tickets.append(engine.submit(cursor, tokens(given, index), params, until={0, 5}))
        for _ in range(index):
            ended.update({one.ticket: one for one in engine.step()})
            engine.check_integrity()
    while engine.has_work:
        ended.update({one.ticket: one for one in engine.step()})
        engine.check_integrity()
    return [
        (ended[ticket].tokens, ended[ticket].logps, engine.logits(cursor))
        for ticket, cursor in zip(tickets, cursors, strict=True)
    ]


@pytest.mark.parametrize(
    "rule", [{"position": "rerotate"}, {"exchange": "splice"}], ids=lambda rule: str(*rule.values())
)
def test_copies_and_splices_fit_between_fused_passes(fused: Any, rule: dict[str, Any]) -> None:
    model = prepare_model(tiny_hybrid(0))

    def run(engine: Engine) -> list[Any]:
        root = engine.open(tokens(11))
        other = engine.fork(root)
        drawn = [engine.generate([other], SamplingParams(max_tokens=7, seed=1), until={0})]
        reader = engine.mount(engine.fork(root), other, **rule)
        second = engine.mount(engine.fork(reader), engine.extend(other, tokens(3, 5)), **rule)
        drawn.append(
            engine.generate([reader, second], SamplingParams(max_tokens=5, seed=2), until={0})
        )
        engine.check_integrity()
        return [*drawn, engine.logits(reader), engine.logits(second)]

    want, found = run(small_engine(model)), run(fused(model))
    for ours, theirs in zip(found[:2], want[:2], strict=True):
        for (ids, logps), (want_ids, want_logps) in zip(ours, theirs, strict=True):
            assert ids == want_ids
            assert logps == pytest.approx(want_logps, abs=LOGP)
    for ours, theirs in zip(found[2:], want[2:], strict=True):
        torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), atol=LOGP, rtol=0)


@pytest.mark.parametrize("options", [{}, {"decode_width": 4, "prefill_chunk": 64}], ids=str)
@pytest.mark.parametrize("top_k", [0, 5])
def test_turns_draw_what_they_draw_on_the_models_own_forward(
    model: Any, fused: Any, options: dict[str, int], top_k: int
) -> None:
    want = run_turns(small_engine(model), top_k=top_k)
    found = run_turns(fused(model, **options), top_k=top_k)
    for (ids, logps, logits), (want_ids, want_logps, want_logits) in zip(found, want, strict=True):
        assert ids == want_ids
        torch.testing.assert_close(torch.tensor(logps), torch.tensor(want_logps), atol=LOGP, rtol=0)
        torch.testing.assert_close(
            logits.log_softmax(-1), want_logits.log_softmax(-1), atol=LOGP, rtol=0
        )


@pytest.mark.parametrize("chunk", [6, 512])
def test_random_episodes_give_the_same_logits(model: Any, fused: Any, chunk: int) -> None:
    trace = random_trace(31)
    want = play(small_engine(model), trace)[1]
    found = play(fused(model, prefill_chunk=chunk), trace)[1]
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), atol=LOGP, rtol=0)


@pytest.mark.parametrize("merge", [False, True])
def test_adapters_that_were_trained_are_seen_by_the_next_turn(merge: bool) -> None:
    model = prepare_model(with_lora(tiny_hybrid()))
    engine = small_engine(model, fused=True, merge_adapters=merge)
    plain = small_engine(model)
    params = SamplingParams(seed=1, max_tokens=6)
    for version in (1, 2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(-2)
        found = []
        for each in (engine, plain):
            each.set_policy_version(version)
            cursor = each.open(tokens(9))
            [(ids, _)] = each.generate([cursor], params, until=())
            found.append((ids, each.logits(cursor)))
        assert found[0][0] == found[1][0]
        torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=0)


def test_the_next_step_is_launched_before_the_last_one_is_read(hybrid: Any, late: Any) -> None:
    engine, device = late(hybrid)
    cursor = engine.open(tokens(5))
    ticket = engine.submit(cursor, [], SamplingParams(seed=1, max_tokens=30), until=())
    for _ in range(4):
        engine.step()
    device.behind.clear()
    for number in range(8):
        engine.step()
        # Whatever was awaited, a whole step and its copies were behind it.
        assert min(device.behind) >= 3, number
        device.behind.clear()
    ids, logps = engine.cancel(ticket)
    assert len(ids) == len(logps) == cursor.num_tokens - 5


def test_a_turn_that_is_cancelled_while_its_step_is_under_way_keeps_what_was_read(
    model: Any, late: Any
) -> None:
    plain = small_engine(model)
    params = SamplingParams(seed=3, max_tokens=20)
    cursor = plain.open(tokens(8))
    [(want, _)] = plain.generate([plain.fork(cursor)], params, until=())
    engine, _ = late(model)
    for steps in range(1, 7):
        cursor = engine.fork(engine.open(tokens(8)))
        ticket = engine.submit(cursor, [], params, until=())
        for _ in range(steps):
            engine.step()
        ids, _ = engine.cancel(ticket)
        assert ids == want[: len(ids)]
        assert len(ids) == max(0, steps - 1)
        assert cursor.num_tokens == 8 + len(ids)
        # It goes on from there as if nothing had been under way.
        engine.extend(cursor, want[len(ids) : len(ids) + 2])
        theirs = plain.extend(plain.open(tokens(8)), want[: len(ids) + 2])
        torch.testing.assert_close(
            engine.logits(cursor).log_softmax(-1),
            plain.logits(theirs).log_softmax(-1),
            atol=LOGP,
            rtol=0,
        )
        engine.check_integrity()


def test_a_stop_token_is_fed_and_nothing_after_it(model: Any, fused: Any) -> None:
    plain = small_engine(model)
    params = SamplingParams(temperature=0.0, max_tokens=9)
    [(ids, _)] = plain.generate([plain.open(tokens(8))], params, until=())
    engine = fused(model)
    cursor = engine.open(tokens(8))
    [(found, _)] = engine.generate([cursor], params, until={ids[4]})
    stop = ids.index(ids[4])
    assert found == ids[: stop + 1]
    assert cursor.num_tokens == 8 + stop + 1
    theirs = plain.extend(plain.open(tokens(8)), found)
    torch.testing.assert_close(engine.logits(cursor), plain.logits(theirs), atol=1e-4, rtol=0)


def test_logits_that_are_not_finite_end_their_turn_alone(
    hybrid: Any, fused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fused(hybrid)
    root = engine.open(tokens(8))
    params = [SamplingParams(seed=seed, max_tokens=6) for seed in range(3)]
    want = engine.generate([engine.fork(root) for _ in range(3)], params, until=())
    engine._paths.passes.device.settle()  # the step behind the last token
    sample, calls = engine._paths.passes.steps._sample, 0

    def broken(logits: torch.Tensor, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            logits = logits.clone()
            logits[1] = float("nan")
        return sample(logits, **settings)

    monkeypatch.setattr(engine._paths.passes.steps, "_sample", broken)
    cursors = [engine.fork(root) for _ in range(3)]
    tickets = [
        engine.submit(cursor, [], each, until=())
        for cursor, each in zip(cursors, params, strict=True)
    ]
    ended: dict[int, Finished] = {}
    while engine.has_work:
        ended.update({one.ticket: one for one in engine.step()})
        engine.check_integrity()
    assert [ended[ticket].reason for ticket in tickets] == ["length", "error", "length"]
    assert ended[tickets[0]].tokens == want[0][0]
    assert ended[tickets[2]].tokens == want[2][0]
    assert ended[tickets[1]].tokens == want[1][0][:2]
    assert cursors[1].num_tokens == 8 + 2
    [(rest, _)] = engine.generate([cursors[1]], SamplingParams(seed=7, max_tokens=3), until=())
    assert len(rest) == 3


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_a_failing_step_takes_its_growth_back(
    model: Any, fused: Any, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    engine = fused(model)
    cursor = engine.open(tokens(6))
    params = SamplingParams(seed=1, max_tokens=9)
    [(want, _)] = engine.generate([engine.fork(cursor)], params, until=())
    free, feed, calls = engine.num_free_pages, DecodeSteps.feed, 0

    def fail(steps: DecodeSteps, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise RuntimeError("out of memory")
        return feed(steps, *args, **options)

    monkeypatch.setattr(DecodeSteps, "feed", fail)
    ticket = engine.submit(cursor, [], params, until=())
    ended: list[Finished] = []
    while engine.has_work:
        ended += engine.step()
        engine.check_integrity()
    drawn = want[: failing - 1]
    assert (ended[0].ticket, ended[0].reason, ended[0].tokens) == (ticket, "error", drawn)
    assert cursor.num_tokens == 6 + len(drawn)
    monkeypatch.undo()
    engine.rewind(cursor, 6)
    assert engine.num_free_pages == free
    [(again, _)] = engine.generate([cursor], params, until=())
    assert again == want


def test_a_short_text_goes_with_the_steps_of_the_others_and_a_long_one_in_a_pass(
    hybrid: Any, fused: Any
) -> None:
    plain, engine = small_engine(hybrid), fused(hybrid)
    results = []
    for each in (plain, engine):
        root = each.open(tokens(9))
        cursors = [each.fork(root) for _ in range(7)]
        params = SamplingParams(seed=5, max_tokens=40)
        for cursor in cursors[2:]:
            each.submit(cursor, [], params, until=())
        for _ in range(3):
            each.step()
        before = each.stats()["prefill_passes"]
        each.submit(cursors[0], tokens(4, 1), params, until=())
        for _ in range(8):
            each.step()
        short = each.stats()["prefill_passes"] - before
        each.submit(cursors[1], tokens(30, 2), params, until=())
        while each.has_work:
            each.step()
        each.check_integrity()
        long = each.stats()["prefill_passes"] - before - short
        results.append((short, long, [each.logits(cursor) for cursor in cursors]))
    assert results[0][:2] == (1, 1)
    assert results[1][:2] == (0, 1)
    for ours, want in zip(results[1][2], results[0][2], strict=True):
        torch.testing.assert_close(ours, want, atol=1e-4, rtol=0)


def test_more_turns_than_a_step_has_rows_run_in_several_steps(model: Any, fused: Any) -> None:
    params = [SamplingParams(seed=seed, max_tokens=4 + seed % 3) for seed in range(9)]

    def drawn(engine: Engine) -> Any:
        root = engine.open(tokens(7))
        return engine.generate([engine.fork(root) for _ in params], params, until={1})

    for ours, want in zip(
        drawn(fused(model, decode_width=4)), drawn(small_engine(model)), strict=True
    ):
        assert ours[0] == want[0]


def test_pools_that_slept_are_filled_anew(model: Any, fused: Any) -> None:
    engine = fused(model)
    params = SamplingParams(seed=2, max_tokens=7)
    [(want, _)] = engine.generate([engine.open(tokens(9))], params, until=())
    for _ in range(2):
        engine.sleep()
        engine.wake()
        [(again, _)] = engine.generate([engine.open(tokens(9))], params, until=())
        assert again == want
        engine.check_integrity()


def test_positions_beyond_the_first_rotary_table_are_reached(
    hybrid: Any, fused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octopus_trl.models.fused.POSITIONS", 8)
    params = SamplingParams(seed=2, max_tokens=30)
    plain, engine = small_engine(hybrid), fused(hybrid)
    found = [
        each.generate([each.open(tokens(6))], params, until=())[0][0] for each in (plain, engine)
    ]
    assert found[0] == found[1]


def test_draws_of_many_rows_are_those_of_the_one_row_function() -> None:
    seeds, indices = torch.randint(1 << 62, (50,)).tolist(), list(range(50))
    many = uniforms(*(torch.tensor(part).numpy().astype("uint64") for part in (seeds, indices)))
    assert many.tolist() == [uniform(s, i) for s, i in zip(seeds, indices, strict=True)]


def test_a_model_without_fused_passes_is_refused_where_they_are_asked_for() -> None:
    model = prepare_model(tiny_hybrid())
    model.model.layers[0].mlp.down_proj.__class__ = type("Quantised", (torch.nn.Linear,), {})
    with pytest.raises(ConfigError, match=r"fused=True: down_proj is a Quantised"):
        small_engine(model, fused=True)


def test_adapters_that_are_added_switched_off_or_merged_are_seen() -> None:
    from peft import LoraConfig

    model = prepare_model(with_lora(tiny_hybrid()))
    engine, plain = small_engine(model, fused=True), small_engine(model, fused=False)

    def same(version: int) -> torch.Tensor:
        found = []
        for each in (engine, plain):
            each.set_policy_version(version)
            found.append(each.logits(each.open(tokens(20))))
        torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0)
        return found[0]

    first = same(1)
    with model.disable_adapter():
        off = same(2)
    config = LoraConfig(r=5, target_modules=["down_proj", "in_proj_z"], init_lora_weights=False)
    model.add_adapter("other", config)
    model.set_adapter("other")
    other = same(3)
    model.set_adapter("default")
    assert torch.allclose(same(4), first)
    model.merge_adapter()
    torch.testing.assert_close(same(5), first, atol=1e-4, rtol=0)
    model.unmerge_adapter()
    assert (first - off).abs().max() > 0.1
    assert (first - other).abs().max() > 0.1


def test_a_switched_adapter_is_seen_without_a_new_policy_version() -> None:
    model = prepare_model(with_lora(tiny_hybrid()))
    engine = small_engine(model, fused=True)
    cursor = engine.open(tokens(20))
    first = engine.logits(engine.extend(engine.fork(cursor), [1, 2]))
    with model.disable_adapter():
        off = engine.logits(engine.extend(engine.fork(cursor), [1, 2]))
    assert (first - off).abs().max() > 0.1
    again = engine.logits(engine.extend(engine.fork(cursor), [1, 2]))
    assert torch.equal(first, again)
