"""The table of chunks that fla's kernels index by."""

from __future__ import annotations

import pytest
import torch

from octopus_trl.kernels._chunks import _KEPT, CHUNK, _tables, chunk_indices


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
