"""FlexAttention block masks, made from the spans of a plan without looking at row pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from octopus_trl.kernels._block_lists import block_pairs
from octopus_trl.maths.dag import AttentionPlan

BLOCK = 128
_MIN_SEGMENTS = 64  # fewer share a kernel with 64


def padded_rows(rows: int) -> int:
    """Round up to 1 or 1.5 times a power of two blocks, so that few sizes are compiled."""
    blocks = max(1, -(-rows // BLOCK))
    power = 1 << (blocks - 1).bit_length()
    return BLOCK * (power * 3 // 4 if power >= 4 and blocks <= power * 3 // 4 else power)


def padded_segments(segments: int) -> int:
    """Round up to a power of two, with one left over that stands for padding rows."""
    return max(_MIN_SEGMENTS, 1 << segments.bit_length())


def block_mask(plan: AttentionPlan, *, device: torch.device | str, apart: bool) -> BlockMask:
    """Turn a plan into FlexAttention's block lists and mask.

    Args:
        apart: keys are [rows; the same rows again], and mounts look at the second half.
    """
    padded, segments = padded_rows(plan.num_rows), padded_segments(len(plan.visible))
    segment = np.full(padded, segments - 1, dtype=np.int32)
    segment[: plan.num_rows] = plan.segment_of_row
    sees = np.zeros((segments, (1 + apart) * segments), dtype=bool)
    num = len(plan.visible)
    sees[:num, :num] = plan.visible if apart else plan.visible | plan.mounted
    if apart:
        sees[:num, segments : segments + num] = plan.mounted
    np.fill_diagonal(sees[:num, :num], True)  # its own segment, up to the row itself
    pairs = block_pairs(
        plan,
        query_block=BLOCK,
        key_block=BLOCK,
        rows=padded,
        mounts_at=padded if apart else 0,
    )

    def lists(full: bool) -> tuple[Tensor, Tensor]:
        counts, blocks = pairs.lists(full=full)
        # FlexAttention takes the width of the lists for the number of key blocks.
        lines = np.zeros((pairs.num_query, pairs.num_key), dtype=np.int32)
        width = min(blocks.shape[1], pairs.num_key)
        lines[:, :width] = blocks[:, :width]
        return to_device(counts)[None, None], to_device(lines)[None, None]

    def to_device(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    of_query = to_device(segment)
    of_key = to_device(np.concatenate([segment, segment + segments]) if apart else segment)
    table = to_device(sees)

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        reader, read = of_query[row], of_key[key]
        return table[reader, read] & ((reader != read) | (key <= row))

    return BlockMask.from_kv_blocks(
        *lists(full=False),
        *lists(full=True),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(padded, (1 + apart) * padded),
    )
