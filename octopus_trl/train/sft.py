"""Warm start: maximum likelihood of the action tokens of expert traces, in the packed pass.

loss = −(1/M) Σ over the M owned tokens of a row of log p(token), mounted spans included in what a
reader sees, exactly as in GRPO. Rows are made by the data loader's workers from a seed and a step
number, so a resumed run sees the rows that an uninterrupted one would have seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from octopus_trl.errors import ConfigError
from octopus_trl.models import spec_of
from octopus_trl.models.lean_layers import lean_layers
from octopus_trl.models.packed import run_packed
from octopus_trl.trace import Trace
from octopus_trl.train.card import Card
from octopus_trl.train.hub import HubPush
from octopus_trl.train.kernel_check import check_kernels, compute_dtype
from octopus_trl.train.ranges import check_seeds
from octopus_trl.train.resume import StagedCheckpoints
from octopus_trl.train.rows import LossRow, Tree, build_row

Mixture = Callable[[np.random.Generator, float], Trace]


@dataclass
class OctopusSFTConfig(TrainingArguments):
    """Settings of a warm start; every field of `TrainingArguments` keeps its meaning."""

    pack_tokens: int = field(
        default=16_384,
        metadata={"help": "Most unique tokens of one packed row (one step on one device)."},
    )
    decay_log_uniform: bool = field(
        default=True,
        metadata={
            "help": "Initialise the decay of GDN layers for memory: dt log-uniform in 0.001..0.1, "
            "A uniform in 1..16 (fla's initialisation); transformers' forgets in a token or two."
        },
    )

    fused_layers: bool = field(
        default=True,
        metadata={
            "help": "On a GPU, run norms, SwiGLU and adapters of an update in one kernel each way."
        },
    )
    stop_after_s: float | None = field(
        default=None,
        metadata={"help": "Seconds after which the run ends in good order; None: never."},
    )
    push_attempts: int = field(
        default=3, metadata={"help": "Tries of each push to the hub; none is fatal."}
    )
    push_wait_s: float = field(
        default=5.0,
        metadata={"help": "Seconds before the second try of a push, doubled for each later one."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seeds(self.seed, self.data_seed)
        if self.pack_tokens < 1:
            raise ConfigError(f"pack_tokens={self.pack_tokens}: must be at least 1 token")
        if self.per_device_train_batch_size != 1:
            raise ConfigError(
                f"per_device_train_batch_size={self.per_device_train_batch_size}: must be 1, a row "
                "is already a batch of traces; set pack_tokens"
            )
        if self.max_steps < 1:
            raise ConfigError(f"max_steps={self.max_steps}: must be at least 1, rows are endless")
        if self.push_attempts < 1:
            raise ConfigError(f"push_attempts={self.push_attempts}: must be at least 1")
        if not 0 <= self.push_wait_s < float("inf"):
            raise ConfigError(f"push_wait_s={self.push_wait_s}: must be at least 0 and finite")
        self.remove_unused_columns = False


@dataclass(slots=True)
class SFTRow:
    """A packed row, and which kind of trace each of its M owned tokens belongs to.

    Attributes:
        source: [M] int64, index into `sources`.
    """

    row: LossRow
    source: npt.NDArray[np.int64]
    sources: list[str]


class RowDataset(Dataset[SFTRow]):
    """Rows drawn from a mixture of traces, row i from (seed, i) alone.

    Args:
        mixture: draws one trace from a generator and the progress of the run in [0, 1); the trace's
            `meta["source"]` names its kind.
    """

    def __init__(self, mixture: Mixture, *, num_rows: int, pack_tokens: int, seed: int) -> None:
        self._mixture = mixture
        self._num_rows = num_rows
        self._pack_tokens = pack_tokens
        self._seed = seed

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> SFTRow:
        rng = np.random.default_rng((self._seed, index))
        progress = index / self._num_rows
        traces: list[Trace] = []
        used = 0
        while True:
            trace = self._mixture(rng, progress)
            size = sum(trace.lengths)
            if size > self._pack_tokens:
                raise ConfigError(
                    f"a trace of {size} tokens does not fit pack_tokens={self._pack_tokens}: raise "
                    "it, a DAG is never split"
                )
            if used + size > self._pack_tokens:
                break
            traces.append(trace)
            used += size
        row = build_row([Tree(trace, 0.0) for trace in traces], mounts="live")
        names = [str(trace.meta.get("source", "expert")) for trace in traces]
        sources = sorted(set(names))
        kind = np.asarray([sources.index(name) for name in names], dtype=np.int64)
        return SFTRow(row, kind[row.tree_of_token], sources)


class OctopusSFTTrainer(HubPush, StagedCheckpoints, Card, Trainer):
    """`transformers.Trainer` whose loss is the packed pass over one row of traces.

    Its checkpoints are whole or absent and its pushes never end a run, as those of GRPO
    (`checkpoint.py`, `hub.py`).
    """

    _tag_names = ["sft", "octopus"]  # noqa: RUF012 - as TRL spells it
    _name = "Octopus SFT"
    _trained_by = "maximum likelihood of the sampled tokens of expert episodes"
    reward_func_names: list[str] = []  # noqa: RUF012

    def __init__(self, model: nn.Module, args: OctopusSFTConfig, **kwargs: Any) -> None:
        self._spec = spec_of(model)
        self._recent: dict[str, list[Tensor]] = {}
        super().__init__(model, args, data_collator=lambda batch: {"row": batch[0]}, **kwargs)
        check_kernels(model, self.accelerator.device, compute_dtype(args, model))
        if args.stop_after_s is not None:
            self.add_callback(StopAfter(args.stop_after_s))

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run one forward and backward pass, its layers with less traffic."""
        with lean_layers(self.model, fused=self.args.fused_layers):
            return super().training_step(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Mean negative log-probability of a row's owned tokens, in nats."""
        item: SFTRow = inputs["row"]
        row = item.row
        logps = run_packed(model, self._spec, row.packed, row.rows, row.targets)
        self._note(item, logps.detach())
        loss = -logps.mean()
        return (loss, {"logps": logps}) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add, for each kind of trace, the mean NLL and the share of tokens with p > 1/2."""
        for name, values in self._recent.items():
            logs[name] = float(torch.stack(values).nanmean())
        self._recent.clear()
        super().log(logs, start_time)

    def _push_safely(self, folder: Path) -> None:
        self.create_model_card()
        super()._push_safely(folder)

    def _note(self, item: SFTRow, logps: Tensor) -> None:
        # Weighted means: picking a source's targets by a mask would wait for the device.
        source = torch.from_numpy(item.source).to(logps.device)
        likely = (logps > np.log(0.5)).float()
        for index, name in enumerate(item.sources):
            weight = (source == index).float()
            weight = weight / weight.sum()
            self._recent.setdefault(f"nll/{name}", []).append(-(logps * weight).sum())
            self._recent.setdefault(f"likely/{name}", []).append((likely * weight).sum())


class StopAfter(TrainerCallback):
    """Ends a run in good order once its time is up, so that a lease of a machine is not overrun."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Ask the trainer to stop after this step where the deadline has passed."""
        if time.monotonic() >= self._deadline:
            control.should_training_stop = True
