"""Prompts that later cursors may start from: a radix tree over nodes that it keeps (host only)."""

from __future__ import annotations

from collections.abc import Sequence

from octopus_trl.engine.cursor import Node
from octopus_trl.engine.radix import Entry, RadixTree
from octopus_trl.engine.tree import Tree
from octopus_trl.errors import PagesExhausted

REMEMBERED = 1 << 20  # tokens of prompts that are gone, so that their return can be explained


class Forgotten:
    """Prompts that were kept once: why a later one that begins like them finds nothing.

    It outlives the pools. What was used longest ago is forgotten for good first.
    """

    def __init__(self) -> None:
        self.evicted: RadixTree[None] = RadixTree()
        self.stale: RadixTree[None] = RadixTree()

    def add(self, tree: RadixTree[None], key: Sequence[int]) -> None:
        """Remember a prompt in one of the two trees."""
        tree.insert(key, None)
        while tree.num_tokens > REMEMBERED and len(tree) > 1:
            tree.remove(tree.entries()[0])


class PromptCache:
    """Boundaries of opened prompts, by their tokens; each is held and its state wanted."""

    def __init__(self, tree: Tree, forgotten: Forgotten) -> None:
        self._tree, self._forgotten = tree, forgotten
        self._radix: RadixTree[Node] = RadixTree()

    @property
    def nodes(self) -> list[Node]:
        """Boundaries that are kept."""
        return [entry.value for entry in self._radix.entries()]

    def find(self, tokens: Sequence[int]) -> Node | None:
        """Give the boundary after the longest common prefix with any kept prompt, cutting one there
        if there is none.
        """
        length, entry = self._radix.overlap(tokens)
        return self._tree.locate(entry.value, length) if entry is not None and length else None

    def keep(self, tokens: Sequence[int], node: Node) -> None:
        """Keep a boundary that ends a prefix of a prompt, unless one is kept there already."""
        longest = self._radix.longest(tokens)
        if longest is not None and longest.length == len(tokens):
            return
        self._radix.insert(tokens, node)
        self._tree.hold(node)
        self._tree.pin(node)

    def num_lost(self, tokens: Sequence[int], known: int) -> tuple[int, int]:
        """Count the tokens after the first `known` that were kept once.

        Returns:
            Those that were evicted, and behind them those of older weights or from before a sleep.
        """
        evicted = max(known, self._forgotten.evicted.overlap(tokens)[0])
        stale = max(evicted, self._forgotten.stale.overlap(tokens)[0])
        return evicted - known, stale - evicted

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
            gone = next(entry for entry in entries if entry.value.refs == 1)
            self._forgotten.add(self._forgotten.evicted, gone.key)
            self._drop(gone)

    def clear(self) -> None:
        """Drop every kept prompt: the weights changed, or the pools go."""
        for entry in self._radix.entries():
            self._forgotten.add(self._forgotten.stale, entry.key)
            self._drop(entry)
        self._forgotten.evicted = RadixTree()

    def _drop(self, entry: Entry[Node]) -> None:
        self._radix.remove(entry)
        self._tree.unpin(entry.value)
        self._tree.drop(entry.value)
