"""From traces to packed rows and back to log-probabilities per segment."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

import numpy as np
import torch
from torch import Tensor, nn

from octopus_trl.errors import ConfigError, TraceError
from octopus_trl.maths.dag import NO_ROW
from octopus_trl.models import spec_of
from octopus_trl.models.packed import (
    MOUNT_MODES,
    MountMode,
    PackedRow,
    pack,
    packed_tokens,
    run_packed,
)
from octopus_trl.models.spec import ModelSpec
from octopus_trl.trace import Trace

MAX_ROW_TOKENS = 131_072  # packed tokens of one row that score_traces builds by itself


def score_traces(
    model: nn.Module,
    traces: Sequence[Trace],
    *,
    mounts: MountMode = "live",
    temperature: float = 1.0,
) -> list[list[Tensor]]:
    """Score every token of every segment through the packed pass that trains.

    log p(x_t) of softmax(logits / temperature), where the first token of a segment is predicted by
    the last token of its parent; a root's first token has none and is NaN.

    Args:
        model: a prepared model; differentiable where grad is enabled.
        mounts: "live" edges, "detached" ones (no gradient into the producer), or "dropped" ones
            (edges removed, recorded positions kept).
        temperature: divides the logits, above 0 and finite.
    Returns:
        For each trace and segment, float32 [len(segment)] in natural log.
    Raises:
        ConfigError: the model is not prepared, or a setting is outside its range.
        TraceError: a trace is none, an edge points forward or a segment is empty.
    """
    if mounts not in MOUNT_MODES:
        raise ConfigError(f"mounts={mounts!r}: must be one of {MOUNT_MODES}")
    number = isinstance(temperature, Real) and not isinstance(temperature, bool)
    if not number or not 0 < temperature < float("inf"):
        raise ConfigError(
            f"temperature={temperature!r}: must be above 0 and finite to divide the logits"
        )
    if isinstance(traces, Trace) or not isinstance(traces, Iterable):
        raise TraceError(f"traces={reprlib.repr(traces)}: must be a list of traces, [trace] of one")
    traces = list(traces)
    for trace in traces:
        check_record(trace)
    spec = spec_of(model)
    scores: list[list[Tensor]] = []
    for part in split_rows(traces, MAX_ROW_TOKENS):
        check_fit(part, spec)
        row = pack(part, mounts=mounts)
        scores.extend(_score_row(model, spec, row, part, mounts, temperature))
    return scores


def _score_row(
    model: nn.Module,
    spec: ModelSpec,
    row: PackedRow,
    traces: Sequence[Trace],
    mounts: MountMode,
    temperature: float,
) -> list[list[Tensor]]:
    """Score all nodes of a row once, then hand each segment its node's part."""
    nodes = range(len(row.parents))
    predictors = [row.layout.predictor(row.parents, row.lengths, node) for node in nodes]
    rows = np.concatenate(predictors)
    targets = np.concatenate([node_tokens(row, node) for node in nodes])
    known = rows != NO_ROW
    logps = run_packed(
        model,
        spec,
        row,
        rows[known],
        targets[known],
        temperature=temperature,
        detach_mounts=mounts == "detached",
    )
    full = logps.new_full((len(rows),), float("nan"))
    full = full.index_put((torch.from_numpy(np.flatnonzero(known)).to(logps.device),), logps)
    parts = full.split(row.lengths)
    return [
        [parts[row.node_of[trace][segment.id]] for segment in traces[trace].segments]
        for trace in range(len(traces))
    ]


def node_tokens(row: PackedRow, node: int) -> np.ndarray:
    """Token ids of one node of a row."""
    first = row.layout.first_row[node]
    return row.tokens[first : first + row.lengths[node]]


def split_rows(traces: Sequence[Trace], max_tokens: int) -> list[list[Trace]]:
    """Split traces into consecutive rows of at most `max_tokens`; one trace is never split."""
    rows: list[list[Trace]] = []
    used = max_tokens + 1
    for trace in traces:
        size = packed_tokens(trace)
        if used + size > max_tokens:
            rows.append([])
            used = 0
        rows[-1].append(trace)
        used += size
    return rows


def check_record(trace: Trace) -> None:
    """Refuse what is no trace, or holds what a packed pass would misread.

    Positions count as recorded and who may mount does not matter here; `Trace.check` has every
    rule.

    Raises:
        TraceError: no trace, a segment's id is not its place, or an id, an edge, a start or a token
            is no integer.
    """
    if not isinstance(trace, Trace):
        raise TraceError(f"{reprlib.repr(trace)} is no trace: Trace.from_dict reads a record")
    for index, segment in enumerate(trace.segments):
        found = {"id": [segment.id], "start": [segment.start], "tokens": segment.tokens}
        found["parent"] = [] if segment.parent is None else [segment.parent]
        found["mounts"] = segment.mounts
        for name, values in found.items():
            kinds = set(map(type, values)) if isinstance(values, Sequence) else {None}
            if bool in kinds or not all(kind and issubclass(kind, Integral) for kind in kinds):
                raise TraceError(
                    f"trace {trace.episode_id}, segment {index}: {name}: got "
                    f"{reprlib.repr(values)}, must hold integers only"
                )
        if segment.id != index or segment.start < 0:
            raise TraceError(
                f"trace {trace.episode_id}, segment {index}: id and start: got {segment.id} and "
                f"{segment.start}, must be {index} and at least 0"
            )


def check_fit(traces: Sequence[Trace], spec: ModelSpec) -> None:
    """Refuse traces that another model or mount set produced.

    Raises:
        ConfigError: a token id is outside the vocabulary, or the mount sets differ.
    """
    for trace in traces:
        layers = trace.mount_layers
        if layers is not None and tuple(sorted(layers)) != spec.mount_layers:
            raise ConfigError(
                f"trace {trace.episode_id}: mounted layers {sorted(layers)}, the model mounts "
                f"{list(spec.mount_layers)}: call prepare_model with the trace's mount_layers"
            )
        for segment in trace.segments:
            if segment.tokens and not 0 <= min(segment.tokens) <= max(segment.tokens) < (
                spec.vocab_size
            ):
                raise ConfigError(
                    f"trace {trace.episode_id}, segment {segment.id}: token ids "
                    f"{min(segment.tokens)}..{max(segment.tokens)} exceed the vocabulary of "
                    f"{spec.vocab_size}: score it with the tokenizer's own model"
                )
