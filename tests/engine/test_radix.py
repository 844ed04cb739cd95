"""The radix tree against a dictionary."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octopus_trl.engine.radix import RadixTree

KEYS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
MOVES = st.lists(st.tuples(st.sampled_from(["insert", "remove", "look"]), KEYS), max_size=40)


@settings(max_examples=200, deadline=None)
@given(MOVES)
def test_look_ups_agree_with_a_dictionary(moves: list[tuple[str, tuple[int, ...]]]) -> None:
    tree: RadixTree[int] = RadixTree()
    model: dict[tuple[int, ...], int] = {}
    used: list[tuple[int, ...]] = []  # keys by last use

    def touch(keys: list[tuple[int, ...]]) -> None:
        for key in keys:
            if key in used:
                used.remove(key)
        used.extend(sorted(keys, key=len, reverse=True))

    for number, (move, key) in enumerate(moves):
        if move == "insert":
            tree.insert(key, number)
            model[key] = number
            touch([key])
        elif move == "remove":
            for entry in tree.entries():
                if entry.key == key:
                    tree.remove(entry)
                    del model[key]
                    used.remove(key)
        prefixes = [stored for stored in model if key[: len(stored)] == stored]
        found = tree.longest(key)
        touch(prefixes)
        best = max(prefixes, key=len, default=None)
        assert (found.key if found else None) == best
        assert (found.value if found else None) == (model[best] if best else None)
        assert [entry.key for entry in tree.entries()] == used
        assert {entry.key: entry.value for entry in tree.entries()} == model
        assert len(tree) == len(model)

        length, below = tree.overlap(key)
        shared = max((_shared(key, stored) for stored in model), default=0)
        assert length == shared
        if below is not None:
            assert below.key[:length] == key[:length]
            touch([*(k for k in prefixes if k != below.key), below.key])
        assert sorted(entry.key for entry in tree.entries()) == sorted(used)
        used[:] = [entry.key for entry in tree.entries()]


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


def test_removing_what_is_not_stored_is_refused() -> None:
    tree: RadixTree[int] = RadixTree()
    entry = tree.insert([1, 2, 3], 0)
    tree.insert([1, 2, 4], 1)
    tree.remove(entry)
    with pytest.raises(KeyError):
        tree.remove(entry)
    assert [left.key for left in tree.entries()] == [(1, 2, 4)]
