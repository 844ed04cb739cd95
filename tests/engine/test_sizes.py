"""How many pages and states a memory holds, by arithmetic; no tensor, no device."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from octopus_trl.engine import Engine
from octopus_trl.engine.sizes import (
    GPU_SHARE,
    OWN_STATES,
    OWN_TOKENS,
    Budget,
    bytes_of,
    settle,
    step_bytes,
)
from octopus_trl.errors import ConfigError
from octopus_trl.models.paged import bytes_per_page, bytes_per_state
from octopus_trl.models.spec import ModelSpec
from tests.engine.conftest import small_engine, tokens

BF16 = torch.bfloat16
GIB = 1 << 30
QWEN_4B = ModelSpec(
    layer_kinds=("recurrent", "recurrent", "recurrent", "attention") * 8,
    mount_layers=tuple(range(3, 32, 4)),
    num_heads=16,
    num_kv_heads=4,
    head_dim=256,
    state_shape=(32, 128, 128),
    tail_shape=(8192, 3),
    hidden_size=2560,
    vocab_size=248_320,
)
H200_FREE = int(139 * GIB - 8.41e9)  # device memory less the weights


def h200(host_bytes: int = 64 * GIB) -> Budget:
    step = step_bytes(QWEN_4B, BF16, prefill_chunk=512, rows=128)
    return Budget(int((H200_FREE - step) * GPU_SHARE), H200_FREE, host_bytes)


def test_bytes_of_a_token_and_a_state_are_those_of_the_design() -> None:
    assert bytes_per_page(QWEN_4B, 1, BF16) == 32 << 10
    assert bytes_per_state(QWEN_4B, BF16) == 24 * ((2 << 20) + (48 << 10))


def test_256_threads_of_qwen_4b_are_resident() -> None:
    """Each with two slots and 8,192 tokens of its own, beside 32K tokens that all share."""
    sizes = settle(QWEN_4B, h200(), page_size=64, dtype=BF16)
    assert sizes.states >= OWN_STATES * 256
    assert sizes.pages * 64 >= 32_768 + 256 * OWN_TOKENS
    assert bytes_of(QWEN_4B, sizes, 64, BF16) <= h200().pools


def test_1024_threads_of_qwen_4b_live_with_parked_states() -> None:
    """256 of them run with two slots each, 768 boundaries are parked; 2,048 own tokens a thread."""
    sizes = settle(QWEN_4B, h200(), page_size=64, dtype=BF16)
    assert sizes.states >= OWN_STATES * 256
    assert sizes.places >= 1024 - 256
    assert 768 * bytes_per_state(QWEN_4B, BF16) < 37 * GIB
    assert sizes.pages * 64 >= 32_768 + 1024 * 2048


@pytest.mark.parametrize("budget", [1 << 30, 20 << 30, 100 << 30])
def test_pages_and_states_run_out_together(budget: int) -> None:
    sizes = settle(QWEN_4B, Budget(budget, budget, 0), page_size=16, dtype=BF16)
    threads_by_states = sizes.states / OWN_STATES
    threads_by_pages = sizes.pages * 16 / OWN_TOKENS
    assert threads_by_states == pytest.approx(threads_by_pages, rel=0.2)
    assert sizes.places == 0


def test_given_numbers_are_kept_and_the_rest_goes_to_the_others() -> None:
    budget = Budget(10 * GIB, 20 * GIB, 0)
    state, page = bytes_per_state(QWEN_4B, BF16), bytes_per_page(QWEN_4B, 16, BF16)
    few = settle(QWEN_4B, budget, page_size=16, dtype=BF16, num_states=8)
    assert few == (int((10 * GIB - 9 * state) // page), 8, 0)
    many = settle(QWEN_4B, budget, page_size=16, dtype=BF16, num_pages=4000)
    assert many.pages == 4000
    assert bytes_of(QWEN_4B, many, 16, BF16) <= 10 * GIB
    both = settle(
        QWEN_4B, budget, page_size=16, dtype=BF16, num_pages=100, num_states=9, park_bytes=3 * state
    )
    assert both == (100, 9, 3)


@pytest.mark.parametrize(
    ("given", "budget", "words"),
    [
        ({}, Budget(0, 0, 0), "a step needs one of each"),
        ({"num_states": 4}, Budget(100 << 20, GIB, 0), "a step needs one of each"),
        ({"num_pages": 10**12}, Budget(GIB, 2 * GIB, 0), f"num_pages={10**12}"),
        ({"num_states": 10**9}, Budget(GIB, 2 * GIB, 0), f"num_states={10**9}: the pools would"),
        ({"park_bytes": 1000}, Budget(GIB, 2 * GIB, 0), "park_bytes=1000: a state takes"),
    ],
)
def test_what_the_memory_does_not_hold_is_refused_with_the_numbers(
    given: dict[str, int], budget: Budget, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        settle(QWEN_4B, budget, page_size=64, dtype=BF16, **given)


def test_more_states_than_the_device_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match="would take"):
        settle(
            QWEN_4B, Budget(GIB, 2 * GIB, 0), page_size=64, dtype=BF16, num_pages=1, num_states=99
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_pages": 10**12}, f"num_pages={10**12}"),
        ({"num_states": 10**12}, f"{10**12}"),
        ({"device": "nope"}, "device='nope': must be a torch device"),
        ({"device": 3.5}, r"device=3\.5"),
        ({"device": "cuda"}, "device='cuda': the model is on cpu"),
        ({"device": "cpu:1"}, "device='cpu:1'"),
        ({"park_bytes": 1.5}, "park_bytes"),
        ({"park_bytes": True}, "park_bytes"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_by_name(
    hybrid: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine(hybrid, **{"page_size": 4, "num_pages": 4, "num_states": 4, **options})


def test_states_so_few_that_one_thread_thrashes_are_said(
    hybrid: Any, dense: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    small_engine(hybrid, num_states=5)
    small_engine(hybrid, num_states=2, max_snapshots=1)
    small_engine(hybrid, num_states=2, park_bytes=1 << 20)
    small_engine(dense, num_states=1)
    assert not caplog.records
    small_engine(hybrid, num_states=4)
    assert "num_states=4: a thread keeps 4 snapshots" in caplog.text


def test_a_device_that_does_not_give_the_memory_leaves_the_engine_asleep(
    hybrid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(hybrid)
    want = engine.logits(engine.open(tokens(5)))
    engine.sleep()
    empty = torch.empty
    calls = 0

    def refuse(*shape: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ConfigError, match="does not give"):
        engine.wake()
    assert not engine._memory.allocated
    with pytest.raises(ConfigError, match="sleeps"):
        engine.open(tokens(5))
    engine.check_integrity()
    monkeypatch.undo()
    engine.wake()
    assert torch.equal(engine.logits(engine.open(tokens(5))), want)


def test_whoever_captured_graphs_hears_when_pools_go_and_come(hybrid: Any) -> None:
    engine = small_engine(hybrid)
    heard: list[tuple[str, bool]] = []
    engine._pools.on_taken.append(lambda: heard.append(("taken", engine._memory.allocated)))
    engine._pools.on_given_back.append(lambda: heard.append(("back", engine._memory.allocated)))
    engine.wake()
    assert heard == []
    engine.sleep()
    engine.wake()
    assert heard == [("back", True), ("taken", True)]
    assert engine.stats()["seconds"]["capture"] >= 0
