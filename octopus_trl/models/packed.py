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
from octopus_trl.maths.rotary import shift_positions
from octopus_trl.models.context import LevelRows, Steps
from octopus_trl.models.rotation import inverse_frequencies
from octopus_trl.models.spec import ModelSpec, check_splice
from octopus_trl.shapes import ConvTail, Hidden, Keys, Queries, RecurrentState, Values
from octopus_trl.trace import Trace

MountMode = Literal["live", "detached", "dropped"]
MOUNT_MODES = ("live", "detached", "dropped")


@dataclass(slots=True)
class PackedRow:
    """Tokens of some traces in row order, and where each segment lies.

    Under `position: reencode` there are nodes that are no segment: for each one that mounts, the
    text of its mounts in their order once more, a branch behind the reader's end that is read
    instead of them. Under `rerotate` what is read instead is no node: the keys and values of the
    mounted rows once more, the keys moved. Under `exchange: splice` recurrent layers step through
    what a node mounts just before it.

    Attributes:
        tokens, positions: [T] int64.
        node_of: for each trace, the node of each of its segments; shared prompts share a node.
        parents, mounts, lengths: the merged DAG over nodes; a mount at or past their number is a
            copy of keys.
        layout: order, recurrent schedule and attention plan.
        copied, shifts: [X] int64, the rows whose keys are read as copies, in the order of the
            plan's last rows, and how many positions each key moves.
    """

    tokens: np.ndarray
    positions: np.ndarray
    node_of: list[list[int]]
    parents: list[int | None]
    mounts: list[list[int]]
    lengths: list[int]
    layout: dag.Layout
    copied: np.ndarray
    shifts: np.ndarray

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
    """
    if mounts not in MOUNT_MODES:
        raise ConfigError(f"mounts={mounts!r}: must be one of {MOUNT_MODES}")
    parents: list[int | None] = []
    edges: list[list[int]] = []
    spliced: list[list[int]] = []
    tokens: list[Sequence[int]] = []
    starts: list[int] = []
    moved: list[tuple[int, list[int], int]] = []  # reader, what it reads copies of, how far
    node_of: list[list[int]] = []
    shared: dict[tuple[int | None, int, tuple[int, ...], int], int] = {}

    def add(
        parent: int | None, text: Sequence[int], start: int, read: list[int], through: list[int]
    ) -> int:
        parents.append(parent)
        tokens.append(text)
        starts.append(start)
        edges.append(read)
        spliced.append(through)
        return len(parents) - 1

    for trace in traces:
        if not trace.segments:
            raise TraceError(f"trace {trace.episode_id}: got 0 segments, must be at least 1")
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
            through = read if trace.exchange == "splice" else []
            if read and trace.position == "reencode":
                # Read is a copy behind the reader's end, which nothing continues.
                above = 0 if segment.parent is None else trace.segments[segment.parent].end
                again = [token for other in read for token in tokens[other]]
                read = [add(parent, again, above, [], [])]
            node = add(parent, segment.tokens, segment.start, read, through)
            if read and trace.position == "rerotate":
                last = max(starts[other] + len(tokens[other]) for other in read)
                moved.append((node, read, segment.start - last))
            if key is not None:
                shared[key] = node
            nodes.append(node)
        node_of.append(nodes)
    lengths = [len(part) for part in tokens]
    num = len(parents)
    for copy, (reader, _, _) in enumerate(moved):
        edges[reader] = [num + copy]
    copy_lengths = [sum(lengths[other] for other in read) for _, read, _ in moved]
    layout = dag.layout(
        [*parents, *[None] * len(moved)],
        [*edges, *[[]] * len(moved)],
        [*lengths, *copy_lengths],
        num_copies=len(moved),
        spliced=spliced,
    )
    first = layout.first_row
    copied = [
        np.arange(first[node], first[node] + lengths[node]) for _, read, _ in moved for node in read
    ]
    ids = [np.asarray(tokens[node], dtype=np.int64) for node in layout.order]
    places = [
        np.arange(starts[node], starts[node] + lengths[node], dtype=np.int64)
        for node in layout.order
    ]
    return PackedRow(
        _joined(ids),
        _joined(places),
        node_of,
        parents,
        edges,
        lengths,
        layout,
        _joined(copied),
        np.repeat(np.asarray([far for *_, far in moved], dtype=np.int64), copy_lengths),
    )


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


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
        detach_mounts: cut the gradient from a reader into the producer's keys and values, and into
            the inputs that a splice steps through.
        inv_freq: [E / 2] of the model's positions, None where it has none.
        steps: see `Context`.
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
    inv_freq: Tensor | None = None
    steps: Steps | None = field(init=False)
    input_ids: Tensor = field(init=False)
    position_ids: Tensor = field(init=False)
    levels: list[LevelRows] = field(init=False)
    parent_runs: list[Tensor] = field(init=False)
    plans: dict[bool, dag.AttentionPlan] = field(init=False)
    _copied: Tensor = field(init=False)
    _shifts: Tensor = field(init=False)

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
        layout = self.row.layout
        self.plans = {True: layout.plan}
        if len(self.spec.mount_layers) < len(self.spec.attention_layers):
            self.plans[False] = layout.plan.tree()
        self._copied = torch.from_numpy(self.row.copied).to(self.device)
        self._shifts = torch.from_numpy(self.row.shifts).to(self.device)
        self.steps = None
        if layout.steps is not None and layout.own is not None:
            own = torch.from_numpy(layout.own).to(self.device)
            cut = None
            if self.detach_mounts:
                cut = torch.ones(len(layout.steps), dtype=torch.bool, device=self.device)
                cut[own] = False
            self.steps = Steps(torch.from_numpy(layout.steps).to(self.device), own, cut)

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scale: float) -> Queries:
        """Attend over the DAG; layers outside the mount set see the tree alone."""
        mounts, rows = layer in self.spec.mount_layers, len(q)
        if mounts and len(self._copied):
            q, k, v = self._with_copies(q, k, v)
        out = select("dag_attention", q.device)(
            q,
            k=k,
            v=v,
            plan=self.plans[mounts],
            scale=scale,
            detach_mounts=self.detach_mounts,
        )
        return out[:rows]

    def _with_copies(self, q: Queries, k: Keys, v: Values) -> tuple[Queries, Keys, Values]:
        """Append the keys and values that are read as copies; their queries ask for nothing."""
        keys = k.index_select(0, self._copied)
        if self.inv_freq is not None:
            keys = shift_positions(keys, by=self._shifts, inv_freq=self.inv_freq)
        values = v.index_select(0, self._copied)
        blank = q.new_zeros(len(keys), *q.shape[1:])
        return torch.cat([q, blank]), torch.cat([k, keys]), torch.cat([v, values])

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
    """Run one packed pass and return the log-probabilities [M] of the targets.

    Raises:
        ConfigError: the row holds a splice or moved keys, and the model cannot run them.
    """
    context: Any = make_context(
        PackedContext, model, spec, row, rows, targets, temperature, detach_mounts
    )
    return model(octopus=context).logps


def make_context(
    kind: type[PackedContext],
    model: nn.Module,
    spec: ModelSpec,
    row: PackedRow,
    rows: np.ndarray,
    targets: np.ndarray,
    temperature: float = 1.0,
    detach_mounts: bool = False,
) -> PackedContext:
    """Make the context of one pass, with what moved keys and splices need of the model.

    Raises:
        ConfigError: the row holds a splice or moved keys, and the model cannot run them.
    """
    device = next(model.parameters()).device
    if row.layout.steps is not None:
        check_splice(spec)
    return kind(
        row,
        spec,
        device,
        torch.from_numpy(rows).to(device),
        torch.from_numpy(targets).to(device),
        temperature,
        detach_mounts,
        inverse_frequencies(model) if len(row.copied) else None,
    )


def _check_edges(segment: Any, index: int) -> None:
    edges = [*segment.mounts, *([] if segment.parent is None else [segment.parent])]
    for edge in edges:
        if not 0 <= edge < index:
            raise TraceError(f"segment {index}: edge: got {edge}, must be an id below {index}")
    if not segment.tokens:
        raise TraceError(f"segment {index}: length: got 0, must be at least 1 token")
