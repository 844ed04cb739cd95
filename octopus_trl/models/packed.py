"""The packed pass: whole episodes as one row [1, T], each token once, mounts as edges.

A row holds the segments of one or several traces. Segments that several traces share from their
root on (the prompt of a group) are stored once. Attention sees a segment matrix, recurrent layers
go level by level over branch points; gradients flow back through both hand-overs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from octopus_trl.errors import ConfigError, TraceError
from octopus_trl.kernels import select
from octopus_trl.maths import dag
from octopus_trl.maths.logps import token_logps
from octopus_trl.models.context import LevelRows
from octopus_trl.models.spec import ModelSpec
from octopus_trl.shapes import ConvTail, Hidden, Keys, Queries, RecurrentState, Values
from octopus_trl.trace import Trace

MountMode = Literal["live", "detached", "dropped"]
MOUNT_MODES = ("live", "detached", "dropped")


@dataclass(slots=True)
class PackedRow:
    """Tokens of some traces in row order, and where each segment lies.

    Under `position: reencode` there are nodes that are no segment: for each one that mounts, the
    text of its mounts in their order once more, a branch behind the reader's end that is read
    instead of them.

    Attributes:
        tokens, positions: [T] int64.
        node_of: for each trace, the node of each of its segments; shared prompts share a node.
        parents, mounts, lengths: the merged DAG over nodes.
        layout: order, recurrent schedule and attention plan.
    """

    tokens: np.ndarray
    positions: np.ndarray
    node_of: list[list[int]]
    parents: list[int | None]
    mounts: list[list[int]]
    lengths: list[int]
    layout: dag.Layout

    @property
    def num_rows(self) -> int:
        """T: unique tokens."""
        return self.layout.num_rows

    def predictors(self, trace: int, segment: int) -> np.ndarray:
        """Rows that predict the tokens of a segment, `NO_ROW` for a root's first token."""
        return self.layout.predictor(self.parents, self.lengths, self.node_of[trace][segment])


def pack(traces: Sequence[Trace], *, mounts: MountMode = "live") -> PackedRow:
    """Merge traces into one row.

    Args:
        mounts: "dropped" removes the edges and keeps the recorded positions.
    Raises:
        TraceError: an edge points forward or a segment is empty.
        ConfigError: a trace uses an exchange that the packed pass does not run.
    """
    if mounts not in MOUNT_MODES:
        raise ConfigError(f"mounts={mounts!r}: must be one of {MOUNT_MODES}")
    parents: list[int | None] = []
    edges: list[list[int]] = []
    tokens: list[Sequence[int]] = []
    starts: list[int] = []
    node_of: list[list[int]] = []
    shared: dict[tuple[int | None, int, tuple[int, ...], int], int] = {}
    for trace in traces:
        _refuse(trace)
        nodes: list[int] = []
        # Twins within one trace stay two segments: one may read the other through a mount.
        twins: Counter[tuple[int | None, int, tuple[int, ...]]] = Counter()
        for segment in trace.segments:
            _check_edges(segment, len(nodes))
            parent = None if segment.parent is None else nodes[segment.parent]
            key = None
            if segment.kind == "prompt" and not segment.mounts:
                text = (parent, segment.start, tuple(segment.tokens))
                key = (*text, twins[text])
                twins[text] += 1
                if key in shared:
                    nodes.append(shared[key])
                    continue
            read = [] if mounts == "dropped" else [nodes[m] for m in segment.mounts]
            if read and trace.position == "reencode":
                # Read is a copy behind the reader's end, which nothing continues.
                above = 0 if segment.parent is None else trace.segments[segment.parent].end
                parents.append(parent)
                edges.append([])
                tokens.append([token for other in read for token in tokens[other]])
                starts.append(above)
                read = [len(parents) - 1]
            node = len(parents)
            if key is not None:
                shared[key] = node
            parents.append(parent)
            edges.append(read)
            tokens.append(segment.tokens)
            starts.append(segment.start)
            nodes.append(node)
        node_of.append(nodes)
    lengths = [len(part) for part in tokens]
    layout = dag.layout(parents, edges, lengths)
    ids = [np.asarray(tokens[node], dtype=np.int64) for node in layout.order]
    places = [
        np.arange(starts[node], starts[node] + lengths[node], dtype=np.int64)
        for node in layout.order
    ]
    return PackedRow(
        np.concatenate(ids) if ids else np.empty(0, dtype=np.int64),
        np.concatenate(places) if places else np.empty(0, dtype=np.int64),
        node_of,
        parents,
        edges,
        lengths,
        layout,
    )


def packed_tokens(trace: Trace, segments: Sequence[int] | None = None) -> int:
    """Count the rows that a trace takes, or some of its segments do, before prompts are shared."""
    lengths = trace.lengths
    held = range(len(lengths)) if segments is None else segments
    total = sum(lengths[segment] for segment in held)
    if trace.position == "reencode":
        total += sum(lengths[m] for segment in held for m in trace.segments[segment].mounts)
    return total


@dataclass
class PackedOutput(ModelOutput):
    """Output of a packed pass.

    Attributes:
        logps: [M] float32, log-probabilities of the asked targets.
    """

    logps: Tensor | None = None


@dataclass
class PackedContext:
    """Context of one packed pass (see `Context`).

    Attributes:
        rows, targets: [M] int64, hidden rows that predict and the token ids they predict.
        detach_mounts: cut the gradient from a reader into the producer's keys and values.
        parent_runs: for each level [R] int64, the run of the level above that each run continues.
        plans: what attention layers see, with mounts and where some do not mount without; one
            object for all layers and for what checkpointing computes again.
    """

    row: PackedRow
    spec: ModelSpec
    device: torch.device
    rows: Tensor
    targets: Tensor
    temperature: float = 1.0
    detach_mounts: bool = False
    input_ids: Tensor = field(init=False)
    position_ids: Tensor = field(init=False)
    levels: list[LevelRows] = field(init=False)
    parent_runs: list[Tensor] = field(init=False)
    plans: dict[bool, dag.AttentionPlan] = field(init=False)

    def __post_init__(self) -> None:
        self.input_ids = torch.from_numpy(self.row.tokens).to(self.device)[None]
        self.position_ids = torch.from_numpy(self.row.positions).to(self.device)[None]
        self.levels, self.parent_runs = [], []
        for level in self.row.layout.levels:
            parents = torch.as_tensor(level.parent_run, dtype=torch.int64, device=self.device)
            self.parent_runs.append(parents)
            bounds = np.concatenate([[0], np.cumsum(level.lengths)])
            cu_seqlens = torch.as_tensor(bounds, dtype=torch.int64, device=self.device)
            single = all(length == 1 for length in level.lengths)
            self.levels.append(LevelRows(level.lo, level.hi, cu_seqlens, single))
        plan = self.row.layout.plan
        self.plans = {True: plan}
        if len(self.spec.mount_layers) < len(self.spec.attention_layers):
            self.plans[False] = plan.without_mounts()

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scale: float) -> Queries:
        """Attend over the DAG; layers outside the mount set see the tree alone."""
        return select("dag_attention", q.device)(
            q,
            k=k,
            v=v,
            plan=self.plans[layer in self.spec.mount_layers],
            scale=scale,
            detach_mounts=self.detach_mounts,
        )

    def carry(self, layer: int, tail_dtype: torch.dtype) -> PackedCarry:
        """Start a recurrent layer from zeros at every root."""
        return PackedCarry(self, tail_dtype)

    def finish(self, hidden: Hidden, head: nn.Module) -> PackedOutput:
        """Score the targets in chunks; full logits never exist."""
        logps = token_logps(
            hidden,
            head=head,
            rows=self.rows,
            targets=self.targets,
            temperature=self.temperature,
        )
        return PackedOutput(logps=logps)


class PackedCarry:
    """States from one level of branching to the next, differentiable."""

    def __init__(self, context: PackedContext, tail_dtype: torch.dtype) -> None:
        self._context = context
        self._dtype = tail_dtype
        self._tail: Tensor | None = None
        self._state: Tensor | None = None

    def load(self, level: int) -> tuple[ConvTail, RecurrentState]:
        """Give each run its parent's final tail and state, zeros for roots."""
        context = self._context
        parents = context.parent_runs[level]
        if self._tail is None or self._state is None:
            spec = context.spec
            wide = torch.float64 if self._dtype == torch.float64 else torch.float32
            runs = len(parents)
            return (
                torch.zeros(runs, *spec.tail_shape, dtype=self._dtype, device=context.device),
                torch.zeros(runs, *spec.state_shape, dtype=wide, device=context.device),
            )
        return self._tail.index_select(0, parents), self._state.index_select(0, parents)

    def store(self, level: int, tail: ConvTail, state: RecurrentState) -> None:
        """Keep a level's ends for the runs that continue them."""
        self._tail, self._state = tail, state


def run_packed(
    model: nn.Module,
    spec: ModelSpec,
    row: PackedRow,
    rows: np.ndarray,
    targets: np.ndarray,
    *,
    temperature: float = 1.0,
    detach_mounts: bool = False,
) -> Tensor:
    """Run one packed pass and return the log-probabilities [M] of the targets."""
    device = next(model.parameters()).device
    context: Any = PackedContext(
        row,
        spec,
        device,
        torch.from_numpy(rows).to(device),
        torch.from_numpy(targets).to(device),
        temperature,
        detach_mounts,
    )
    return model(octopus=context).logps


def _check_edges(segment: Any, index: int) -> None:
    edges = [*segment.mounts, *([] if segment.parent is None else [segment.parent])]
    for edge in edges:
        if not 0 <= edge < index:
            raise TraceError(f"segment {index}: edge: got {edge}, must be an id below {index}")
    if not segment.tokens:
        raise TraceError(f"segment {index}: length: got 0, must be at least 1 token")


def _refuse(trace: Trace) -> None:
    if not trace.segments:
        raise TraceError(f"trace {trace.episode_id}: got 0 segments, must be at least 1")
    if trace.exchange == "splice" or trace.position == "rerotate":
        raise ConfigError(
            f"trace {trace.episode_id}: exchange={trace.exchange!r}, position={trace.position!r}: "
            "the packed pass runs mounts of keys as they are; use exchange mount, transcript or "
            "summary with position jump, unshifted or reencode"
        )
