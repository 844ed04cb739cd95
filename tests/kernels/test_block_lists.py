"""Lists of blocks against the dense mask, over random DAGs, and what flash-attn 4 reads of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octopus_trl.errors import ConfigError
from octopus_trl.kernels import _flash
from octopus_trl.kernels._attention_choice import choose
from octopus_trl.kernels._block_lists import BlockPairs, block_pairs
from octopus_trl.maths import dag
from tests.kernels.plans import random_plan

BLOCKS = sorted(
    {sizes for arch in _flash._BLOCKS.values() for both in arch.values() for sizes in both}
)


def dense(plan: dag.AttentionPlan, size: int) -> np.ndarray:
    """Spell the plan out, one row a row; padding sees nothing."""
    segment = plan.segment_of_row
    mask = np.zeros((size, size), dtype=bool)
    rows = plan.num_rows
    mask[:rows, :rows] = (plan.visible | plan.mounted)[segment][:, segment]
    mask[:rows, :rows] |= (segment[:, None] == segment) & np.tri(rows, dtype=bool)
    return mask


def listed(pairs: BlockPairs, *, full: bool) -> np.ndarray:
    """Turn padded lines back into a matrix of blocks."""
    counts, lines = pairs.lists(full=full)
    matrix = np.zeros((pairs.num_query, pairs.num_key), dtype=bool)
    for block, count in enumerate(counts):
        line = lines[block, :count]
        assert (np.diff(line) > 0).all(), "ascending: the last block of a row is met first"
        matrix[block, line] = True
    return matrix


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("seed", range(6))
def test_listed_blocks_are_those_of_the_dense_mask(seed: int, blocks: tuple[int, int]) -> None:
    plan = random_plan(seed, longest=(5, 90, 400)[seed % 3])
    rows = plan.num_rows + 40 * (seed % 2)
    pairs = block_pairs(plan, query_block=blocks[0], key_block=blocks[1], rows=rows)
    size = int(np.lcm(*blocks)) * -(-rows // int(np.lcm(*blocks)))
    expected = dense(plan, size).reshape(size // blocks[0], blocks[0], -1, blocks[1])
    some, every = (np.asarray(of(expected, axis=(1, 3))) for of in (np.any, np.all))
    top, side = pairs.num_query, pairs.num_key
    assert np.array_equal(listed(pairs, full=True), every[:top, :side])
    assert np.array_equal(listed(pairs, full=False), (some & ~every)[:top, :side])
    assert not some[top:].any()
    assert not some[:, side:].any()
    back = pairs.transposed()
    for full in (False, True):
        assert np.array_equal(listed(back, full=full), listed(pairs, full=full).T)


@pytest.mark.parametrize("seed", range(6))
def test_segments_and_bits_spell_the_dense_mask(seed: int) -> None:
    plan = random_plan(seed, longest=20, segments=(3, 31, 32, 33, 64, 65)[seed])
    segment, bits = _flash.mask_tensors(plan, plan.num_rows)
    reader, read = segment[:, None], segment[None, :]
    places = np.arange(len(segment))
    seen = (bits[reader, read >> 5] >> (read & 31)) & 1 == 1
    seen &= (reader != read) | (places[None, :] <= places[:, None])
    assert len(segment) % _flash._ROW_MULTIPLE == 0
    assert np.array_equal(seen, dense(plan, len(segment)))


def test_lists_grow_with_the_blocks_that_are_seen() -> None:
    """64 leaves on a short trunk: each sees the trunk and itself, whatever the number of rows."""
    num = 64
    parents: list[int | None] = [None, *[0] * num]
    plan = dag.layout(parents, [[] for _ in parents], [128, *[1024] * num]).plan
    pairs = block_pairs(plan, query_block=64, key_block=64, rows=plan.num_rows)
    own = 16 * 17 // 2
    assert len(pairs.query) == 3 + num * (own + 16 * 2)
    assert pairs.lists(full=True)[1].shape == (pairs.num_query, 17)


def test_many_strips_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = random_plan(1, longest=400)
    whole = block_pairs(plan, query_block=64, key_block=64, rows=plan.num_rows)
    monkeypatch.setattr("octopus_trl.kernels._block_lists._AT_ONCE", 7)
    parts = block_pairs(plan, query_block=64, key_block=64, rows=plan.num_rows)
    for name in ("query", "key", "full"):
        assert np.array_equal(getattr(parts, name), getattr(whole, name))


def test_an_empty_plan_lists_nothing() -> None:
    pairs = block_pairs(dag.layout([], [], []).plan, query_block=64, key_block=64, rows=128)
    assert (len(pairs.query), pairs.lists(full=True)[0].tolist()) == (0, [0, 0])


def test_attention_kernels_can_be_forced_and_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = (torch.device("cpu"), torch.bfloat16, 256)
    monkeypatch.delenv("OCTOPUS_ATTENTION", raising=False)
    assert choose(*cpu).name == "flex"
    assert "runs on CUDA, not on cpu" in choose(*cpu).text
    monkeypatch.setenv("OCTOPUS_ATTENTION", "flash")
    with pytest.raises(ConfigError, match="OCTOPUS_ATTENTION=flash cannot be had: flash-attn 4"):
        choose(*cpu)
    monkeypatch.setenv("OCTOPUS_ATTENTION", "fa3")
    with pytest.raises(ConfigError, match="'fa3', must be one of auto, flash, flex"):
        choose(*cpu)


@pytest.mark.parametrize(
    ("major", "dtype", "head_dim", "found", "reason"),
    [
        (9, torch.bfloat16, 256, False, "pip install flash-attn-4"),
        (9, torch.float32, 256, True, "16-bit tensors, not torch.float32"),
        (9, torch.bfloat16, 12, True, "head_dim 12"),
        (10, torch.bfloat16, 256, True, "head_dim 256"),
        (8, torch.bfloat16, 128, True, "Hopper and Blackwell, this is A100"),
    ],
)
def test_what_flash_attn_cannot_serve_is_named(
    monkeypatch: pytest.MonkeyPatch,
    major: int,
    dtype: torch.dtype,
    head_dim: int,
    found: bool,
    reason: str,
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "A100")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if found else None)
    _flash.unavailable.cache_clear()
    said = _flash.unavailable(torch.device("cuda", 0), dtype, head_dim)
    _flash.unavailable.cache_clear()
    assert said is not None
    assert reason in said
