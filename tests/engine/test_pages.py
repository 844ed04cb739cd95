"""The page pool against a dictionary of lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octopus_trl.engine.pages import PagePool, Range
from octopus_trl.errors import IntegrityError, PagesExhausted

MOVES = st.lists(
    st.tuples(
        st.sampled_from(["root", "child", "more", "shrink", "split", "drop"]),
        st.integers(0, 7),
        st.integers(1, 9),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(page_size=st.integers(1, 5), num_pages=st.integers(1, 12), moves=MOVES)
def test_ranges_hold_what_was_written_and_nothing_is_lost(
    page_size: int, num_pages: int, moves: list[tuple[str, int, int]]
) -> None:
    pool = PagePool(num_pages, page_size)
    written: dict[int, int] = {}  # slot -> value
    held: list[tuple[list[Range], list[int]]] = []  # ranges and the values they must hold
    clock = 0
    for move, which, count in moves:
        if move in ("child", "more", "shrink", "split", "drop") and not held:
            continue
        ranges, values = held[which % len(held)] if held else ([], [])
        before_state = (pool.refs.copy(), pool.fill.copy(), pool.num_free)
        if move in ("root", "child", "more"):
            own = ranges if move == "more" else []
            last = ranges[-1] if move == "child" and ranges else None
            needed = pool.needed(own[-1] if own else last, count)
            if needed > pool.num_free:
                with pytest.raises(PagesExhausted) as caught:
                    pool.grow(own, last, count)
                assert (caught.value.needed, caught.value.free) == (needed, pool.num_free)
                assert (pool.refs == before_state[0]).all()
                assert (pool.fill == before_state[1]).all()
                continue
            slots = pool.grow(own, last, count)
            assert before_state[2] - pool.num_free == needed
            new = list(range(clock, clock + count))
            clock += count
            written.update(zip(slots.tolist(), new, strict=True))
            if move == "more":
                values.extend(new)
            else:
                held.append((own, new))
        elif move == "shrink":
            count = min(count, len(values))
            pool.shrink(ranges, count)
            del values[len(values) - count :]
        elif move == "split":
            if len(values) < 2:
                continue
            cut = count % (len(values) - 1) + 1
            head, tail = pool.split(ranges, cut)
            held[which % len(held)] = (head, values[:cut])
            held.append((tail, values[cut:]))
        else:
            pool.release(ranges)
            del held[which % len(held)]
        pool.check([ranges for ranges, _ in held])
        for ranges, values in held:
            assert [written[slot] for slot in pool.slots(ranges).tolist()] == values
    for ranges, _ in held:
        pool.release(ranges)
    pool.check([])
    assert pool.num_free == num_pages


def test_first_to_go_on_shares_the_partial_page_and_the_next_takes_another() -> None:
    pool = PagePool(8, 4)
    parent: list[Range] = []
    pool.grow(parent, None, 6)
    first: list[Range] = []
    second: list[Range] = []
    pool.grow(first, parent[-1], 1)
    pool.grow(second, parent[-1], 1)
    assert first == [Range(parent[-1].page, 2, 3)]
    assert second[0].page not in {span.page for span in parent}
    pool.release(first)
    third: list[Range] = []
    pool.grow(third, parent[-1], 1)
    assert third == [Range(parent[-1].page, 2, 3)]


def test_a_broken_count_is_found() -> None:
    pool = PagePool(4, 4)
    ranges: list[Range] = []
    pool.grow(ranges, None, 5)
    pool.check([ranges])
    pool.refs[ranges[0].page] += 1
    with pytest.raises(IntegrityError, match="holders"):
        pool.check([ranges])
