"""FlexAttention block masks, made from the segment matrix of a plan without looking at row pairs.

Axes: T rows, N segments, B blocks of 128 rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

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
    some, every = _block_cover(plan, sees, padded, segments)
    np.fill_diagonal(sees[:num, :num], True)  # its own segment, up to the row itself

    def lists(blocks: npt.NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
        order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
        counts = blocks.sum(1).astype(np.int32)
        return to_device(counts)[None, None], to_device(order)[None, None]

    def to_device(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    of_query = to_device(segment)
    of_key = to_device(np.concatenate([segment, segment + segments]) if apart else segment)
    table = to_device(sees)

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        reader, read = of_query[row], of_key[key]
        return table[reader, read] & ((reader != read) | (key <= row))

    partial, full = lists(some & ~every), lists(every)
    return BlockMask.from_kv_blocks(
        *partial,
        *full,
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(padded, (1 + apart) * padded),
    )


def _block_cover(
    plan: AttentionPlan, sees: npt.NDArray[np.bool_], padded: int, segments: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Mark the pairs of blocks [B, B] (or [B, 2B]) with some visible pair, and with every pair.

    Counts visible pairs of rows a block pair from the segment matrix: blocks are runs of few
    segments, so this takes O((B + N) (B + N)), not rows squared.
    """
    rows = plan.num_rows
    segment = plan.segment_of_row
    # Pieces: maximal stretches of one segment within one block.
    starts = np.flatnonzero(
        np.r_[True, (segment[1:] != segment[:-1]) | (np.arange(1, rows) % BLOCK == 0)]
    )
    lengths = np.diff(np.r_[starts, rows])
    piece_segment, piece_block = segment[starts].astype(np.int32), starts // BLOCK
    first_piece = np.flatnonzero(np.r_[True, piece_block[1:] != piece_block[:-1]])

    def pairs(matrix: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
        """Count pairs of rows of two blocks whose segments the matrix [N, N] joins."""
        by_query = np.add.reduceat(
            matrix[piece_segment].astype(np.int32) * lengths[:, None], first_piece
        )
        return np.add.reduceat(by_query[:, piece_segment] * lengths, first_piece, axis=1)

    used, total = piece_block[-1] + 1, padded // BLOCK
    count = np.zeros((total, sees.shape[1] // segments * total), dtype=np.int32)
    count[:used, :used] = pairs(sees[:, :segments])
    same = pairs(np.eye(segments, dtype=bool))
    count[:used, :used] += np.tril(same, -1)  # a segment's rows in earlier blocks: all seen
    if count.shape[1] > total:
        count[:used, total : total + used] = pairs(sees[:, segments:])
    some, every = count > 0, count == BLOCK * BLOCK
    diagonal = np.arange(used)
    some[diagonal, diagonal] = True  # every row sees itself
    return some, every
