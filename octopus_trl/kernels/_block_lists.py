"""Which blocks of an attention plan hold visible pairs, listed without looking at row pairs.

A plan shows each group of rows a few spans of rows and its own rows causally. Each span makes
strips: the rows of one query block that see one stretch of keys. Strips spread over key blocks, and
the visible pairs of a block are counted from lengths alone. Host memory grows with listed blocks.

Axes: B query blocks, L listed blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octopus_trl.maths.dag import AttentionPlan

Index = npt.NDArray[np.int64]

_AT_ONCE = 1 << 18  # entries of strips over key blocks that are summed together


@dataclass(frozen=True, slots=True)
class BlockPairs:
    """Blocks with at least one visible pair, by query block, then key block.

    Attributes:
        query, key: [L] block numbers.
        full: [L] bool, every pair of the block is visible.
        num_query, num_key: blocks of either side.
    """

    query: Index
    key: Index
    full: npt.NDArray[np.bool_]
    num_query: int
    num_key: int

    def transposed(self) -> BlockPairs:
        """List the same blocks by key block, then query block."""
        # Sorted by query block already; a narrow type sorts by radix.
        narrow = self.key.astype(np.min_scalar_type(self.num_key))
        order = np.argsort(narrow, kind="stable")
        return BlockPairs(
            self.key[order], self.query[order], self.full[order], self.num_key, self.num_query
        )

    def lists(self, *, full: bool) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Give the key blocks of each query block as padded lines.

        Args:
            full: those seen wholly, else those seen in part.
        Returns:
            Counts [B] and blocks [B, W], ascending, zeros behind; W is the longest list, at least
            2.
        """
        kept = self.full == full
        query, key = self.query[kept], self.key[kept]
        counts = np.bincount(query, minlength=self.num_query)
        place = np.arange(len(query)) - np.repeat(np.cumsum(counts) - counts, counts)
        lines = np.zeros((self.num_query, max(2, int(counts.max(initial=0)))), dtype=np.int32)
        lines[query, place] = key
        return counts.astype(np.int32), lines


def block_pairs(
    plan: AttentionPlan, *, query_block: int, key_block: int, rows: int, mounts_at: int = 0
) -> BlockPairs:
    """List the blocks of a plan that hold visible pairs.

    Args:
        query_block, key_block: rows of a block, of either side.
        rows: at least those of the plan; the ones behind are padding, seen by nothing and seeing
            nothing.
        mounts_at: how far behind its own row a mounted key lies, in a second copy of the keys; 0
            where there is none.
    """
    num_query, num_key = -(-rows // query_block), -(-(rows + mounts_at) // key_block)
    strips = _strips(plan, query_block, mounts_at)
    first_key, last_key = strips.key_lo // key_block, (strips.key_hi - 1) // key_block
    width = last_key - first_key + 1
    parts: list[tuple[Index, Index, npt.NDArray[np.bool_]]] = []
    at = 0
    while at < len(width):
        # Whole query blocks at a time, so that each block's pairs are summed in one go.
        until = int(np.searchsorted(np.cumsum(width[at:]), _AT_ONCE, side="right")) + at
        until = max(until, at + 1)
        stop = int(np.searchsorted(strips.block, strips.block[until - 1], side="right"))
        base = int(strips.block[at])
        part = slice(at, stop)
        strip = np.repeat(np.arange(at, stop), width[part])
        ends = np.cumsum(width[part])
        key = np.arange(ends[-1]) - np.repeat(ends - width[part], width[part]) + first_key[strip]
        pairs = _visible_pairs(strips, strip, key * key_block, key_block)
        place = (strips.block[strip] - base) * num_key + key
        counts = np.bincount(place, weights=pairs)
        found = np.flatnonzero(counts)
        full = counts[found] == query_block * key_block
        parts.append((found // num_key + base, found % num_key, full))
        at = stop
    if not parts:
        none = np.empty(0, dtype=np.int64)
        return BlockPairs(none, none, none.astype(bool), num_query, num_key)
    query, key, full = (np.concatenate(column) for column in zip(*parts, strict=True))
    return BlockPairs(query, key, full, num_query, num_key)


@dataclass(frozen=True, slots=True)
class _Strips:
    """Rows row_lo:row_hi of one query block see keys key_lo:key_hi, up to themselves if causal."""

    block: Index
    row_lo: Index
    row_hi: Index
    key_lo: Index
    key_hi: Index
    causal: npt.NDArray[np.bool_]


def _strips(plan: AttentionPlan, query_block: int, mounts_at: int) -> _Strips:
    """Cut what each group sees at the query blocks, in order of query blocks."""
    groups = plan.groups
    number = np.arange(len(groups))
    rows = np.array([(group.lo, group.hi) for group in groups], dtype=np.int64).reshape(-1, 2)
    seen = [group.seen_spans for group in groups]
    mounted = [group.mounted_spans for group in groups]
    none = np.empty((0, 2), dtype=np.int64)
    keys = np.concatenate([rows, *seen, np.concatenate([none, *mounted]) + mounts_at])
    of_group = np.concatenate(
        [number, *(np.repeat(number, [*map(len, x)]) for x in (seen, mounted))]
    )
    lo, hi = rows[of_group].T
    first = lo // query_block
    width = (hi - 1) // query_block - first + 1
    owner = np.repeat(np.arange(len(keys)), width)
    block = np.arange(len(owner)) - np.repeat(np.cumsum(width) - width, width) + first[owner]
    order = np.argsort(block, kind="stable")
    owner, block = owner[order], block[order]
    causal = owner < len(groups)
    row_lo = np.maximum(lo[owner], block * query_block)
    row_hi = np.minimum(hi[owner], (block + 1) * query_block)
    key_lo, key_hi = keys[owner].T
    return _Strips(block, row_lo, row_hi, key_lo, np.where(causal, row_hi, key_hi), causal)


def _visible_pairs(strips: _Strips, strip: Index, key_lo: Index, key_block: int) -> Index:
    """Count the pairs of a strip with the keys of one block, for each (strip, block)."""
    first = np.maximum(strips.key_lo[strip], key_lo)
    last = np.minimum(strips.key_hi[strip], key_lo + key_block)
    row_lo, row_hi = strips.row_lo[strip], strips.row_hi[strip]
    pairs = (row_hi - row_lo) * (last - first)
    # A causal strip's keys end with its own rows; key k misses the rows of the strip before it.
    causal = strips.causal[strip]
    if causal.any():
        before_last = np.maximum(last[causal] - row_lo[causal], 0)
        before_first = np.maximum(first[causal] - row_lo[causal], 0)
        missed = before_last * (before_last - 1) - before_first * (before_first - 1)
        pairs[causal] -= missed // 2
    return pairs
