"""Prepared tiny models, and engines whose unwritten memory is NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from octopus_trl.engine import Engine
from octopus_trl.models import prepare_model
from tests.tiny import tiny_dense, tiny_hybrid

DENSE_MOUNTS = [1, 3]
Make = Callable[..., Engine]


@pytest.fixture(scope="package")
def hybrid() -> Any:
    return prepare_model(tiny_hybrid())


@pytest.fixture(scope="package")
def dense() -> Any:
    return prepare_model(tiny_dense(), mount_layers=DENSE_MOUNTS)


@pytest.fixture(params=["hybrid", "dense"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def poison(engine: Engine) -> Engine:
    """Fill all memory that nobody may read before writing it with NaN."""
    memory = engine._memory
    for tensor in [*memory.keys.values(), *memory.values.values()]:
        tensor.fill_(float("nan"))
    for tensor in [*memory.tails.values(), *memory.states.values()]:
        tensor[1:].fill_(float("nan"))
    return engine


def small_engine(model: Any, **options: Any) -> Engine:
    """Make a poisoned engine with small pools."""
    settings: dict[str, Any] = {"page_size": 4, "num_pages": 400, "num_states": 64, **options}
    return poison(Engine(model, **settings))


def tokens(length: int, seed: int = 0, vocab: int = 97) -> list[int]:
    """Draw token ids."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (length,), generator=draws).tolist()
