"""Distributions of a generation, where wandb is the tracker; other trackers draw none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from accelerate.utils import gather_object

from octopus_trl.errors import ConfigError
from octopus_trl.trace import Trace
from octopus_trl.train.rows import num_rewinds

PREFIX = "histogram"


def distributions(traces: Sequence[Trace], advantages: Sequence[float]) -> dict[str, list[float]]:
    """Give one value an episode (a turn, for `turn_tokens`) of what a mean would hide."""
    return {
        "reward": [trace.reward for trace in traces if trace.reward is not None],
        "advantage": list(advantages),
        "threads": [float(len(trace.threads)) for trace in traces],
        "mounts": [float(sum(bool(s.mounts) for s in trace.segments)) for trace in traces],
        "rewinds": [float(num_rewinds(trace)) for trace in traces],
        "owned_tokens": [float(trace.num_owned) for trace in traces],
        "turn_tokens": [
            float(len(s.tokens)) for trace in traces for s in trace.segments if s.kind == "action"
        ],
    }


def send(accelerator: Any, report_to: Sequence[str], values: Mapping[str, list[float]]) -> None:
    """Join the values of all ranks and log them with the next step of the wandb run.

    Nothing happens, and no rank waits for another, where wandb is not a tracker.

    Raises:
        ConfigError: wandb is asked for and not installed.
    """
    if "wandb" not in report_to:
        return
    joined = {name: gather_object(list(found)) for name, found in values.items()}
    if not accelerator.is_main_process:
        return
    try:
        wandb = import_module("wandb")
    except ImportError as error:
        raise ConfigError("report_to: wandb needs wandb: pip install 'octopus_trl[train]'") from (
            error
        )
    if wandb.run is None:
        return
    drawn = {f"{PREFIX}/{name}": wandb.Histogram(found) for name, found in joined.items() if found}
    # Not a step of its own: the figures of the step follow.
    wandb.log(drawn, commit=False)
