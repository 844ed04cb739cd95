"""Work of an update: the rows that separate branches need, and the FLOPs that either way counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from octopus_trl import Trace
from octopus_trl.maths import dag
from octopus_trl.maths.dag import AttentionPlan
from octopus_trl.trace import Segment, ThreadRecord
from octopus_trl.train.rows import LossRow

from .limits import Shapes


@dataclass(slots=True)
class ChainRow:
    """One leaf's chain as a row of its own.

    Attributes:
        trace: what it mounted goes before the reader as text without loss; an action that an
            earlier row counts already is text too, so that both ways count each token once.
        sources: segments of the episode whose actions this row counts, in order.
    """

    trace: Trace
    sources: list[int]


def chain_rows(trace: Trace) -> list[ChainRow]:
    """Give an episode's leaf chains as separate rows."""
    parents = {segment.parent for segment in trace.segments}
    counted: set[int] = set()
    rows = []
    for leaf in trace.segments:
        if leaf.id in parents:
            continue
        parts: list[Segment] = []
        sources: list[int] = []
        for index in [*dag.ancestors(trace.parents, leaf.id), leaf.id]:
            segment = trace.segments[index]
            texts = [(trace.segments[mount].tokens, "tool") for mount in segment.mounts]
            fresh = segment.kind == "action" and index not in counted
            texts.append((segment.tokens, "action" if fresh else "tool"))
            if fresh:
                counted.add(index)
                sources.append(index)
            for tokens, kind in texts:
                above = parts[-1].id if parts else None
                # No segment is a prompt: two rows would share it, and it must be computed again.
                parts.append(Segment(len(parts), 0, above, kind, tokens))
        threads = [ThreadRecord(0, None, head=parts[-1].id)]
        name = f"{trace.episode_id} to {leaf.id}"
        row = Trace(name, name, segments=parts, threads=threads).place()
        rows.append(ChainRow(row, sources))
    return rows


def without_reads(trace: Trace) -> Trace:
    """Give the same tree with no mounts, placed anew: rows of text can then be equal to it."""
    segments = [
        Segment(s.id, s.thread, s.parent, s.kind, s.tokens, [], logps=s.logps)
        for s in trace.segments
    ]
    name = f"{trace.episode_id} unread"
    return Trace(name, name, segments=segments, threads=trace.threads).place()


def seen_pairs(plan: AttentionPlan) -> int:
    """Count the pairs of rows that attend."""
    pairs = 0
    for group in plan.groups:
        rows = group.hi - group.lo
        spans = np.concatenate([group.seen_spans, group.mounted_spans])
        pairs += rows * int(np.diff(spans, axis=1).sum()) + rows * (rows + 1) // 2
    return pairs


@dataclass(frozen=True, slots=True)
class UpdateFlops:
    """FLOPs of a forward and backward pass with frozen weights and a LoRA adapter.

    Linear layers and output layer 2 a weight forward and 2 for the gradient of their input; the
    adapter's own weights 2 + 4; attention and the delta rule once forward and twice backward.
    What checkpointing computes again is not counted.
    """

    FORMULA: ClassVar = (
        "FLOPs = T (4 W + 6 A) + 4 d V M + 12 N H D P + 18 R S T: T tokens, W weights of linear "
        "layers, A of the adapter, d hidden size, V vocabulary, M scored tokens, N attention "
        "layers of H heads of D, P pairs that attend, R recurrent layers of S state elements"
    )

    shapes: Shapes
    hidden_size: int
    vocab_size: int
    adapter_weights: int

    @classmethod
    def of(cls, model: Any, shapes: Shapes) -> UpdateFlops:
        """Read the adapter's weights of a PEFT model."""
        adapter = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return cls(shapes, model.config.hidden_size, model.config.vocab_size, adapter)

    def count(self, row: LossRow) -> float:
        """FLOPs of one row."""
        shapes, packed = self.shapes, row.packed
        linear = packed.num_rows * (2 * shapes.product_flops + 6 * self.adapter_weights)
        head = 4 * self.hidden_size * self.vocab_size * len(row.targets)
        attention = 3 * shapes.seen_flops * seen_pairs(packed.layout.plan)
        delta = 3 * 6 * shapes.num_recurrent * shapes.state_elements * packed.num_rows
        return float(linear + head + attention + delta)
