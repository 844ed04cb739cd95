"""Cursors over a persistent tree of nodes, and the mounts between its branches (host only).

A node is the run of tokens that one call added; its identity is the boundary at its end. Nodes
never change once a cursor stands on them, except that one may be cut in two, which puts a new node
above it and leaves every boundary where it was. Whatever a chain or a mount sees follows from
parent pointers, so forking, mounting and going back move pointers and touch no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from octopus_trl.engine.pages import Range, Slots

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(eq=False, slots=True)
class Node:
    """Tokens between two boundaries of a chain.

    Attributes:
        parent: node that this one continues, None for the first of a chain.
        tokens: own token ids.
        ranges: where their keys and values lie.
        start: position of the first own token; the others follow one by one.
        offset: tokens of the chain before this node.
        epoch: weights and pools that it was computed with; another epoch may not go on from it.
        mounts: what became readable just before the first own token.
        mounting: last node of the chain that mounts something, maybe this one; `read_edges` follows
            it past nodes that mount nothing.
        slot: state slot that holds the recurrent state at the end, if any does.
        place: place in host memory that holds a copy of it, if any does.
        stated: whether the state was ever there.
        hidden: [d] last hidden state at the end, if known.
        refs: cursors, running turns, prompt entries and children that need this node's chain.
        mount_refs: mounts that read this node.
        tails: cursors that stand on its end.
        pins: snapshots and prompt entries that want its state kept.
        readers: runs that have yet to read its state.
    """

    parent: Node | None
    tokens: list[int]
    ranges: list[Range]
    start: int
    offset: int
    epoch: int
    mounts: tuple[Mount, ...] = ()
    mounting: Node | None = None
    slot: int | None = None
    place: int | None = None
    stated: bool = False
    hidden: Tensor | None = None
    refs: int = 0
    mount_refs: int = 0
    tails: int = 0
    pins: int = 0
    readers: int = 0
    growing: bool = False
    cached_slots: Slots | None = None

    @property
    def end(self) -> int:
        """Position just past the last own token."""
        return self.start + len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens of the chain through this node."""
        return self.offset + len(self.tokens)

    @property
    def has_state(self) -> bool:
        """Whether the recurrent state at the end is in a slot or parked."""
        return self.slot is not None or self.place is not None


@dataclass(eq=False, slots=True)
class Mount:
    """A read edge: the nodes from `tail` up to `base`, `base` left out.

    Attributes:
        base: None for everything from the root on.
        root: the opened prompt that the source grew from, None where it is the reader's own. Equal
            prompts share nodes, yet another root's text is other text (two segments of a trace).
        shifts: whether the reader goes on past it (paper Eq. 2).
        repeats: the spans that its nodes hold once more, prefilled again or as moved keys.
        end: where moved keys were copied from, the position past the highest of them; None where
            nothing was moved.
        spliced: recurrent layers step through what it adds just before the reader's next token.
        read: whether attention sees it; a span that is read as moved keys is only stepped through.
        refs: cursors and nodes that read it.
    """

    tail: Node
    base: Node | None
    root: object | None = None
    shifts: bool = True
    repeats: tuple[Mount, ...] = ()
    end: int | None = None
    spliced: bool = False
    read: bool = True
    refs: int = 0

    @property
    def holds_chain(self) -> bool:
        """Whether it needs the whole chain of `tail`: its only holder, or to step through it."""
        return self.spliced or bool(self.repeats)

    def nodes(self) -> Iterator[Node]:
        """Walk the span, last node first."""
        node: Node | None = self.tail
        while node is not None and node is not self.base:
            yield node
            node = node.parent


def chain(tail: Node | None) -> list[Node]:
    """List the nodes of a chain, root first."""
    nodes: list[Node] = []
    while tail is not None:
        nodes.append(tail)
        tail = tail.parent
    nodes.reverse()
    return nodes


def common(one: Node | None, other: Node | None) -> Node | None:
    """Give the last boundary that two chains share, None if they share none."""
    while one is not other:
        if one is None or other is None:
            return None
        if one.num_tokens >= other.num_tokens:
            one = one.parent
        else:
            other = other.parent
    return one


def read_edges(tail: Node | None) -> Iterator[Mount]:
    """Walk the mounts of a chain, the last node's first; nodes without any cost nothing."""
    node = tail
    while node is not None:
        node = node.mounting
        if node is not None and node.mounts:  # a split took them to a node further up otherwise
            yield from node.mounts
            node = node.parent


def unread(
    tail: Node, pending: Sequence[Mount], span: Mount, *, copies: bool = False
) -> list[Node]:
    """List the nodes of a span that a boundary's next token does not see yet, last one first.

    They are what `visible` would add for `span`; the time this takes grows with the span, with the
    mounts there are and with what `tail` added since the two chains parted, not with the chain.

    Args:
        pending: mounts made since the boundary.
        copies: what it sees a copy of counts as seen.
    """
    own = common(span.tail, tail) if span.root is None else None
    known: set[int] = set()
    for mount in (*read_edges(tail), *pending):
        for seen in (copies and mount.repeats) or (mount,):
            if seen.read and seen.root is span.root:
                known.update(map(id, seen.nodes()))
    new: list[Node] = []
    for node in span.nodes():
        if node is own:
            break
        if id(node) not in known:
            new.append(node)
    return new


def visible(tail: Node | None, pending: Sequence[Mount]) -> tuple[list[Node], list[Node]]:
    """List what the next token after a boundary sees.

    Args:
        pending: mounts made since the boundary.
    Returns:
        Nodes of the chain, root first, and mounted nodes that are not on it, in the order they
        became readable.
    """
    own = chain(tail)
    seen: dict[object | None, set[int]] = {None: set(map(id, own))}
    mounted: list[Node] = []
    for mounts in [*(node.mounts for node in own), pending]:
        for mount in mounts:
            if mount.read:
                mounted.extend(_unseen(mount, seen))
    return own, mounted


def passed(tail: Node | None, mounts: Sequence[Mount]) -> list[list[Node]]:
    """List what recurrent layers step through where `mounts` take effect, a chain of nodes each.

    Args:
        tail: boundary just before that place.
    Returns:
        What spliced mounts add, in the order in which they were made; nodes of one list follow one
        another on their own chain.
    """
    own = chain(tail)
    seen: dict[object | None, set[int]] = {None: set(map(id, own))}
    for node in own:
        for mount in node.mounts:
            _unseen(mount, seen)
    spans: list[list[Node]] = []
    for mount in mounts:
        before: Node | None = None
        for node in _unseen(mount, seen):
            if not mount.spliced:
                continue
            if before is None or node.parent is not before:
                spans.append([])
            spans[-1].append(node)
            before = node
    return spans


@contextmanager
def keep_states(*boundaries: Node | None) -> Iterator[None]:
    """Keep the states of boundaries from eviction."""
    held = [node for node in boundaries if node is not None]
    for node in held:
        node.readers += 1
    try:
        yield
    finally:
        for node in held:
            node.readers -= 1


def _unseen(mount: Mount, seen: dict[object | None, set[int]]) -> list[Node]:
    """List the nodes of a mount that are not in `seen`, in order, and put them there."""
    known = seen.setdefault(mount.root, set())
    new = [node for node in mount.nodes() if id(node) not in known]
    known.update(map(id, new))
    return new[::-1]


@dataclass(eq=False, slots=True)
class Cursor:
    """A thread's place in an engine's storage; made by `Engine.open` and `Engine.fork`.

    Pass it to the engine's methods; only the three properties below are for reading.
    """

    _engine: Any
    _tail: Node
    _origin: Node | None
    _root: object
    _position: int
    _pending: tuple[Mount, ...] = ()
    _snapshots: list[Node] = field(default_factory=list)
    _turn: int | None = None
    _counted: int = 0  # tokens of the chain that are in `context_tokens` before the next turn
    _closed: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the cursor's own chain, inherited ones counted, mounted ones not."""
        return self._tail.num_tokens

    @property
    def position(self) -> int:
        """Position that the next token takes."""
        return self._position

    @property
    def closed(self) -> bool:
        """Whether `Engine.close` was called."""
        return self._closed

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"position {self._position}"
        return f"Cursor({self.num_tokens} tokens, {state})"


def position_after(tail: Node, pending: Sequence[Mount]) -> int:
    """Place the next token: past the own chain and past all mounts that shift it (paper Eq. 2).

    A node starts past all that it sees, so only mounts made since can lie further.
    """
    return max([tail.end, *(mount.tail.end for mount in pending if mount.shifts)])


def slots_of(nodes: Sequence[Node]) -> Slots:
    """Concatenate the cached slots of frozen nodes."""
    parts = [node.cached_slots for node in nodes if node.cached_slots is not None]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
