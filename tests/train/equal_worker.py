"""The runs behind `test_ranks.py`: the same updates on one process and on three uneven ranks."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from tests.train.forks import DEEPSPEED, MODES, Collectives, fork_ranks
from tests.train.runs import asked_rows, make_trainer, replayed

RANKS = 3
# One question a rank: few tokens, many tokens, none.
SIZES = (2, 15, 0)
STEPS = 3
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "num_generations": 3,
    "max_row_tokens": 430,
    "max_grad_norm": 1.0,
    "shuffle_dataset": False,
    "learning_rate": 1e-3,
}
CHECKPOINTED = ("zero2", "zero3")  # these run with gradient checkpointing on


class Keep(TrainerCallback):
    """Keeps the gradient of the first step, on whatever wraps the model."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.gradient: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stand before DeepSpeed's step, which no callback does."""
        engine = self.trainer.model_wrapped
        if type(engine).__name__ == "DeepSpeedEngine":
            step = engine.step

            def keep_and_step(*given: Any, **named: Any) -> Any:
                self._keep(engine.module, full_gradient)
                return step(*given, **named)

            engine.step = keep_and_step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Copy plain gradients."""
        if type(self.trainer.model_wrapped).__name__ != "DeepSpeedEngine":
            self._keep(self.trainer.model, lambda parameter: parameter.grad)

    def _keep(self, model: nn.Module, gradient_of: Any) -> None:
        if not self.gradient:
            self.gradient = {
                name: gradient_of(parameter).detach().clone()
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }


def full_gradient(parameter: Any) -> torch.Tensor:
    from deepspeed.utils import safe_get_full_grad

    found: torch.Tensor = safe_get_full_grad(parameter)
    return found


def full_parameter(parameter: Any) -> torch.Tensor:
    if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
        from deepspeed.utils import safe_get_full_fp32_param

        found: torch.Tensor = safe_get_full_fp32_param(parameter)
        return found.detach().clone()
    return parameter.detach().clone()


def run(
    folder: Path,
    mode: str,
    rank: int,
    world: int,
    *,
    sizes: tuple[int, ...] = SIZES,
    **settings: Any,
) -> None:
    """Train three steps and write what this rank saw.

    Args:
        sizes: for each question, the segments of its episodes; each rank gets as many questions.
    """
    keep, rows, listed = Keep(), [], Collectives()
    trainer = make_trainer(
        folder / "run",
        None,
        asked_rows(len(sizes)),
        callbacks=[keep],
        per_device_train_batch_size=3 * len(sizes) // world,
        gradient_checkpointing=mode in CHECKPOINTED,
        **{**SETTINGS, **settings},
    )
    keep.trainer = trainer
    pack, update = trainer._rows, trainer.training_step

    def pack_and_keep(*given: Any) -> Any:
        packed = pack(*given)
        rows.append([int(row.num_owned.sum()) for row in packed])
        return packed

    def update_and_list(*given: Any) -> Any:
        with listed:
            return update(*given)

    for name, method in (("_rows", pack_and_keep), ("training_step", update_and_list)):
        setattr(trainer, name, method)
    with replayed(sizes=sizes):
        trainer.train()
    wrapped = trainer.model_wrapped
    found = {
        "device": str(trainer.accelerator.device),
        "backend": torch.distributed.get_backend() if world > 1 else None,
        "gradient": {name: part.cpu() for name, part in keep.gradient.items()},
        "parameters": {
            name: full_parameter(parameter).cpu()
            for name, parameter in trainer.accelerator.unwrap_model(wrapped).named_parameters()
            if parameter.requires_grad
        },
        "log": trainer.state.log_history,
        "rows": rows,
        "collectives": listed.seen,
        "wrapped": type(wrapped).__name__,
        "optimizer": type(getattr(wrapped, "optimizer", None)).__name__,
        "global_steps": getattr(wrapped, "global_steps", None),
        "reentrant": (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant"),
    }
    torch.save(found, folder / f"found_{rank}.pt")


def main(out: Path, *modes: str) -> None:
    """Run the asked modes, or every one that this machine can."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if DEEPSPEED:
        import deepspeed  # noqa: F401 - once, before the forks
    for mode in modes or ("one", *MODES):
        world = 1 if mode == "one" else RANKS
        folder = out / mode

        def call(rank: int, mode: str = mode, world: int = world, folder: Path = folder) -> None:
            run(folder, mode, rank, world)

        codes = fork_ranks(world, mode, folder, call)
        if any(codes):
            sys.exit(f"{mode}: ranks ended with {codes}; see {folder}/rank_N.log")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
