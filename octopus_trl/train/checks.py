"""Traces that this run may train on: drawn by its own weights, in its own vocabulary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from octopus_trl.errors import ConfigError, StaleVersion
from octopus_trl.models.spec import ModelSpec
from octopus_trl.trace import Trace
from octopus_trl.train.packing import check_fit

MARK = "tokenizer"  # key of a trace's `meta`


def tokenizer_mark(tokenizer: Any) -> str:
    """Give a short hash of a tokenizer's vocabulary: equal ones give ids the same meaning."""
    words = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()


def mark_traces(traces: Sequence[Trace], mark: str) -> None:
    """Note on each trace whose ids it holds."""
    for trace in traces:
        trace.meta[MARK] = mark


def check_traces(
    traces: Sequence[Trace], *, oldest: int, newest: int, mark: str, spec: ModelSpec
) -> None:
    """Refuse traces of other weights, another vocabulary or another mount set.

    Args:
        oldest, newest: policy versions (optimizer steps) that may be trained on now.
        mark: of this run's tokenizer; a trace without a mark is held to the vocabulary's size.
    Raises:
        StaleVersion: a trace was drawn by a policy that is too old, or one that is yet to come.
        ConfigError: another tokenizer wrote it, or it mounts other layers than the model does.
    """
    for trace in traces:
        if not oldest <= trace.policy_version <= newest:
            raise StaleVersion(
                f"trace {trace.episode_id}: policy_version {trace.policy_version}, this update "
                f"takes {oldest}..{newest}: generate it again with the present weights"
            )
        theirs = trace.meta.get(MARK, mark)
        if theirs != mark:
            raise ConfigError(
                f"trace {trace.episode_id}: written with the tokenizer {theirs}, the run has "
                f"{mark}: its ids mean other words; use that tokenizer or generate it again"
            )
    check_fit(traces, spec)
