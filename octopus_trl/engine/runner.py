"""Passes of the model over growing nodes: prefill in chunks, decode, replay.

A pass changes the pools only where its own node grew, and a pass that fails takes that growth back,
so an error leaves every boundary as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from octopus_trl.engine.batch import Growth, Seen, decode_context, prefill_context
from octopus_trl.engine.counters import Counters
from octopus_trl.engine.cursor import Mount, Node, keep_states, visible
from octopus_trl.engine.pages import Range, Slots
from octopus_trl.engine.splicing import pass_through
from octopus_trl.engine.states import ZERO_SLOT
from octopus_trl.engine.tree import Tree
from octopus_trl.errors import StatesExhausted
from octopus_trl.models import head_of
from octopus_trl.models.paged import PagedContext, PagedMemory, run_paged


class Runner:
    """Grows nodes through the model.

    Args:
        room: called with a number of pages; frees cached prompts until that many are free, or
            raises `PagesExhausted` before any change.
        prefill_chunk: most tokens of one prefill pass; a chain's chunk boundaries depend on that
            chain alone.
        widths: rows that a decode pass may have, ascending.
    """

    def __init__(
        self,
        model: nn.Module,
        memory: PagedMemory,
        tree: Tree,
        counters: Counters,
        room: Callable[[int], None],
        *,
        prefill_chunk: int,
        widths: tuple[int, ...],
    ) -> None:
        self.model, self.memory, self.tree, self.counters = model, memory, tree, counters
        self.prefill_chunk, self._widths = prefill_chunk, widths
        self.room = room
        self._hybrid = memory.spec.is_hybrid
        self._passes = _without_data_parallel(model)
        self._modules: list[nn.Module] = []

    @property
    def max_width(self) -> int:
        """Most rows of one decode pass."""
        return self._widths[-1]

    def width(self, rows: int) -> int:
        """Give the least width that holds some rows."""
        return next(width for width in self._widths if width >= rows)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch dropout off and autograd too, and put every module back as it was."""
        if self.model.training or not self._modules:
            self._modules = list(self.model.modules())
        training = [module for module in self._modules if module.training]
        for module in training:
            module.training = False
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True

    def forget_modules(self) -> None:
        """Look the model's modules up again: adapters may have been added or merged."""
        self._modules = []

    def logits(self, rows: Tensor) -> Tensor:
        """Apply the head to hidden states [R, d]; float32 [R, vocab]."""
        return head_of(self.model)(rows).float()

    def begin(
        self,
        tail: Node | None,
        mounts: tuple[Mount, ...],
        position: int,
        epoch: int,
        *,
        num_tokens: int = 0,
        spare: int = 0,
    ) -> Growth:
        """Start a node after a boundary, with its state slot and what it sees.

        Args:
            num_tokens: tokens that are certain to follow; their pages are checked first.
            spare: pages that must be free beside them.
        Raises:
            PagesExhausted, StatesExhausted: too little room; nothing was changed.
        """
        last = tail.ranges[-1] if tail is not None else None
        self.room(self.tree.pages.needed(last, num_tokens) + spare)
        if tail is not None and self._hybrid and not tail.has_state:
            self._rebuild(tail)
        node = self.tree.new(tail, mounts, position, epoch)
        growth = self._growth(node, *visible(tail, mounts), room=num_tokens + 64)
        growth.hidden = None if tail is None else tail.hidden
        if self._hybrid:
            try:
                read_slot = self.take_slot(tail, node)
                with keep_states(tail):
                    growth.read_slot = pass_through(self, tail, mounts, read_slot, node.slot)
            except BaseException:
                self.tree.drop(node)
                raise
            if tail is not None and growth.read_slot != node.slot:
                growth.source = tail
                tail.readers += 1
        return growth

    def _growth(
        self, node: Node, own: Sequence[Node], mounted: Sequence[Node], *, room: int
    ) -> Growth:
        return Growth(node, Seen(own, mounted, room))

    def grow(
        self,
        tail: Node | None,
        tokens: Sequence[int],
        mounts: tuple[Mount, ...],
        position: int,
        epoch: int,
    ) -> Node:
        """Grow one node by all of `tokens`; it is held once.

        Raises:
            PagesExhausted, StatesExhausted: too little room; nothing was changed.
        """
        growth = self.begin(tail, mounts, position, epoch, num_tokens=len(tokens))
        try:
            for lo in range(0, len(tokens), self.prefill_chunk):
                self.prefill(growth, tokens[lo : lo + self.prefill_chunk])
        except BaseException:
            self.abort(growth)
            raise
        return self.finish(growth)

    def prefill(self, growth: Growth, tokens: Sequence[int]) -> None:
        """Feed at most `prefill_chunk` tokens to a growing node in one pass."""
        node, pages = growth.node, self.tree.pages
        before = self._last(node)
        self.room(pages.needed(before, len(tokens)))
        slots = pages.grow(node.ranges, before, len(tokens))
        try:
            hidden = self._chunk(growth, tokens, growth.position, slots, growth.node.slot)
        except BaseException:
            pages.shrink(node.ranges, len(tokens))
            raise
        self.counters.prefill_passes += 1
        self._advance(growth, tokens, slots, hidden)

    def _chunk(
        self,
        growth: Growth,
        tokens: Sequence[int],
        position: int,
        slots: Slots,
        write_slot: int | None,
        *,
        replay: bool = False,
    ) -> Tensor:
        """Feed consecutive tokens of one chain; returns the last hidden state [d].

        Args:
            slots: places of the tokens, not seen by `growth` yet.
            write_slot: state slot for the end; None for a model without recurrent layers.
            replay: the keys and values are in their places already.
        """
        context = prefill_context(
            self.memory,
            tokens,
            position,
            growth.seen,
            slots=None if replay else slots,
            read_slot=growth.read_slot,
            write_slot=write_slot,
        )
        return run_paged(self._passes, context)[-1]

    def run_plainly(self, context: PagedContext) -> None:
        """Run a pass through the model's own forward, for what it does to the pools."""
        run_paged(self._passes, context)

    def launch(self, work: Callable[[], object]) -> None:
        """Change the pools after all that was started before."""
        work()

    def pages_for(self, growth: Growth, count: int) -> int:
        """Count the new pages that `count` more tokens of a growing node take."""
        return self.tree.pages.needed(self._last(growth.node), count)

    def reserve(self, growth: Growth) -> Slots:
        """Make room for one more token of a growing node; it sees the slot from now on.

        Raises:
            PagesExhausted: no page is free or cached; nothing was changed.
        """
        before = self._last(growth.node)
        self.room(self.tree.pages.needed(before, 1))
        slots = self.tree.pages.grow(growth.node.ranges, before, 1)
        growth.seen.append(slots)
        return slots

    def decode(
        self, growths: Sequence[Growth], tokens: Sequence[int], slots: Sequence[Slots]
    ) -> None:
        """Feed one token to each of at most `max_width` growing nodes in one pass.

        Args:
            slots: what `reserve` gave for each node.
        """
        try:
            context = decode_context(
                self.memory, growths, tokens, np.concatenate(slots), width=self.width(len(growths))
            )
            hidden = run_paged(self._passes, context)
        except BaseException:
            for growth in growths:
                self.tree.pages.shrink(growth.node.ranges, 1)
                growth.seen.drop(1)
                # Some layers may have stepped already; the state is built again when it is asked.
                self.tree.states.release(growth.node)
            raise
        self.counters.decode_steps += 1
        self.tree.states.tidy()
        for row, (growth, token) in enumerate(zip(growths, tokens, strict=True)):
            growth.node.tokens.append(token)
            growth.hidden = hidden[row]
            self._stepped(growth)

    def finish(self, growth: Growth) -> Node:
        """End a node's growth: it becomes a boundary that can be stood on."""
        node = growth.node
        self._stepped(growth)
        node.hidden = None if growth.hidden is None else self._keep(growth.hidden)
        self.tree.freeze(node)
        return node

    def _keep(self, hidden: Tensor) -> Tensor:
        """Copy a hidden state out of what later passes overwrite or what holds many others."""
        return hidden.clone()

    def abort(self, growth: Growth) -> None:
        """Take a growing node back with all that it holds."""
        self._stepped(growth)
        self.tree.drop(growth.node)

    def ensure_state(self, node: Node, reason: str | None = None) -> None:
        """Make sure that a boundary has its state, in a slot or parked.

        Args:
            reason: why tokens are stepped through if they must be; None asks the boundary.
        Raises:
            StatesExhausted: it must be rebuilt and no slot can be had; nothing was changed.
        """
        if node.has_state:
            self.tree.states.touch(node)
        elif self._hybrid:
            self._rebuild(node, reason)

    def _rebuild(self, node: Node, reason: str | None = None) -> None:
        """Compute the state at a boundary from the nearest one above it that has a state.

        Keys and values stay where they are and nothing is written to pages.
        """
        reason = reason or ("state_dropped" if node.stated else "no_state")
        missing = [node]
        source = node.parent
        while source is not None and not source.has_state:
            missing.append(source)
            source = source.parent
        read_slot = self.take_slot(source, node)
        try:
            with keep_states(source, node):
                hidden = self.replay(missing, read_slot, node.slot, reason)
        except BaseException:
            self.tree.states.release(node)
            raise
        if node.hidden is None:
            node.hidden = self._keep(hidden)

    def ensure_hidden(self, node: Node) -> Tensor:
        """Give the last hidden state [d] at a boundary, computing it again where a cut lost it."""
        if node.hidden is None:
            if self._hybrid:
                self.tree.states.release(node)
                self._rebuild(node)
            else:
                hidden = self.replay([node], ZERO_SLOT, None, "no_state", last_only=True)
                node.hidden = self._keep(hidden)
        assert node.hidden is not None
        return node.hidden

    def replay(
        self,
        missing: list[Node],
        read_slot: int,
        write_slot: int | None,
        reason: str,
        *,
        last_only: bool = False,
    ) -> Tensor:
        """Step through frozen nodes again, last one first in `missing`."""
        hidden: Tensor | None = None
        for node in reversed(missing):
            growth = self._growth(node, *visible(node.parent, node.mounts), room=len(node.tokens))
            growth.read_slot = pass_through(self, node.parent, node.mounts, read_slot, write_slot)
            assert node.cached_slots is not None
            lo = len(node.tokens) - 1 if last_only else 0
            growth.seen.append(node.cached_slots[:lo])
            while lo < len(node.tokens):
                hi = min(lo + self.prefill_chunk, len(node.tokens))
                slots, start = node.cached_slots[lo:hi], node.start + lo
                hidden = self._chunk(
                    growth, node.tokens[lo:hi], start, slots, write_slot, replay=True
                )
                self.counters.miss(reason, hi - lo)
                growth.seen.append(slots)
                lo, growth.read_slot = hi, write_slot or ZERO_SLOT
            read_slot = growth.read_slot
        assert hidden is not None
        return hidden

    def take_slot(self, source: Node | None, node: Node) -> int:
        """Give a node its slot and return the slot to read first.

        When the only slot to be had is that of the state that is read, the node takes it over: the
        pass reads it before it writes. A parked state comes straight into the node's slot.
        """
        states = self.tree.states
        if source is None:
            states.take(node)
            return ZERO_SLOT
        source.readers += 1
        try:
            slot = states.take(node)
            if source.slot is None:
                states.parking.load(source, slot)
                return slot
            states.touch(source)
            return source.slot
        except StatesExhausted:
            if source.slot is None or source.readers > 1 or source.growing:
                raise
            return states.hand_over(source, node)
        finally:
            source.readers -= 1

    def _advance(self, growth: Growth, tokens: Sequence[int], slots: Slots, hidden: Tensor) -> None:
        growth.node.tokens.extend(tokens)
        growth.seen.append(slots)
        growth.hidden = hidden
        self._stepped(growth)

    def _stepped(self, growth: Growth) -> None:
        """After the first pass the node reads its own state, and its parent's may go."""
        if growth.node.slot is not None:
            growth.read_slot = growth.node.slot
        if growth.source is not None:
            source, growth.source = growth.source, None
            source.readers -= 1
            self.tree.let_state_go(source)

    @staticmethod
    def _last(node: Node) -> Range | None:
        """Last range of a node or, before its first token, of its parent."""
        if node.ranges:
            return node.ranges[-1]
        return node.parent.ranges[-1] if node.parent is not None else None


def _without_data_parallel(model: nn.Module) -> nn.Module:
    """Go under wrappers whose forward may wait for other ranks; adapters stay."""
    while type(model).__name__ in ("DistributedDataParallel", "DeepSpeedEngine"):
        model = model.module  # type: ignore[assignment]
    return model
