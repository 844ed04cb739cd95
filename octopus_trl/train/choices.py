"""Likelihood and greedy choice of what a trace ends with, for measuring what a reader knows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from octopus_trl.errors import TraceError
from octopus_trl.maths.dag import NO_ROW
from octopus_trl.models import spec_of
from octopus_trl.models.choices import run_choices
from octopus_trl.models.packed import pack
from octopus_trl.trace import Trace
from octopus_trl.train.packing import check_fit, node_tokens, split_rows

ROW_TOKENS = 4096  # packed tokens of one row


def score_last(
    model: nn.Module, traces: Sequence[Trace], *, max_row_tokens: int = ROW_TOKENS
) -> list[tuple[list[float], list[int]]]:
    """Score the last segment of each trace and tell what the model would have said greedily.

    Prompts that traces share from their root on run once. If the most likely token is the given
    one everywhere, greedy decoding would write exactly this segment.

    Args:
        model: a prepared model; no gradient is kept.
        max_row_tokens: packed tokens of a row, before prompts are shared; a trace is never split.
    Returns:
        For each trace, log-probabilities (natural log, float64) and most likely tokens, one for
        each token of its last segment.
    Raises:
        ConfigError: the model is not prepared, or cannot run a trace.
        TraceError: a last segment has no parent whose last token would predict it.
    """
    spec = spec_of(model)
    said: list[tuple[list[float], list[int]]] = []
    for part in split_rows(traces, max_row_tokens):
        check_fit(part, spec)
        row = pack(part)
        places, targets = [], []
        for index, trace in enumerate(part):
            last = trace.segments[-1]
            predictors = row.predictors(index, last.id)
            if predictors[0] == NO_ROW:
                raise TraceError(f"segment {last.id}: parent: got None, its first token needs one")
            places.append(predictors)
            targets.append(node_tokens(row, row.node_of[index][last.id]))
        logps, choices = run_choices(
            model, spec, row, np.concatenate(places), np.concatenate(targets)
        )
        lengths = [len(each) for each in places]
        for scores, chosen in zip(logps.cpu().split(lengths), choices.cpu().split(lengths)):
            said.append((scores.tolist(), chosen.tolist()))
    return said
