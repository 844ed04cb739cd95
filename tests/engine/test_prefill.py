"""Prefill passes padded to one of few sizes: padding changes nothing, a size is captured once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from octopus_trl.engine import Engine, prefill
from octopus_trl.engine.prefill import PrefillPass
from octopus_trl.engine.row_work import WorkShape
from octopus_trl.models import prepare_model
from octopus_trl.protocols import SamplingParams
from tests.engine.conftest import small_engine, tokens
from tests.engine.padding import play_game, poison_padding, pools_of, prefill_of
from tests.tiny import VOCAB, tiny_hybrid, with_lora
from tests.tolerances import LOGP

LENGTHS = (1, 2, 7, 30, 63, 64, 65, 80)


def game(engine: Engine, seed: int, steps: int = 14) -> list[torch.Tensor]:
    return play_game(engine, seed, vocab=VOCAB, lengths=LENGTHS, steps=steps)


def engine_of(model: Any, **options: Any) -> Engine:
    return small_engine(model, fused=True, num_pages=2000, **options)


class Replays:
    """Stands for CUDA graphs: a capture runs nothing, a replay runs what was captured."""

    def __init__(self) -> None:
        self.captured = self.replayed = self.released = 0

    def rehearse(self, run: Callable[[], object]) -> None:
        run()

    def capture(self, run: Callable[[], object]) -> Replays:
        self.captured += 1
        graph = Replays()

        def replay() -> None:
            self.replayed += 1
            run()

        graph.replay = replay  # type: ignore[attr-defined]
        return graph

    def release(self) -> None:
        self.released += 1


def with_replays(engine: Engine) -> Replays:
    passes = prefill_of(engine)
    passes.capture, passes._captures = True, Replays()  # type: ignore[assignment]
    return passes._captures  # type: ignore[return-value]


@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 100}, {"decode_width": 4}], ids=str)
def test_a_padded_pass_gives_what_it_gives_without_padding(
    model: Any, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    padded = engine_of(model, **options)
    found = game(padded, 1)
    monkeypatch.setattr(prefill, "MOST_CAPTURED", 0)
    plain = engine_of(model, **options)
    want = game(plain, 1)
    assert prefill_of(padded)._ran
    assert not prefill_of(plain)._ran
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), atol=LOGP, rtol=0)
    for ours, theirs in zip(pools_of(padded), pools_of(plain), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0, equal_nan=True)


@pytest.mark.parametrize("seed", range(2))
def test_what_padding_holds_reaches_no_row_page_or_state(model: Any, seed: int) -> None:
    poisoned, plain = poison_padding(engine_of(model)), engine_of(model)
    for ours, theirs in zip(game(poisoned, seed), game(plain, seed), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(pools_of(poisoned), pools_of(plain), strict=True):
        assert torch.equal(ours.nan_to_num(123.0), theirs.nan_to_num(123.0))


def test_padding_runs_leave_the_zero_state_zero(hybrid: Any) -> None:
    engine = engine_of(hybrid)
    root = engine.open(tokens(9))
    for count in (2, 5, 7):
        for index in range(count):
            params = SamplingParams(max_tokens=1, seed=1)
            engine.submit(engine.fork(root), tokens(3 + index), params, until=())
        while engine.has_work:
            engine.step()
    assert {(size.rows, size.runs) for size in prefill_of(engine)._ran} >= {(64, 4), (64, 16)}
    memory = engine._memory
    for tensor in [*memory.tails.values(), *memory.states.values()]:
        assert not tensor[0].any()


def test_a_size_runs_once_then_is_captured_and_replayed_with_what_each_pass_brings(
    model: Any,
) -> None:
    captured, plain = engine_of(model), engine_of(model)
    replays = with_replays(captured)
    for ours, theirs in zip(game(captured, 3, 20), game(plain, 3, 20), strict=True):
        assert torch.equal(ours, theirs)
    passes = prefill_of(captured)
    assert set(passes._graphs) <= passes._ran
    assert 0 < replays.captured == len(passes._graphs)
    assert replays.replayed > replays.captured
    assert captured.stats()["seconds"]["capture"] > 0


@pytest.mark.parametrize("merge", [False, True])
def test_adapters_trained_between_replays_count(merge: bool) -> None:
    model = prepare_model(with_lora(tiny_hybrid()))
    engine, plain = engine_of(model, merge_adapters=merge), small_engine(model)
    replays = with_replays(engine)
    for version in (1, 2, 3):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(-1.5)
        for each in (engine, plain):
            each.set_policy_version(version)
        for seed in range(2):
            ours, theirs = (each.logits(each.open(tokens(20 + seed, seed))) for each in
                            (engine, plain))  # fmt: skip
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert replays.replayed > 0


def test_captured_passes_go_when_pools_or_tables_move_or_the_engine_sleeps(
    hybrid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octopus_trl.models.fused.POSITIONS", 64)
    engine = engine_of(hybrid)
    replays, passes = with_replays(engine), prefill_of(engine)
    cursor = engine.open(tokens(20))
    engine.extend(cursor, tokens(20, 1))
    assert len(passes._graphs) == 1
    engine.extend(cursor, tokens(40, 2))  # past the tables: they are made anew
    assert not passes._graphs
    engine.extend(cursor, tokens(5, 2))
    assert len(passes._graphs) == 1
    released = replays.released
    engine.sleep()
    assert (len(passes._graphs), len(passes._ran)) == (0, 0)
    assert replays.released > released
    engine.wake()
    plain = small_engine(hybrid)
    for each in (engine, plain):
        each.set_policy_version(7)
    for seed in range(3):
        ours, theirs = (each.logits(each.open(tokens(30, seed))) for each in (engine, plain))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name", ["norm.weight", "input_layernorm.weight", "A_log", "dt_bias", "conv1d.weight", "q_norm"]
)
def test_captured_passes_go_when_a_weight_beside_the_products_moves(name: str) -> None:
    """Full fine-tuning trains them too, and an optimizer may put them into a buffer of its own."""
    model = prepare_model(tiny_hybrid())
    engine = engine_of(model)
    passes = prefill_of(engine)
    with_replays(engine)
    for seed in range(2):
        engine.open(tokens(20, seed))
    assert len(passes._graphs) == 1
    engine.open(tokens(20, 2))
    assert len(passes._graphs) == 1
    moved = next(p for full, p in model.named_parameters() if name in full)
    moved.data = 2 * moved.data
    engine.set_policy_version(1)
    found = engine.logits(engine.open(tokens(20, 3)))
    assert not passes._graphs
    plain = small_engine(model)
    want = plain.logits(plain.open(tokens(20, 3)))
    torch.testing.assert_close(found, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("max_rows", [1, 5, 64, 100, 512, 3000])
def test_padding_is_at_most_twice_the_rows_and_room_for_all_chunks(
    hybrid: Any, max_rows: int
) -> None:
    passes = prefill_of(engine_of(hybrid, prefill_chunk=max_rows))
    draws = random.Random(max_rows)
    for num in {1, max_rows, *(draws.randint(1, max_rows) for _ in range(50))}:
        runs = draws.randint(1, min(num, 80))
        size = passes._padded(num, runs)
        if size is None:
            assert runs > 64 or num > prefill.MOST_CAPTURED
            continue
        assert num <= size.rows <= max(64, 2 * num - 1, max_rows if num > max_rows // 2 else 0)
        assert runs <= size.runs <= max(1, 4 * runs)
        assert size.chunks <= size.rows


def test_more_runs_than_the_largest_size_run_unpadded(hybrid: Any) -> None:
    found: list[list[list[float]]] = []
    for fused in (True, False):
        engine = small_engine(hybrid, fused=fused, num_pages=6000, num_states=160)
        root = engine.open(tokens(9))
        before = engine.stats()["prefill_passes"]
        tickets = [
            engine.submit(
                engine.fork(root),
                tokens(1 + index % 3, index),
                SamplingParams(max_tokens=1, seed=1),
                until=(),
            )
            for index in range(70)
        ]
        ended = {one.ticket: one for one in engine.step()}
        if fused:
            assert engine.stats()["prefill_passes"] == before + 1
            assert {(size.rows, size.runs) for size in prefill_of(engine)._ran} == {(64, 1)}
        while engine.has_work:
            ended.update({one.ticket: one for one in engine.step()})
        found.append([ended[ticket].logps for ticket in tickets])
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), atol=LOGP, rtol=0)


def test_nothing_is_padded_where_kernels_cannot_be_captured(
    hybrid: Any, dense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "can_capture", lambda: False)
    for model, padded in ((hybrid, False), (dense, True)):
        engine = engine_of(model)
        passes = engine._paths.passes
        assert passes is not None
        shape = WorkShape.of(engine.spec, torch.device("cpu"), alone=False)
        made = PrefillPass(
            passes.model,
            passes.device,
            shape,
            engine.counters,
            max_rows=64,
            num_slots=64,
            both=False,
            capture=True,
        )
        assert made.capture == padded
        assert (made._padded(3, 1) is not None) == padded
