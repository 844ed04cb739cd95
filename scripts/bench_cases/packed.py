"""Forward and backward of an episode in one packed row, against its branches as rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from octopus_trl import Trace, score_traces
from octopus_trl.trace import Segment, ThreadRecord

from .clock import median_s
from .setting import Line, Setting, WrongResult

TRUNK, LENGTH = 256, 64  # tokens


def run(setting: Setting) -> Iterator[Line]:
    """Yield how many times faster the packed row is; the tiny model only, `train` has the sizes."""
    if setting.model != "tiny":
        yield Line.not_run("packed", f"made for the tiny model, not {setting.model}: see train")
        return
    model = setting.load().requires_grad_(True)
    for branches in (3, 8):
        tree = fan(trunk=TRUNK, branches=branches, length=LENGTH, mounts=False)
        chains = leaf_chains(tree)
        with torch.no_grad():
            packed = score_traces(model, [tree])[0]
            apart = score_traces(model, chains)
        for leaf, chain in enumerate(apart, start=1):
            error = float((packed[leaf] - chain[1]).abs().max())
            if error > 1e-4:
                raise WrongResult(f"packed and separate log-probabilities differ by {error}")
        episode = fan(trunk=TRUNK, branches=branches, length=LENGTH, mounts=True)
        rows = leaf_chains(episode)
        ours = median_s(partial(backward, model, [episode]))
        theirs = median_s(partial(backward, model, rows))
        ratio = sum(sum(row.lengths) for row in rows) / sum(episode.lengths)
        yield Line.rate(
            f"{branches} branches of {LENGTH} on {TRUNK} tokens, each mounts its neighbour",
            theirs / ours,
            "times faster",
            ratio,
            baseline=("branches as separate rows, s", theirs),
        )
    model.requires_grad_(False)


def fan(*, trunk: int, branches: int, length: int, mounts: bool) -> Trace:
    """A trunk and its branches, each an action behind one tool token that mounts the branch
    before.
    """
    rng = np.random.default_rng(0)
    segments = [Segment(0, 0, None, "prompt", rng.integers(0, 1000, trunk).tolist())]
    threads = [ThreadRecord(0, None, head=0)]
    for branch in range(1, branches + 1):
        tokens = rng.integers(0, 1000, length).tolist()
        edge = [branch - 1] if mounts and branch > 1 else []
        segments.append(Segment(branch, branch, 0, "tool", tokens, edge))
        threads.append(ThreadRecord(branch, 0, head=branch))
    return Trace("fan", "fan", segments=segments, threads=threads).place()


def leaf_chains(trace: Trace) -> list[Trace]:
    """Each branch as its own row; what it mounted goes before it as text without loss."""
    rows = []
    for segment in trace.segments[1:]:
        read = [token for mount in segment.mounts for token in trace.segments[mount].tokens]
        prefix = trace.segments[0].tokens + read
        # A root of kind tool is not shared between traces, so the prefix is really computed again.
        parts = [Segment(0, 0, None, "tool", prefix), Segment(1, 0, 0, "tool", segment.tokens)]
        threads = [ThreadRecord(0, None, head=1)]
        rows.append(Trace(f"row {segment.id}", "fan", segments=parts, threads=threads).place())
    return rows


def backward(model: Any, traces: list[Trace]) -> None:
    """Score the last segment of each branch and take the gradient."""
    scores = score_traces(model, traces)
    leaves = scores[0][1:] if len(traces) == 1 else [score[1] for score in scores]
    torch.cat(leaves).mean().backward()
    model.zero_grad(set_to_none=True)
