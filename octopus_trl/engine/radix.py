"""Radix tree from token prefixes to values, in least-recently-used order (host only)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

V = TypeVar("V")


@dataclass(eq=False, slots=True)
class Entry(Generic[V]):
    """A stored key and its value.

    Attributes:
        length: tokens of the key.
        used: clock of the last use.
    """

    key: tuple[int, ...]
    value: V
    used: int

    @property
    def length(self) -> int:
        """Tokens of the key."""
        return len(self.key)


@dataclass(eq=False, slots=True)
class _Node(Generic[V]):
    """Edge label from the parent, children by first token, and the entry that ends here."""

    label: tuple[int, ...]
    children: dict[int, _Node[V]] = field(default_factory=dict)
    entry: Entry[V] | None = None


class RadixTree(Generic[V]):
    """Map from token sequences to values with prefix look-ups.

    >>> tree = RadixTree[str]()
    >>> tree.insert([1, 2, 3], "a").value
    'a'
    >>> tree.longest([1, 2, 3, 4]).value, tree.overlap([1, 2, 9])[0]
    ('a', 2)
    """

    def __init__(self) -> None:
        self._root: _Node[V] = _Node(())
        self._clock = 0
        self._size = 0
        self.num_tokens = 0  # of all keys, common prefixes counted each time

    def __len__(self) -> int:
        return self._size

    def insert(self, tokens: Sequence[int], value: V) -> Entry[V]:
        """Store a value under a key, replacing the one that was there."""
        key = tuple(tokens)
        node, at = self._root, 0
        while at < len(key):
            child = node.children.get(key[at])
            if child is None:
                child = node.children[key[at]] = _Node(key[at:])
                node, at = child, len(key)
                break
            shared = _shared(child.label, key, at)
            if shared < len(child.label):
                middle: _Node[V] = _Node(child.label[:shared])
                child.label = child.label[shared:]
                middle.children[child.label[0]] = child
                node.children[key[at]] = middle
                child = middle
            node, at = child, at + shared
        if node.entry is None:
            self._size += 1
            self.num_tokens += len(key)
        node.entry = Entry(key, value, self._tick())
        return node.entry

    def longest(self, tokens: Sequence[int]) -> Entry[V] | None:
        """Give the longest stored key that is a prefix of `tokens`; it and its prefixes count as
        used.
        """
        path = [node.entry for node, _ in self._descend(tuple(tokens), whole=True) if node.entry]
        self._use(path)
        return path[-1] if path else None

    def overlap(self, tokens: Sequence[int]) -> tuple[int, Entry[V] | None]:
        """Give the longest common prefix of `tokens` with any stored key, and one such entry."""
        path = list(self._descend(tuple(tokens), whole=False))
        if not path:
            return 0, None
        below, length = path[-1]
        while below.entry is None:  # every leaf has one
            below = next(iter(below.children.values()))
        above = [node.entry for node, _ in path if node.entry]
        self._use([*(entry for entry in above if entry.length <= length), below.entry])
        return length, below.entry

    def entries(self) -> list[Entry[V]]:
        """List all entries, least recently used first; of equals the longest first."""
        found = [node.entry for node in self._walk(self._root) if node.entry is not None]
        return sorted(found, key=lambda entry: (entry.used, -entry.length))

    def remove(self, entry: Entry[V]) -> None:
        """Take an entry out.

        Raises:
            KeyError: it is not stored.
        """
        path = [self._root, *(node for node, _ in self._descend(entry.key, whole=True))]
        node = path.pop()
        if node.entry is not entry:
            raise KeyError(entry.key)
        node.entry = None
        self._size -= 1
        self.num_tokens -= entry.length
        while path and node.entry is None and not node.children:
            parent = path.pop()
            del parent.children[node.label[0]]
            node = parent
        if path and node.entry is None and len(node.children) == 1:
            child = next(iter(node.children.values()))
            path[-1].children[node.label[0]] = child
            child.label = node.label + child.label

    def _descend(self, key: tuple[int, ...], *, whole: bool) -> Iterator[tuple[_Node[V], int]]:
        """Follow a key; yield each node with the key tokens matched through its label.

        Args:
            whole: leave out a last node whose label matches only in part.
        """
        node, at = self._root, 0
        while at < len(key) and (child := node.children.get(key[at])) is not None:
            shared = _shared(child.label, key, at)
            at += shared
            if shared < len(child.label) and whole:
                return
            yield child, at
            if shared < len(child.label):
                return
            node = child

    def _walk(self, node: _Node[V]) -> Iterator[_Node[V]]:
        stack = [node]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _use(self, entries: Sequence[Entry[V]]) -> None:
        now = self._tick()
        for entry in entries:
            entry.used = now

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _shared(label: tuple[int, ...], key: tuple[int, ...], at: int) -> int:
    """Count the leading tokens that a label and key[at:] have in common."""
    part = key[at : at + len(label)]
    if part == label[: len(part)]:
        return len(part)
    return next(i for i, (one, two) in enumerate(zip(label, part)) if one != two)
