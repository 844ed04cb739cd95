"""Checkpoints of a trainer that continue as if it had not stopped.

On top of what transformers saves, each rank keeps the micro-step counter and the traces that it
has drawn but not yet trained on, with their sampling log-probs. The order of the data is a
function of (seed, epoch), and the policy version is the optimizer step.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from octopus_trl.errors import ConfigError
from octopus_trl.trace import Trace
from octopus_trl.train import checkpoint
from octopus_trl.train.ranks import Ranks
from octopus_trl.train.zero import zero_stage


class StagedCheckpoints:
    """The part of a trainer that saves and resumes; stands before transformers' class."""

    accelerator: Any
    args: Any
    state: Any
    _push_safely: Any
    _staging = False

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train; resume from a whole checkpoint only.

        Args:
            resume_from_checkpoint: a folder, or true for the newest whole one.
        Raises:
            ConfigError: there is none, the one named is not whole, or it was written by another
                number of processes that cannot be made up for.
            RankFailed: another rank failed.
        """
        with Ranks(self.accelerator).watched():
            if self.args.should_save:
                checkpoint.clear_staging(self.args.output_dir)
            self.accelerator.wait_for_everyone()
            folder = checkpoint.resolve(resume_from_checkpoint, self.args.output_dir)
            if folder is not None:
                self._check_world(folder)
            return super().train(resume_from_checkpoint=folder, **kwargs)  # type: ignore[misc]

    def _rank_state(self) -> dict[str, Any]:
        """Give what this rank must know to go on, beyond what transformers saves."""
        return {}

    def _take_rank_state(self, state: dict[str, Any]) -> None:
        """Go on from what `_rank_state` gave."""

    def _needs_ranks(self, state: dict[str, Any]) -> str | None:
        """Say why a state is of use only to as many processes as wrote it, None where it is not."""
        return None

    def _check_world(self, folder: str) -> None:
        world = self.accelerator.num_processes
        written_by = int(checkpoint.read_facts(folder)["world_size"])
        if world == written_by:
            return
        why = self._needs_ranks(checkpoint.load_rank_state(folder, 0))
        if zero_stage(self.accelerator):
            why = "holds an optimizer that ZeRO split over them"
        if why is not None:
            raise ConfigError(
                f"{folder} was written by {written_by} processes and {why}, this run has {world}: "
                f"launch {written_by} processes"
            )

    def _get_output_dir(self, trial: Any) -> str:
        run_dir: str = super()._get_output_dir(trial=trial)  # type: ignore[misc]
        return str(Path(run_dir) / checkpoint.STAGING) if self._staging else run_dir

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint beside its place and move it there when it is whole."""
        run_dir = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        staged, final = run_dir / checkpoint.STAGING / name, run_dir / name
        if self.args.should_save:
            shutil.rmtree(staged, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        push, self.args.push_to_hub = self.args.push_to_hub, False
        self._staging = True
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        finally:
            self._staging, self.args.push_to_hub = False, push
        checkpoint.save_rank_state(staged, self.accelerator.process_index, self._rank_state())
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._publish(staged, final)
        self.accelerator.wait_for_everyone()
        if push:
            self._push_safely(final)

    def _publish(self, staged: Path, final: Path) -> None:
        if self.state.best_model_checkpoint == str(staged):
            self.state.best_model_checkpoint = str(final)
            self.state.save_to_json(str(staged / "trainer_state.json"))
        facts = {
            "global_step": self.state.global_step,
            "world_size": self.accelerator.num_processes,
        }
        checkpoint.publish(staged, final, facts=facts)
        checkpoint.rotate(
            final.parent,
            self.args.save_total_limit,
            newest=final,
            best=self.state.best_model_checkpoint,
        )

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        super()._load_optimizer_and_scheduler(folder)  # type: ignore[misc]
        if folder is None:
            return
        same = int(checkpoint.read_facts(folder)["world_size"]) == self.accelerator.num_processes
        rank = self.accelerator.process_index if same else 0
        self._take_rank_state(checkpoint.load_rank_state(folder, rank))


class WholeCheckpoints(StagedCheckpoints):
    """Checkpoints that hold the place in a generation and the episodes not yet trained on."""

    num_iterations: int
    _step: int
    _buffered_inputs: list[dict[str, Any]] | None

    def _rank_state(self) -> dict[str, Any]:
        every = self.args.steps_per_generation * self.num_iterations
        pending = self._buffered_inputs if self._step % every else None
        return {"step": self._step, "buffer": encode_buffer(pending)}

    def _take_rank_state(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        self._buffered_inputs = decode_buffer(state["buffer"])

    def _needs_ranks(self, state: dict[str, Any]) -> str | None:
        return None if state["buffer"] is None else "holds traces not yet trained on"


def encode_buffer(batches: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Turn buffered micro-batches into plain containers and tensors."""
    if batches is None:
        return None
    return [
        {
            **batch,
            "groups": [[trace.to_dict() for trace in group] for group in batch["groups"]],
        }
        for batch in batches
    ]


def decode_buffer(batches: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Undo `encode_buffer`; sampling log-probs come back bit for bit."""
    if batches is None:
        return None
    return [
        {
            **{k: v if isinstance(v, list) else torch.as_tensor(v) for k, v in batch.items()},
            "groups": [[Trace.from_dict(item) for item in group] for group in batch["groups"]],
        }
        for batch in batches
    ]
