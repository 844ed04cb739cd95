"""Fork, mount and going back to a snapshot touch no tensor at all."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octopus_trl.engine import Cursor, Engine
from octopus_trl.engine.copies import CopyMeter
from octopus_trl.engine.counters import PRIMITIVES
from octopus_trl.engine.cursor import Node
from octopus_trl.engine.host_states import HostStates
from octopus_trl.engine.primitives import Primitives
from octopus_trl.models.paged import bytes_per_page, bytes_per_state
from octopus_trl.protocols import SamplingParams
from tests.engine.conftest import small_engine, tokens


class Recorder(TorchDispatchMode):
    """Notes every operation that reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("context", [5, 300])
def test_fork_mount_rewind_and_close_dispatch_no_operation(model: Any, context: int) -> None:
    engine = small_engine(model)
    root = engine.open(tokens(context))
    child, reader = engine.fork(root), engine.fork(root)
    engine.extend(child, tokens(7, 1))
    boundary = child.num_tokens
    engine.generate([child], SamplingParams(seed=1, max_tokens=5), until=())
    engine.extend(child, tokens(3, 2))
    with Recorder() as recorder:
        other = engine.fork(child)
        engine.mount(reader, child)
        engine.rewind(child, boundary)
        engine.mount(child, reader, since=root)
        engine.close(other)
    assert recorder.operations == []
    with Recorder() as recorder:
        engine.extend(reader, [1])
    assert recorder.operations
    copied = engine.stats()["bytes_copied"]
    assert not any(copied.values())
    engine.check_integrity()


def copy_state(engine: Engine, node: Node) -> None:
    """Give a boundary's state to a slot of its own, as a fork that copies would."""
    memory = engine._memory
    for layer in engine.spec.recurrent_layers:
        for tensors in (memory.states, memory.tails):
            tensors[layer][40].copy_(tensors[layer][node.slot])


def copy_pages(engine: Engine, count: int) -> None:
    """Copy keys and values of the first slots elsewhere, as a mount that copies would."""
    memory, to = engine._memory, torch.arange(200, 200 + count)
    for layer in engine.spec.attention_layers:
        for pool in (memory.keys[layer], memory.values[layer]):
            rows = pool.flatten(0, 1)
            rows.index_copy_(0, to, rows[:count].clone())


def test_an_engine_that_copied_would_show_it(hybrid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Audited counters are measured: the same calls with a copy inside count its bytes."""
    engine = small_engine(hybrid)
    engine.counters.audited = True
    root = engine.open(tokens(9))
    child = engine.extend(engine.fork(root), tokens(5, 1))
    inner = engine._primitives
    fork, mount, rewind = inner.fork, inner.mount, inner.rewind

    def forks(cursor: Cursor) -> Cursor:
        copy_state(engine, cursor._tail)
        return fork(cursor)

    def mounts(*span: Any, **rule: Any) -> int:
        copy_pages(engine, 5)
        return mount(*span, **rule)

    def rewinds(*place: Any) -> None:
        copy_state(engine, place[1])
        rewind(*place)

    for name, call in (("fork", forks), ("mount", mounts), ("rewind", rewinds)):
        monkeypatch.setattr(inner, name, call)
    engine.fork(root)
    engine.mount(root, child)
    engine.rewind(child, 9)
    state = bytes_per_state(hybrid.octopus_spec, torch.float32)
    span = 5 * bytes_per_page(hybrid.octopus_spec, 1, torch.float32)
    copied = engine.stats()["bytes_copied"]
    assert (copied["fork"], copied["rewind"]) == (state, state)
    assert copied["mount"] == 2 * span  # gathered, then written
    monkeypatch.undo()
    engine.fork(root)
    assert engine.stats()["bytes_copied"] == copied


@pytest.mark.parametrize("seed", range(4))
def test_in_random_games_the_counted_bytes_are_those_that_the_dispatcher_saw(
    hybrid: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fork, mount and rewind, and every parking: with few slots, so that states move."""
    seen = {"moved": 0, "fork": 0, "mount": 0, "rewind": 0}

    def metered(what: str, call: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            with CopyMeter() as meter:
                result = call(*args, **options)
            seen[what] += meter.num_bytes
            return result

        return run

    for name in ("store", "load"):
        monkeypatch.setattr(HostStates, name, metered("moved", getattr(HostStates, name)))
    for name in ("fork", "mount", "rewind"):
        monkeypatch.setattr(Primitives, name, metered(name, getattr(Primitives, name)))
    state = bytes_per_state(hybrid.octopus_spec, torch.float32)
    engine = small_engine(hybrid, num_states=3, max_snapshots=3, park_bytes=40 * state)
    draws = random.Random(seed)
    cursors = [engine.open(tokens(9, seed))]
    for turn in range(60):
        cursor = draws.choice(cursors)
        move = draws.choice(["fork", "mount", "rewind", "extend", "extend", "close"])
        if move == "fork" and len(cursors) < 9:
            cursors.append(engine.fork(cursor))
        elif move == "mount":
            engine.mount(cursor, draws.choice(cursors))
        elif move == "rewind":
            engine.rewind(cursor, draws.randint(1, cursor.num_tokens))
        elif move == "extend":
            engine.extend(cursor, tokens(draws.randint(1, 6), turn))
        elif move == "close" and len(cursors) > 1:
            cursors.remove(cursor)
            engine.close(cursor)
    counters = engine.counters
    assert seen["moved"] == counters.bytes_moved > 0, "states moved, or the game has no point"
    assert counters.bytes_moved == sum(
        engine.stats()[f"{way}_bytes"] for way in ("parked", "restored")
    )
    assert {name: counters.bytes_copied[name] for name in PRIMITIVES} == {
        name: seen[name] for name in PRIMITIVES
    }
    engine.check_integrity()


def test_the_meter_counts_what_is_written_and_no_view() -> None:
    x, pool = torch.ones(4, 8), torch.zeros(100, 8)
    with CopyMeter() as meter:
        x.view(8, 4)[2:].transpose(0, 1)
        torch.empty(1000)
        assert meter.num_bytes == 0
        x.clone()
        assert meter.num_bytes == 128
        pool.index_copy_(0, torch.arange(4), x)
        assert meter.num_bytes == 128 + 128
        torch.cat([x, x])
        assert meter.num_bytes == 128 + 128 + 256


def test_a_fork_takes_no_page_and_no_state(model: Any) -> None:
    engine = small_engine(model)
    root = engine.open(tokens(9))
    before = (engine.num_free_pages, engine.stats()["slots"])
    forks = [engine.fork(root) for _ in range(50)]
    assert (engine.num_free_pages, engine.stats()["slots"]) == before
    engine.extend(forks[0], [1])
    engine.extend(forks[1], [1])
    # The first goes on in the partial page, the second takes one of its own.
    assert before[0] - engine.num_free_pages == 1


def test_unwritten_memory_is_never_read(model: Any) -> None:
    engine = small_engine(model, page_size=3)
    root = engine.open(tokens(10))
    cursors = [engine.fork(root) for _ in range(5)]
    engine.generate(cursors, SamplingParams(seed=2, max_tokens=5), until=())
    for cursor in cursors:
        engine.mount(root, cursor)
    engine.extend(root, tokens(3))
    assert torch.isfinite(engine.logits(root)).all()
    engine.rewind(root, 4)
    assert torch.isfinite(engine.logits(root)).all()
