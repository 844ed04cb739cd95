"""Copies beside running passes, and many live threads at the sizes of Qwen3.5-4B's layers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from octopus_trl.engine import Engine
from octopus_trl.engine.host_states import HostStates
from octopus_trl.models import prepare_model
from octopus_trl.models.paged import PagedMemory, bytes_per_state
from octopus_trl.models.spec import ModelSpec
from octopus_trl.protocols import SamplingParams
from tests.engine.conftest import tokens

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_slots_and_places_that_are_used_again_at_once_keep_their_states(device: str) -> None:
    """Slots are overwritten right after they were parked, places right after they were read."""
    big = device == "cuda"
    spec = ModelSpec(
        layer_kinds=("recurrent", "attention", "recurrent"),
        mount_layers=(1,),
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        state_shape=(32, 128, 128) if big else (2, 3, 5),
        tail_shape=(8192, 3) if big else (7, 3),
        hidden_size=8,
        vocab_size=8,
    )
    memory = PagedMemory(
        spec,
        page_size=4,
        num_pages=1,
        num_states=6,
        dtype=torch.bfloat16,
        device=torch.device(device),
    )
    memory.allocate()
    host = HostStates(memory, 5)
    draws = random.Random(0)
    slots: dict[int, float] = {}
    places: dict[int, float] = {}

    def write(slot: int, value: float) -> None:
        host.claim(slot)
        for layer in spec.recurrent_layers:
            memory.states[layer][slot].fill_(value + layer)
            memory.tails[layer][slot].fill_(value - layer)
        slots[slot] = value

    for step in range(300):
        slot, place = draws.randint(1, 6), draws.randrange(5)
        if slot not in slots or draws.random() < 0.3:
            write(slot, float(step % 100))
        elif places and draws.random() < 0.5:
            place = draws.choice(list(places))
            host.claim(slot)
            host.load(place, slot)
            slots[slot] = places[place]
        else:
            host.store(slot, place)
            places[place] = slots[slot]
            write(slot, float(100 + step % 100))
        check = draws.choice(list(slots))
        if step % 7 == 0:
            for layer in spec.recurrent_layers:
                assert (memory.states[layer][check] == slots[check] + layer).all()
                assert (memory.tails[layer][check] == slots[check] - layer).all()
    assert host.parked > 50
    assert host.restored > 50
    host.release()
    assert host.num_bytes == 0


@pytest.fixture(scope="module")
def wide() -> Any:
    """Four layers of Qwen3.5-4B's sizes, random weights, bfloat16."""
    config = Qwen3_5TextConfig(
        vocab_size=4096,
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    return prepare_model(Qwen3_5ForCausalLM(config).to("cuda", torch.bfloat16).eval())


@pytest.mark.gpu
@pytest.mark.parametrize(("threads", "places"), [(256, 0), (1024, 1100)])
def test_live_threads_go_on_without_a_replay(wide: Any, threads: int, places: int) -> None:
    """256 with two slots each; 1,024 over the same slots with their boundaries parked."""
    size = bytes_per_state(wide.octopus_spec, torch.bfloat16)
    engine = Engine(
        wide,
        page_size=64,
        num_pages=6000,
        num_states=2 * 256 + 8,
        park_bytes=places * size,
        max_snapshots=1,
    )
    root = engine.open(tokens(512, vocab=4096))
    cursors = [engine.fork(root) for _ in range(threads)]
    for lap in range(3):
        params = [SamplingParams(seed=threads * lap + i, max_tokens=4) for i in range(threads)]
        engine.generate(cursors, params, until=())
        engine.check_integrity()
    stats = engine.stats()
    assert (stats["replayed"], stats["evicted_states"], stats["preempted"]) == (0, 0, 0)
    assert (stats["parked"] > 0) == (stats["restored"] > 0) == (threads > 512)
    assert {cursor.num_tokens for cursor in cursors} == {512 + 12}
    chain = root.num_tokens
    assert chain == 512
    for cursor in cursors[:: threads // 4]:
        assert torch.isfinite(engine.logits(cursor)).all()
    engine.sleep()
    assert engine.stats()["host_bytes"] == 0
    engine.wake()
    engine.check_integrity()
