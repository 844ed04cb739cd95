"""What a generation leaves behind: its traces on disk and its figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octopus_trl.errors import ConfigError
from octopus_trl.maths import dag
from octopus_trl.trace import Trace
from octopus_trl.trace_files import read_traces, write_traces
from octopus_trl.train.meter import Meter
from octopus_trl.train.rows import logical_tokens, num_rewinds, rewound_segments

TRACES = "traces"
EPISODE_MEANS = tuple(
    f"episode/{name}"
    for name in (
        "threads",
        "branches",
        "depth",
        "forks",
        "mounts",
        "mounted_tokens",
        "rewinds",
        "turns",
        "refused_calls",
        "explored_tokens",
        "active_tokens",
        "prompt_tokens_a_turn",
        "owned_tokens",
        "committed",
        "truncated",
        "failed_threads",
    )
)
# Counters of the engine that a step reports as what this generation added to them.
ENGINE_COUNTERS = (
    "prefilled",
    "reused",
    "replayed",
    "re_prefilled",
    "decoded",
    "decode_steps",
    "prefill_passes",
    "forks",
    "mounts",
    "rewinds",
    "evicted_states",
)
ENGINE_SECONDS = ("open", "extend", "step", "fork", "mount", "rewind", "sleep", "wake")
ENGINE_SUMS = (
    *(f"engine/{name}" for name in (*ENGINE_COUNTERS, "bytes_copied")),
    *(f"engine/{name}_s" for name in ENGINE_SECONDS),
)
GENERATION_MEANS = (
    *EPISODE_MEANS,
    *ENGINE_SUMS,
    "engine/hit_rate",
    "packing/dedup_ratio",
    "packing/shared_tokens",
    "speed/sampled_tokens_per_s",
)
GENERATION_PEAKS = ("engine/peak_pages", "engine/peak_slots")


def measure_episodes(meter: Meter, traces: Sequence[Trace]) -> None:
    """Add the figures of each episode: means over episodes, the dedup ratio over all tokens."""
    for trace in traces:
        kinds = [str(event.get("type")) for event in trace.events]
        tree = dag.ancestor_matrix(trace.parents)
        mounted = dag.mounted_matrix(trace.parents, trace.mounts) & ~tree
        outcomes = [
            outcome
            for event in trace.events
            for _, outcome in (event.get("calls") or [])
            if event.get("type") == "turn"
        ]
        lengths = np.asarray(trace.lengths)
        left = sum(int(lengths[segment]) for segment in rewound_segments(trace))
        turns = [segment.id for segment in trace.segments if segment.kind == "action"]
        figures = {
            "threads": len(trace.threads),
            "branches": int((~tree.any(axis=0)).sum()),
            "depth": depth_of(trace),
            "forks": sum(thread.parent is not None for thread in trace.threads),
            "mounts": kinds.count("read"),
            "mounted_tokens": sum(
                len(trace.segments[mount].tokens)
                for mount in range(len(trace.segments))
                if mounted[:, mount].any()
            ),
            "rewinds": num_rewinds(trace),
            "turns": len(turns),
            "refused_calls": sum(outcome != "ok" for outcome in outcomes),
            "explored_tokens": int(lengths.sum()),
            "active_tokens": int(lengths.sum()) - left,
            "owned_tokens": trace.num_owned,
            "committed": not trace.truncated,
            "truncated": trace.truncated,
            "failed_threads": sum(thread.status == "failed" for thread in trace.threads),
        }
        for name, value in figures.items():
            meter.add(f"episode/{name}", value, 1)
        prompts = int(((tree | mounted)[turns].astype(np.int64) @ lengths).sum())
        meter.add("episode/prompt_tokens_a_turn", prompts, len(turns))
        logical = logical_tokens(trace)
        meter.add("packing/dedup_ratio", logical, sum(trace.lengths))
        meter.add("packing/shared_tokens", logical - sum(trace.lengths), 1)


def depth_of(trace: Trace) -> int:
    """Count the forks above the deepest thread."""
    depths: dict[int, int] = {}
    for thread in trace.threads:  # a thread is younger than the one that forked it
        depths[thread.id] = 0 if thread.parent is None else depths[thread.parent] + 1
    return max(depths.values(), default=0)


def measure_engine(meter: Meter, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Add what a generation added to the engine's counters.

    Args:
        before: what `Engine.stats` gave after the generation before this one; empty for none.
    """
    grown = {name: after[name] - before.get(name, 0) for name in ENGINE_COUNTERS}
    for name, value in grown.items():
        meter.add(f"engine/{name}", value, 1)
    copied = sum(after["bytes_copied"].values())
    copied -= sum(before.get("bytes_copied", {}).values())
    meter.add("engine/bytes_copied", copied, 1)
    for name in ENGINE_SECONDS:
        spent = after["seconds"].get(name, 0.0) - before.get("seconds", {}).get(name, 0.0)
        meter.add(f"engine/{name}_s", spent, 1)
    context = after["context_tokens"] - before.get("context_tokens", 0)
    computed = sum(after["misses"].values()) - sum(before.get("misses", {}).values())
    meter.add("engine/hit_rate", max(0, context - computed), context)
    for name in ("peak_pages", "peak_slots"):
        meter.peak(f"engine/{name}", after[name])


def write_generation(folder: Path, name: str, rank: int, world: int, traces: list[Trace]) -> Path:
    """Write the traces of one generation as one file, whole or not at all.

    A resumed run draws the same episodes again, so it replaces the file of its step.
    """
    path = folder / TRACES / (f"{name}.jsonl" if world == 1 else f"{name}-rank_{rank}.jsonl")
    write_traces(path, traces)
    return path


def read_generations(output_dir: str | Path) -> list[Trace]:
    """Read every trace that a run has written, in order of steps and ranks.

    Raises:
        ConfigError: the run has written none.
    """
    files = sorted((Path(output_dir) / TRACES).glob("step_*.jsonl"))
    if not files:
        raise ConfigError(f"{output_dir}: no traces under {TRACES}/; set trace_every to at least 1")
    return [trace for file in files for trace in read_traces(file, check=False)]


def text_of(trace: Trace, decode: Callable[[list[int]], str]) -> str:
    """Lay a trace out as text, a block for each segment, so that it can be read in a pager."""
    end = "truncated" if trace.truncated else "committed"
    lines = [f"episode {trace.episode_id}  reward {trace.reward}  {end}"]
    for segment in trace.segments:
        mounts = f"  reads {segment.mounts}" if segment.mounts else ""
        lines.append(
            f"[{segment.id}] thread {segment.thread} {segment.kind} after {segment.parent} "
            f"at {segment.start}{mounts}"
        )
        lines.extend(f"    {line}" for line in decode(segment.tokens).splitlines() or [""])
    return "\n".join(lines) + "\n"
