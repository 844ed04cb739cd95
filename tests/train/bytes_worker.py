"""The runs behind `test_plan.py`: what optimizer, gradients and copies take on ranks under ZeRO."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from tests.tiny import SHORT_LENGTHS
from tests.train.equal_worker import TARGETS
from tests.train.forks import fork_ranks
from tests.train.runs import adapter, asked_rows, make_trainer, replayed

RANKS = 2
MODES = ("zero1", "zero2", "zero3")
RANK_OF_ADAPTER = 8


class Look(TrainerCallback):
    """Counts bytes once the optimizer has stepped."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.found: dict[str, int] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        engine = self.trainer.model_wrapped
        zero = engine.optimizer
        moments = [
            value
            for held in zero.optimizer.state.values()
            for value in held.values()
            if isinstance(value, torch.Tensor) and value.dim()
        ]
        masters = getattr(zero, "fp32_partitioned_groups_flat", None)
        if masters is None:
            masters = zero.single_partition_of_fp32_groups
        self.found = {
            "optimizer": sum(t.nbytes for t in [*moments, *masters]),
            "bucket": int(zero.reduce_bucket_size),
            "weights": sum(p.nbytes for p in engine.module.parameters() if not p.requires_grad),
            "stage": int(engine.zero_optimization_stage()),
        }


def main(out: Path) -> None:
    """Train one step of an adapter under each stage; each rank writes what it held."""
    for mode in MODES:
        folder = out / mode

        def call(rank: int, folder: Path = folder) -> None:
            look = Look()
            trainer = make_trainer(
                folder / "run",
                None,
                asked_rows(RANKS),
                peft_config=adapter(r=RANK_OF_ADAPTER, target_modules=list(TARGETS)),
                callbacks=[look],
                num_generations=2,
                per_device_train_batch_size=2,
            )
            look.trainer = trainer
            with replayed(sizes=(4,), lengths=SHORT_LENGTHS):
                trainer.train()
            (folder / f"found_{rank}.json").write_text(json.dumps(look.found))

        codes = fork_ranks(RANKS, mode, folder, call)
        if any(codes):
            sys.exit(f"{mode}: ranks ended with {codes}; see {folder}/rank_N.log")
