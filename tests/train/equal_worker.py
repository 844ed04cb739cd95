"""The runs behind `test_ranks.py`: the same updates on one process and on three uneven ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import TrainerCallback

from tests.tiny import SHORT_LENGTHS
from tests.train.forks import Collectives, fork_ranks
from tests.train.runs import SHALLOW, adapter, asked_rows, make_trainer, replayed, trained

RANKS = 3
# One question a rank: few tokens, many tokens, none.
SIZES = (4, 9, 0)
STEPS = 3
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "num_generations": 3,
    "max_row_tokens": 60,
    "max_grad_norm": 1.0,
    "shuffle_dataset": False,
    "learning_rate": 1e-3,
}
TILED = {
    "mlp_tile_tokens": 7,
    "activation_offloading": True,
    "gradient_checkpointing": True,
    "max_steps": 1,
}
# Ranks, mode, sizes, settings. The accumulated ones: the first rank never has a token.
CASES: dict[str, tuple[int, str, tuple[int, ...], dict[str, Any]]] = {
    "one": (1, "one", SIZES, {}),
    **{mode: (RANKS, mode, SIZES, {}) for mode in ("ddp", "zero1", "zero2", "zero3")},
    "one in float64": (1, "one", SIZES, {"wide": True}),
    "ddp in float64": (RANKS, "ddp", SIZES, {"wide": True}),
    "four questions": (1, "one", (0, 0, 9, 4), {"max_steps": 1}),
    # Tiles of fewer tokens than a row, layers' inputs in host memory: on ranks of uneven rows.
    "tiled ddp": (RANKS, "ddp", SIZES, TILED),
    "tiled zero2": (RANKS, "zero2", SIZES, TILED),
    "tiled zero3": (RANKS, "zero3", SIZES, TILED),
    "accumulated": (2, "ddp", (0, 0, 9, 4), {"max_steps": 1, "gradient_accumulation_steps": 2}),
}
CHECKPOINTED = ("zero2", "zero3")  # these run with gradient checkpointing on
TARGETS = ("q_proj", "in_proj_qkv", "out_proj", "down_proj")  # each costs ZeRO-3 its collectives


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


@contextmanager
def float64() -> Iterator[None]:
    """Make `float32` mean float64, in the stock modules too, which cast by name."""
    with (
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch, "float32", torch.float64),
    ):
        yield


def run(
    folder: Path,
    mode: str,
    rank: int,
    world: int,
    *,
    sizes: tuple[int, ...] = SIZES,
    wide: bool = False,
    **settings: Any,
) -> None:
    """Train three steps and write what this rank saw.

    Args:
        sizes: for each question, the segments of its episodes; each rank gets as many questions.
        wide: compute in float64.
    """
    keep, rows, listed = Keep(), [], Collectives()
    accumulated = settings.get("gradient_accumulation_steps", 1)
    trainer = make_trainer(
        folder / "run",
        None,
        asked_rows(len(sizes)),
        peft_config=adapter(target_modules=list(TARGETS)),
        callbacks=[keep],
        per_device_train_batch_size=3 * len(sizes) // (world * accumulated),
        shape=SHALLOW,
        **{**SETTINGS, "gradient_checkpointing": mode in CHECKPOINTED, **settings},
    )
    if wide:
        trainer.model.double()
    keep.trainer = trainer
    start = trained(trainer)
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
    with replayed(sizes=sizes, lengths=SHORT_LENGTHS), float64() if wide else nullcontext():
        trainer.train()
    wrapped = trainer.model_wrapped
    found = {
        "device": str(trainer.accelerator.device),
        "backend": torch.distributed.get_backend() if world > 1 else None,
        "start": start,
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
        "checkpointed": trainer.args.gradient_checkpointing,
    }
    torch.save(found, folder / f"found_{rank}.pt")


def main(out: Path, *cases: str) -> None:
    """Run the asked cases, each in the folder of its name."""
    for case in cases:
        world, mode, sizes, settings = CASES[case]
        folder = out / case

        def call(rank: int, world: int = world, mode: str = mode, folder: Path = folder) -> None:
            run(folder, mode, rank, world, sizes=sizes, **settings)  # noqa: B023 - forked at once

        codes = fork_ranks(world, mode, folder, call)
        if any(codes):
            sys.exit(f"{case}: ranks ended with {codes}; see {folder}/rank_N.log")
