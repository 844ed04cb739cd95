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
from octopus_trl.train.weights import say
from octopus_trl.train.zero import zero_stage


class WholeCheckpoints:
    """The part of the trainer that saves and resumes; stands before TRL's class."""

    accelerator: Any
    args: Any
    state: Any
    num_iterations: int
    _ranks: Ranks
    _step: int
    _buffered_inputs: list[dict[str, Any]] | None
    _staging = False

    def train(self, resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        """Train; resume from a whole checkpoint only.

        Args:
            resume_from_checkpoint: a folder, or true for the newest whole one.
        Raises:
            ConfigError: there is none, or the one named is not whole.
        """
        with self._ranks.watched():
            if self.args.should_save:
                checkpoint.clear_staging(self.args.output_dir)
            self.accelerator.wait_for_everyone()
            folder = checkpoint.resolve(resume_from_checkpoint, self.args.output_dir)
            if folder is not None:
                self._check_world(folder)
            return super().train(resume_from_checkpoint=folder, **kwargs)  # type: ignore[misc]

    def _check_world(self, folder: str) -> None:
        """Refuse a checkpoint whose parts another number of processes would not find.

        Raises:
            ConfigError: says both numbers, and why it matters.
        """
        world = self.accelerator.num_processes
        written_by = int(checkpoint.read_facts(folder)["world_size"])
        if world == written_by:
            return
        why = None
        if zero_stage(self.accelerator):
            why = "holds an optimizer that ZeRO split over them"
        elif checkpoint.load_rank_state(folder, 0)["buffer"] is not None:
            why = "holds traces not yet trained on"
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

    def _push_safely(self, folder: Path) -> None:
        """Push a checkpoint; a failed push never ends a run."""
        try:
            self._push_from_checkpoint(str(folder))  # type: ignore[attr-defined]
        except Exception as error:  # noqa: BLE001 - whatever the hub client raises
            say(f"push of {folder.name} failed, the run goes on: {type(error).__name__}: {error}")

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        super()._load_optimizer_and_scheduler(folder)  # type: ignore[misc]
        if folder is None:
            return
        same = int(checkpoint.read_facts(folder)["world_size"]) == self.accelerator.num_processes
        state = checkpoint.load_rank_state(folder, self.accelerator.process_index if same else 0)
        self._step = state["step"]
        self._buffered_inputs = decode_buffer(state["buffer"])

    def _rank_state(self) -> dict[str, Any]:
        every = self.args.steps_per_generation * self.num_iterations
        pending = self._buffered_inputs if self._step % every else None
        return {"step": self._step, "buffer": encode_buffer(pending)}


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
