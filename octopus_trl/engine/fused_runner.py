"""A runner whose passes are fused: prefill of several chains at once, decode steps from lanes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from octopus_trl.engine.batch import Growth, Seen
from octopus_trl.engine.counters import Counters
from octopus_trl.engine.cursor import Node
from octopus_trl.engine.graphs import DecodeSteps
from octopus_trl.engine.pages import Slots
from octopus_trl.engine.prefill import Part, PrefillPass
from octopus_trl.engine.row_work import DeviceTable, StepWork, WorkShape
from octopus_trl.engine.runner import Runner
from octopus_trl.engine.staging import Device
from octopus_trl.engine.tree import Tree
from octopus_trl.models.fused import FusedModel
from octopus_trl.models.paged import PagedContext, PagedMemory

MOST_LANES = 1024  # rows under way at once; further turns wait for a lane


class FusedPasses:
    """What outlives the pools' sleep: the fused model, its buffers and captured steps.

    Args:
        widths: rows that a decode step may have, ascending.
        exact: what a chain computes depends on it alone: one width, one chain a prefill pass, and
            no text shared between rows.
        capture: replay CUDA graphs.
    """

    def __init__(
        self,
        model: nn.Module,
        memory: PagedMemory,
        counters: Counters,
        *,
        widths: tuple[int, ...],
        prefill_chunk: int,
        num_slots: int,
        exact: bool,
        merge: bool,
        capture: bool,
        device: Device | None = None,
    ) -> None:
        spec = memory.spec
        self.device = device or Device(memory.device)
        self.model = FusedModel(model, memory, merge=merge)
        self.exact = exact
        shape = WorkShape.of(spec, memory.device, alone=exact)
        both = len(spec.mount_layers) < len(spec.attention_layers)
        self._table = DeviceTable(self.device, 2 * num_slots + 1024 * MOST_LANES)
        self._work = StepWork(shape, self._table, widths, both=both)
        self.steps = DecodeSteps(
            self.model,
            self.device,
            self._work,
            counters,
            widths=widths,
            num_lanes=MOST_LANES,
            capture=capture,
        )
        self.prefill = PrefillPass(
            self.model,
            self.device,
            shape,
            counters,
            max_rows=prefill_chunk,
            num_slots=num_slots,
            both=both,
            capture=capture,
        )

    def refresh(self, *, force: bool = False) -> None:
        """See what changed in the weights or in the pools' addresses."""
        if self.model.refresh(force=force):
            self.steps.check()
            self.prefill.check()

    def forget(self) -> None:
        """Trust nothing of what was sent: a pass failed, or the pools are new."""
        self._work.forget()

    def sleep(self) -> None:
        """Free what `refresh` makes again."""
        self.model.release()
        self.prefill.release()
        self.forget()


class FusedRunner(Runner):
    """Grows nodes through the fused passes; see `Runner`.

    Attributes:
        passes: shared with earlier and later runners of the engine.
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
        passes: FusedPasses,
    ) -> None:
        widths = passes.steps.widths
        super().__init__(
            model, memory, tree, counters, room, prefill_chunk=prefill_chunk, widths=widths
        )
        self.passes = passes
        self._lanes = list(range(passes.steps.num_lanes))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """As `Runner.evaluating`, and see adapters that were trained or switched since."""
        with super().evaluating():
            if len(self._lanes) == self.passes.steps.num_lanes and self.memory.allocated:
                self.passes.refresh()
            yield

    def forget_modules(self) -> None:
        """See new weights."""
        super().forget_modules()
        if self.memory.allocated:
            self.passes.refresh(force=True)

    def logits(self, rows: Tensor) -> Tensor:
        """Apply the head to hidden states [R, d]; float32 [R, vocab]."""
        self.passes.device.settle()
        return self.passes.model.logits(rows).float()

    def take_lane(self) -> int | None:
        """Give a lane, None where all are taken."""
        return heapq.heappop(self._lanes) if self._lanes else None

    def give_lane(self, lane: int) -> None:
        """Take a lane back."""
        heapq.heappush(self._lanes, lane)

    def reserve_chunk(self, growth: Growth, tokens: Sequence[int]) -> Part:
        """Make room for the next tokens of a growing node.

        Raises:
            PagesExhausted: too few pages; nothing was changed.
        """
        node, pages = growth.node, self.tree.pages
        before = self._last(node)
        self.room(pages.needed(before, len(tokens)))
        slots = pages.grow(node.ranges, before, len(tokens))
        return Part(growth, tokens, growth.position, slots, node.slot)

    def step_in_place(self, growth: Growth) -> bool:
        """Make room for one token where the last page has some; see `reserve`."""
        slot = self.tree.pages.grow_in_place(growth.node.ranges)
        if slot is None:
            return False
        growth.seen.push(slot)
        return True

    def give_back(self, part: Part) -> None:
        """Take the room of a part back."""
        self.tree.pages.shrink(part.growth.node.ranges, len(part.tokens))

    def feed(self, parts: Sequence[Part]) -> None:
        """Feed reserved parts in one pass; one that fails gives their room back."""
        try:
            hidden = self.passes.prefill(parts)
        except BaseException:
            for part in parts:
                self.give_back(part)
            raise
        self.counters.prefill_passes += 1
        for part, row in zip(parts, hidden, strict=True):
            self._advance(part.growth, part.tokens, part.slots, row)

    def stepped(self, growth: Growth) -> None:
        """After its first step was launched a node reads its own state."""
        if growth.source is not None:
            self._stepped(growth)

    def take_back(self, growth: Growth) -> None:
        """Undo the step of a node that failed, or whose token was none."""
        self.tree.pages.shrink(growth.node.ranges, 1)
        growth.seen.drop(1)
        # Some layers may have stepped; the state is built again when it is asked for.
        self.tree.states.release(growth.node)
        growth.hidden = None

    def run_plainly(self, context: PagedContext) -> None:
        """As `Runner.run_plainly`, after all that was launched; fused passes know no splice."""
        self.passes.device.settle()
        super().run_plainly(context)

    def launch(self, work: Callable[[], object]) -> None:
        """Change the pools after all that was launched before."""
        self.passes.device.launch(work)

    def _growth(
        self, node: Node, own: Sequence[Node], mounted: Sequence[Node], *, room: int
    ) -> Growth:
        spans, reads = _slots_of(own), _slots_of(mounted)
        if self.passes.exact:
            # Arrays of its own: how its text is cut depends on nobody else's.
            spans, reads = _joined(spans), _joined(reads)
        return Growth(node, Seen((), (), room), spans=spans, mounted=reads)

    def _keep(self, hidden: Tensor) -> Tensor:
        kept = torch.empty_like(hidden)
        self.passes.device.launch(lambda: kept.copy_(hidden))
        return kept

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
        part = Part(growth, tokens, position, slots, write_slot, replay)
        return self.passes.prefill([part])[0]


def _slots_of(nodes: Sequence[Node]) -> tuple[Slots, ...]:
    return tuple(node.cached_slots for node in nodes if node.cached_slots is not None)


def _joined(spans: tuple[Slots, ...]) -> tuple[Slots, ...]:
    return (np.concatenate(spans),) if spans else ()
