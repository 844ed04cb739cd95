"""The chunk tables that fla's kernels index by."""

from __future__ import annotations

import random
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from octopus_trl.kernels import _chunks
from octopus_trl.kernels._chunks import (
    _KEPT,
    CHUNK,
    _tables,
    can_capture,
    chunk_indices,
    chunk_table,
    keep_chunk_indices,
    most_chunks,
)


@pytest.mark.parametrize("lengths", [[1], [63, 64, 65], [0, 1, 0, 200, 128, 0], []], ids=str)
def test_each_run_has_its_chunks_in_order(lengths: list[int]) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    expected = [
        [run, chunk] for run, length in enumerate(lengths) for chunk in range(-(-length // CHUNK))
    ]
    table = chunk_indices(cu_seqlens)
    assert table.dtype == cu_seqlens.dtype
    assert table.tolist() == expected
    assert table.shape == (len(expected), 2)


def test_every_level_of_a_pass_is_made_once_and_old_passes_are_dropped() -> None:
    levels = [torch.tensor([0, length]) for length in range(1, 20)]
    first = [chunk_indices(level) for level in levels]
    assert all(chunk_indices(level) is table for level, table in zip(levels, first, strict=True))
    for length in range(2 * _KEPT):
        chunk_indices(torch.tensor([0, length]))
    assert len(_tables) == _KEPT


@pytest.mark.parametrize("seed", range(20))
def test_a_padded_table_has_room_and_its_padding_lies_past_every_run(seed: int) -> None:
    draws = random.Random(seed)
    lengths = [draws.choice([0, 1, 63, 64, 65, 200]) for _ in range(draws.randint(1, 9))]
    bounds = np.cumsum([0, *lengths])
    rows, runs = int(bounds[-1]) + draws.randint(0, 99), len(lengths) + draws.randint(0, 9)
    table = chunk_table(bounds, most_chunks(rows, runs))
    real = chunk_table(bounds)
    assert np.array_equal(table[: len(real)], real)
    for run, chunk in table[len(real) :].tolist():
        assert chunk * CHUNK >= lengths[run]


def test_a_table_that_is_given_is_the_one_that_kernels_get() -> None:
    cu_seqlens, table = torch.tensor([0, 70]), torch.tensor([[0, 0], [0, 1], [0, 2]])
    keep_chunk_indices(cu_seqlens, table)
    assert chunk_indices(cu_seqlens) is table
    assert chunk_indices(cu_seqlens.clone()).tolist() == [[0, 0], [0, 1]]


@pytest.mark.parametrize(
    ("version", "extra", "switch", "expected"),
    [
        ("0.6.0", None, None, True),
        ("0.6.3", None, "FLA_GLUON=0", True),
        ("0.6.0", None, "FLA_GLUON=1", False),
        ("0.6.0", "flash_qla", None, False),
        ("0.7.0", None, None, False),
        (None, None, None, False),
    ],
)
def test_captures_are_for_the_kernels_that_are_known(
    monkeypatch: pytest.MonkeyPatch,
    version: str | None,
    extra: str | None,
    switch: str | None,
    expected: bool,
) -> None:
    for name in _chunks._SWITCHES:
        monkeypatch.delenv(name, raising=False)
    if switch is not None:
        monkeypatch.setenv(*switch.split("="))
    there = {"fla"} if version is not None else set()
    there |= {extra} if extra is not None else set()
    monkeypatch.setattr(_chunks.util, "find_spec", lambda name: name if name in there else None)
    fla = ModuleType("fla")
    fla.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla", fla)
    assert can_capture() == expected
