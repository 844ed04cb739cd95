"""Prompts that later cursors may start from: a radix tree over nodes that it keeps (host only)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from octopus_trl.engine.cursor import Node
from octopus_trl.engine.radix import Entry, RadixTree
from octopus_trl.engine.tree import Tree
from octopus_trl.errors import PagesExhausted

REMEMBERED = 4096  # evicted prompts whose return is counted as prefilled again


class PromptCache:
    """Boundaries of opened prompts, by their tokens; each is held and its state wanted.

    Args:
        any_token: a prompt may be shared up to any token, not only up to a stored boundary; true
            for models without recurrent layers.
    """

    def __init__(self, tree: Tree, *, any_token: bool) -> None:
        self._tree, self._any_token = tree, any_token
        self._radix: RadixTree[Node] = RadixTree()
        self._evicted: OrderedDict[tuple[int, int], None] = OrderedDict()

    @property
    def nodes(self) -> list[Node]:
        """Boundaries that are kept."""
        return [entry.value for entry in self._radix.entries()]

    def find(self, tokens: Sequence[int]) -> Node | None:
        """Give the last boundary whose chain is a prefix of `tokens`, cutting one where allowed."""
        if self._any_token:
            length, entry = self._radix.overlap(tokens)
            return self._tree.locate(entry.value, length) if entry and length else None
        longest = self._radix.longest(tokens)
        return longest.value if longest else None

    def keep(self, tokens: Sequence[int], node: Node) -> None:
        """Keep a boundary that ends a prefix of a prompt, unless one is kept there already."""
        longest = self._radix.longest(tokens)
        if longest is not None and longest.length == len(tokens):
            return
        self._radix.insert(tokens, node)
        self._tree.hold(node)
        self._tree.pin(node)
        self._evicted.pop(_digest(tokens, len(tokens)), None)

    def num_lost(self, tokens: Sequence[int], known: int) -> int:
        """Count the tokens after the first `known` that were kept once and evicted."""
        lengths = sorted({length for length, _ in self._evicted}, reverse=True)
        for length in lengths:
            if known < length <= len(tokens) and _digest(tokens, length) in self._evicted:
                return length - known
        return 0

    def num_evictable_pages(self) -> int:
        """Count the pages that nothing but kept prompts holds."""
        return self._tree.only_held_by(self.nodes)

    def make_room(self, needed: int) -> None:
        """Drop kept prompts that no cursor uses, longest unused first, until pages are free.

        Raises:
            PagesExhausted: even without any kept prompt too few pages are free; nothing was
                changed.
        """
        free = self._tree.pages.num_free
        if needed <= free:
            return
        evictable = self.num_evictable_pages()
        if needed > free + evictable:
            hint = "close cursors, shorten the context or raise num_pages"
            raise PagesExhausted(needed, free, evictable, hint)
        while self._tree.pages.num_free < needed:
            # What is deepest among the nodes that only prompts hold is held by its entry alone.
            entries = self._radix.entries()
            self._drop(next(entry for entry in entries if entry.value.refs == 1))

    def clear(self) -> None:
        """Drop every kept prompt."""
        for entry in self._radix.entries():
            self._drop(entry, remember=False)
        self._evicted.clear()

    def _drop(self, entry: Entry[Node], *, remember: bool = True) -> None:
        if remember:
            self._evicted[_digest(entry.key, entry.length)] = None
            while len(self._evicted) > REMEMBERED:
                self._evicted.popitem(last=False)
        self._radix.remove(entry)
        self._tree.unpin(entry.value)
        self._tree.drop(entry.value)


def _digest(tokens: Sequence[int], length: int) -> tuple[int, int]:
    return length, hash(tuple(tokens[:length]))
