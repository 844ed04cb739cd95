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
from transformers.trainer_utils import rotate_checkpoints

from octopus_trl.errors import ConfigError
from octopus_trl.trace import Trace
from octopus_trl.train import checkpoint
from octopus_trl.train.weights import say


class WholeCheckpoints:
    """The part of the trainer that saves and resumes; stands before TRL's class."""

    accelerator: Any
    args: Any
    state: Any
    num_iterations: int
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
        folder = checkpoint.resolve(resume_from_checkpoint, self.args.output_dir)
        if self.accelerator.is_main_process:
            checkpoint.clear_staging(self.args.output_dir)
        self.accelerator.wait_for_everyone()
        return super().train(resume_from_checkpoint=folder, **kwargs)  # type: ignore[misc]

    def _get_output_dir(self, trial: Any) -> str:
        run_dir: str = super()._get_output_dir(trial=trial)  # type: ignore[misc]
        return str(Path(run_dir) / checkpoint.STAGING) if self._staging else run_dir

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint beside its place and move it there when it is whole."""
        run_dir = Path(self._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        staged, final = run_dir / checkpoint.STAGING / name, run_dir / name
        if self.accelerator.is_main_process:
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
        rotate_checkpoints(
            output_dir=str(final.parent),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
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
        world = self.accelerator.num_processes
        written_by = int(checkpoint.read_facts(folder)["world_size"])
        rank = self.accelerator.process_index if world == written_by else 0
        state = checkpoint.load_rank_state(folder, rank)
        if world != written_by and state["buffer"] is not None:
            raise ConfigError(
                f"{folder} was written by {written_by} processes and holds traces not yet trained "
                f"on, this run has {world}: launch {written_by} processes"
            )
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
