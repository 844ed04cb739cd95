"""Backbones of the parity tests: each as a stock model and as a prepared copy of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from octopus_trl import prepare_model
from tests.tiny import (
    tiny_bamba,
    tiny_dense,
    tiny_dense_moe,
    tiny_granite,
    tiny_hybrid,
    tiny_hybrid_moe,
    tiny_llama,
    tiny_qwen2,
)


@dataclass(frozen=True)
class Pair:
    """A stock model, its prepared copy, and the layers that mounts reach (None: all attention)."""

    stock: Any
    ours: Any
    mount_layers: tuple[int, ...] | None


Built = tuple[Callable[[], Any], tuple[int, ...] | None]

# One of each supported class; every parity, gradient and plain-forward test runs over them.
FAMILIES: dict[str, Built] = {
    "hybrid": (lambda: tiny_hybrid(0), None),
    "hybrid-moe": (lambda: tiny_hybrid_moe(0), None),
    "dense": (lambda: tiny_dense(0), (1, 2)),
    "dense-moe": (lambda: tiny_dense_moe(0), (1, 2)),
    "qwen2": (lambda: tiny_qwen2(0), (1, 2)),
    "llama": (lambda: tiny_llama(0), (1, 2)),
    "bamba": (lambda: tiny_bamba(0), None),
    "granite": (lambda: tiny_granite(0), None),
}
BACKBONES: dict[str, Built] = {
    **FAMILIES,
    "hybrid8": (lambda: tiny_hybrid(1, layers=8, tie=True), None),
    "hybrid8-one-layer": (lambda: tiny_hybrid(2, layers=8), (7,)),
    "dense-tied": (lambda: tiny_dense(1, tie=True), (3,)),
    "bamba-one-layer": (lambda: tiny_bamba(1, tie=True), (3,)),
}


def prepared(model: Any, layers: tuple[int, ...] | None) -> Any:
    """Prepare a model in place; None mounts on every attention layer of a hybrid."""
    return prepare_model(model) if layers is None else prepare_model(model, mount_layers=layers)


@cache
def pair(name: str) -> Pair:
    """Build a backbone once a process; its weights are not to be changed."""
    build, layers = BACKBONES[name]
    stock = build()
    ours = prepared(copy.deepcopy(stock), layers)
    for model in (stock, ours):
        model.requires_grad_(False)
    return Pair(stock, ours, layers)


@pytest.fixture(params=list(BACKBONES))
def backbone(request: pytest.FixtureRequest) -> Pair:
    return pair(request.param)


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `float32` mean float64 for one test, in the stock modules too.

    The stock mixers cast to float32 by name; where they do not, rounding no longer hides a wrong
    term: two right implementations then agree to 1e-10.
    """
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch, "float32", torch.float64)


@pytest.fixture
def hybrid() -> Pair:
    return pair("hybrid")


@pytest.fixture
def dense() -> Pair:
    return pair("dense")
