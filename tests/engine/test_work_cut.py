"""Text is cut so that programs which take the longest item left end together."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from octopus_trl.engine.work_cut import BLOCK, Ints, cut, order_of


def items_of(
    slots: Ints, readers: Ints, *, per_tile: int = 16, programs: int = 33, share: float = 0.5
) -> tuple[Ints, Ints, Ints]:
    """Text, length and readers of each item, in the order of the queue."""
    text, begin = cut(slots, readers, per_tile=per_tile, programs=programs, share=share, chunk=None)
    assert np.array_equal(np.unique(text), np.arange(len(slots))), "every text has a chunk"
    last = np.append(np.diff(text) > 0, True)
    end = np.where(last, slots[text], np.append(begin[1:], 0))
    first = np.append(True, np.diff(text) > 0)
    assert not begin[first].any(), "a text is read from its first slot"
    assert (begin % BLOCK == 0).all()
    assert (end > begin).all(), "no item is empty"
    tiles = -(-readers // per_tile)
    item = np.repeat(np.arange(len(text)), tiles[text])
    order = order_of((end - begin)[item], tiles[text[item]] > 1)
    assert sorted(order.tolist()) == list(range(len(item)))
    item = item[order]
    return text[item], (end - begin)[item], readers[text[item]]


def idle(lengths: Ints, programs: int) -> float:
    """Share of the time until the last program ends in which the mean one has nothing to do."""
    ends = [0.0] * programs
    for length in lengths.tolist():
        heapq.heapreplace(ends, ends[0] + length)
    return 1 - sum(ends) / programs / max(ends)


@pytest.mark.parametrize("threads", [1, 3, 8, 16, 31])
@pytest.mark.parametrize("seed", range(3))
def test_programs_end_together_whatever_the_lengths(threads: int, seed: int) -> None:
    rng = np.random.default_rng([threads, seed])
    slots = np.concatenate([[32768], rng.integers(1, 8000, threads)])
    readers = np.concatenate([[threads], np.ones(threads, dtype=np.int64)])
    _, lengths, _ = items_of(slots, readers, per_tile=32)
    assert idle(lengths, 33) < 0.1


def test_few_partial_results_are_left_to_merge() -> None:
    """16 threads of 4,096 own tokens over 32,768: two items a program, and one more a text."""
    slots = np.array([32768] + [4096] * 16)
    text, _, readers = items_of(slots, np.array([16] + [1] * 16))
    assert len(text) <= 2 * 33 + 17
    assert int(readers.sum()) < 450


def test_tiles_of_a_text_share_its_chunks_and_follow_each_other() -> None:
    slots, readers = np.array([9000, 500, 800]), np.array([40, 1, 2])
    text, lengths, _ = items_of(slots, readers)
    mine = np.flatnonzero(text == 0)
    assert len(mine) % 3 == 0
    for lo in range(0, len(mine), 3):
        assert len(set(lengths[mine[lo : lo + 3]].tolist())) == 1


def test_text_shorter_than_a_block_is_not_cut() -> None:
    slots = np.array([1, 63, 64, 65, 0])
    text, begin = cut(
        slots, np.ones(5, dtype=np.int64), per_tile=4, programs=200, share=0.1, chunk=None
    )
    assert text.tolist() == [0, 1, 2, 3, 4]
    assert not begin.any()


def test_a_pass_without_text_has_no_item() -> None:
    nothing = np.empty(0, dtype=np.int64)
    text, begin = cut(nothing, nothing, per_tile=4, programs=33, share=0.5, chunk=None)
    assert len(text) == len(begin) == len(order_of(nothing, nothing > 0)) == 0


def test_a_last_cut_that_rounds_to_the_end_of_all_text_is_left_out() -> None:
    """14 shares of a seventh: their sum may be the whole cost, where no text is left to cut."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        slots = rng.integers(1, 40_000, 31)
        items_of(slots, np.ones(31, dtype=np.int64), programs=7)
