"""Captured prefill on a GPU: the bits of its operations one by one, whatever padding holds."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from octopus_trl.engine import Engine, prefill
from octopus_trl.models import prepare_model
from octopus_trl.protocols import SamplingParams
from tests.engine.conftest import poison, tokens
from tests.engine.padding import play_game, poison_padding, pools_of, prefill_of
from tests.engine.test_cuda import VOCAB, dense_model, exact, hybrid_model
from tests.tiny import tiny_dense

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LENGTHS = (1, 2, 17, 63, 64, 65, 128, 200, 300)
STEPS = 60


@pytest.fixture(scope="module")
def hybrid() -> Any:
    return hybrid_model()


@pytest.fixture(params=["hybrid", "dense", "adapted"], scope="module")
def model(request: pytest.FixtureRequest, hybrid: Any) -> Any:
    if request.param == "hybrid":
        return hybrid
    return dense_model() if request.param == "dense" else hybrid_model(lora=True)


def engine_of(model: Any, **options: Any) -> Engine:
    settings: dict[str, Any] = {"page_size": 16, "num_pages": 3000, "num_states": 64, **options}
    return poison(Engine(model, **settings))


def game(engine: Engine, seed: int, steps: int = STEPS) -> list[torch.Tensor]:
    return play_game(engine, seed, vocab=VOCAB, lengths=LENGTHS, steps=steps)


def bytes_held() -> int:
    """Bytes of the device in use; beside other workers those that torch took for this one."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    return total - free


def same_bits(one: list[torch.Tensor], two: list[torch.Tensor]) -> None:
    assert len(one) == len(two)
    for number, (ours, theirs) in enumerate(zip(one, two, strict=True)):
        ours, theirs = ours.nan_to_num(123.0), theirs.nan_to_num(123.0)
        far = (ours.float() - theirs.float()).abs().max().item()
        assert torch.equal(ours, theirs), f"tensor {number} differs by {far:.3e}"


@pytest.mark.parametrize("options", [{}, {"decode_width": 8}], ids=str)
def test_replayed_passes_give_the_bits_of_their_operations(
    model: Any, options: dict[str, Any]
) -> None:
    captured, launched = engine_of(model, **options), engine_of(model, **options)
    prefill_of(launched).capture = False
    want, found = game(launched, 5), game(captured, 5)
    passes = prefill_of(captured)
    sizes = sorted((size.rows, size.runs) for size in passes._graphs)
    sys.stdout.write(f"captured {sizes} in {captured.stats()['seconds']['capture']:.2f} s\n")
    assert len(sizes) >= 3
    assert not prefill_of(launched)._graphs
    same_bits(found, want)
    same_bits(pools_of(captured), pools_of(launched))
    for tensor in [*captured._memory.tails.values(), *captured._memory.states.values()]:
        assert not tensor[0].any(), "the zero state was written"


def test_what_padding_holds_reaches_no_row_page_or_state(model: Any) -> None:
    poisoned, plain = poison_padding(engine_of(model)), engine_of(model)
    same_bits(game(poisoned, 6), game(plain, 6))
    same_bits(pools_of(poisoned), pools_of(plain))
    assert prefill_of(poisoned)._graphs


def test_replayed_passes_are_as_near_to_float32_as_those_without_padding(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded products are summed by other kernels: two roundings may lie further apart than each
    from what is exact.
    """
    found = game(engine_of(model), 7)
    monkeypatch.setattr(prefill, "MOST_CAPTURED", 0)
    plain = engine_of(model)
    want = game(plain, 7)
    assert not prefill_of(plain)._ran
    true = [logits.double().log_softmax(-1) for logits in game(engine_of(exact(model)), 7)]
    padded, unpadded = (
        torch.stack([
            (one.exp() * (one - ours.cpu().double().log_softmax(-1))).sum()
            for one, ours in zip(true, logits, strict=True)
        ])
        for logits in (found, want)
    )  # fmt: skip
    sys.stdout.write(
        f"KL to float32, padded and unpadded: mean {padded.mean():.2e} and {unpadded.mean():.2e}, "
        f"largest {padded.max():.2e} and {unpadded.max():.2e}\n"
    )
    assert padded.mean() <= 1.5 * unpadded.mean()
    assert padded.max() <= 3 * unpadded.max()


def test_every_length_of_a_size_is_replayed_right(hybrid: Any) -> None:
    """What a replay reads is of its own pass: lengths and runs change, states are carried."""
    captured, launched = engine_of(hybrid), engine_of(hybrid)
    prefill_of(launched).capture = False
    found: list[list[torch.Tensor]] = [[], []]
    for logits, engine in zip(found, (captured, launched), strict=True):
        root = engine.open(tokens(200, vocab=VOCAB))
        cursor = engine.fork(root)
        for index, length in enumerate((1, 63, 64, 2, 33, 1, 64, 65, 127, 128, 100, 200, 129, 256)):
            engine.extend(cursor, tokens(length, index, VOCAB))
            logits.append(engine.logits(cursor))
        for turns in ((20, 30), (1, 40, 3), (64, 1, 64, 1), (7,) * 7, (3, 70, 60), (5,) * 12):
            forks = [engine.fork(cursor) for _ in turns]
            params = SamplingParams(max_tokens=1, seed=1)
            for index, (fork, length) in enumerate(zip(forks, turns, strict=True)):
                engine.submit(fork, tokens(length, 50 + index, VOCAB), params, until=())
            while engine.has_work:
                engine.step()
            for fork in forks:
                engine.rewind(fork, fork.num_tokens - 1)
                logits.append(engine.logits(fork))
                engine.close(fork)
    same_bits(*found)
    assert {(64, 1), (128, 1), (256, 1)} <= {(s.rows, s.runs) for s in prefill_of(captured)._graphs}
    assert any(size.runs > 1 for size in prefill_of(captured)._graphs)


def test_layers_in_and_out_of_the_mount_set_are_captured_alike() -> None:
    model = prepare_model(
        tiny_dense(
            vocab_size=VOCAB, hidden_size=256, intermediate_size=512, head_dim=64
        ).to("cuda", torch.bfloat16),
        mount_layers=[2],
    )  # fmt: skip
    captured, launched = engine_of(model), engine_of(model)
    prefill_of(launched).capture = False
    same_bits(game(captured, 8), game(launched, 8))


@pytest.mark.parametrize("merge", [False, True])
def test_trained_adapters_count_in_the_next_replay(merge: bool) -> None:
    model = hybrid_model(lora=True)
    captured, launched = (engine_of(model, merge_adapters=merge) for _ in range(2))
    prefill_of(launched).capture = False
    for version in (1, 2, 3):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(-1.5)
        found: list[list[torch.Tensor]] = [[], []]
        for logits, engine in zip(found, (captured, launched), strict=True):
            engine.set_policy_version(version)
            logits += [engine.logits(engine.open(tokens(30 + s, s, VOCAB))) for s in range(3)]
        same_bits(*found)
    assert prefill_of(captured)._graphs


def test_graphs_go_with_sleep_and_come_again(hybrid: Any) -> None:
    engine = engine_of(hybrid)
    want = game(engine, 9)
    graphs = len(prefill_of(engine)._graphs)
    assert graphs
    torch.cuda.synchronize()
    engine.sleep()
    assert not prefill_of(engine)._graphs
    before = bytes_held()
    for _ in range(2):
        engine.wake()
        poison(engine)
        same_bits(game(engine, 9), want)
        engine.sleep()
    lost = bytes_held() - before
    sys.stdout.write(f"bytes that two more rounds kept: {lost}\n")
    assert lost < 64 << 20
