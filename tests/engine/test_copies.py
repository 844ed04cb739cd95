"""Fork, mount and going back to a snapshot touch no tensor at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
    assert copied == {"fork": 0, "mount": 0, "rewind": 0}
    engine.check_integrity()


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
