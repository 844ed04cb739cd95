"""The runs behind `test_resident.py`: generation on ranks whose parameters ZeRO-3 splits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from octopus_trl.errors import StaleVersion
from octopus_trl.protocols import SamplingParams
from octopus_trl.train.resident import PART_BYTES
from tests.train.equal_worker import TARGETS, full_parameter
from tests.train.forks import Collectives, fork_ranks
from tests.train.runs import SHALLOW, adapter, asked_rows, make_trainer

RANKS = 2
CASES = ("adapter", "full")  # what trains
PROBE = [7, 300, 12, 5]
SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "max_turns": 2,
    "max_new_tokens": 5,
    "window": 1024,
    "num_pages": 200,
    "num_states": 16,
    "gradient_checkpointing": True,
    "learning_rate": 0.05,
    "save_strategy": "steps",
    "save_steps": 1,
}


class Watcher(TrainerCallback):
    """Stands in every generation of a trainer and notes what the engine is and does there."""

    def __init__(self, trainer: Any, rank: int) -> None:
        self.trainer, self.rank = trainer, rank
        self.generations: list[dict[str, Any]] = []
        self.cursors: list[Any] = []  # left open in each generation
        self.trains = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
        self._run = trainer._policy.run
        trainer._policy.run = self.run

    def run(self, version: int, call: Any) -> Any:
        """Generate as the trainer asks, and look around on the way."""

        def look_and_call(engine: Any) -> Any:
            listed = Collectives()
            with listed:
                stale = [self._is_stale(engine, cursor) for cursor in self.cursors]
                cursor = engine.open(PROBE)
                self.cursors.append(cursor)
                probe = engine.logits(cursor).clone()
                if self.rank == 1:  # passes that rank 0 does not make
                    extra = engine.fork(cursor)
                    engine.generate([extra], SamplingParams(max_tokens=9, seed=1), until=())
                    engine.close(extra)
                found = call(engine)
            named = dict(engine.model.named_parameters())
            self.generations.append(
                {
                    "version": version,
                    "collectives": listed.seen,
                    "stale": stale,
                    "probe": probe.cpu(),
                    "decoded": engine.stats()["decoded"],
                    "trained": {n: p.cpu().clone() for n, p in named.items() if n in self.trains},
                    "split": [n for n, p in named.items() if p.numel() == 0 or p.is_meta],
                    "addresses": [p.data_ptr() for p in named.values()],
                }
            )
            return found

        return self._run(version, look_and_call)

    def _is_stale(self, engine: Any, cursor: Any) -> bool:
        try:
            engine.logits(cursor)
        except StaleVersion:
            return True
        return False


def run(folder: Path, case: str, rank: int, **settings: Any) -> None:
    """Train two steps on episodes that were really drawn."""
    trainer = make_trainer(
        folder / "run",
        None,
        asked_rows(RANKS),
        peft_config=adapter(target_modules=list(TARGETS)) if case == "adapter" else None,
        shape=SHALLOW,
        **{**SETTINGS, **settings},
    )
    before = {n: p.numel() * p.element_size() for n, p in trainer.model.named_parameters()}
    watcher = Watcher(trainer, rank)
    trainer.train()
    resident = trainer._policy._resident
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    found = {
        "generations": watcher.generations,
        "log": trainer.state.log_history,
        "wrapped": type(trainer.model_wrapped).__name__,
        "bytes": (resident.num_bytes, resident.peak_bytes, resident.refreshed_bytes),
        "expected_bytes": (sum(before.values()), max(PART_BYTES, *before.values())),
        "described": resident.describe(),
        "shapes": {
            name: tuple(full_parameter(parameter).shape)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        },
    }
    torch.save(found, folder / f"found_{rank}.pt")


def main(out: Path) -> None:
    """Run both cases."""
    for case in CASES:
        folder = out / case

        def call(rank: int, case: str = case, folder: Path = folder) -> None:
            run(folder, case, rank)

        codes = fork_ranks(RANKS, "zero3", folder, call)
        if any(codes):
            sys.exit(f"{case}: ranks ended with {codes}; see {folder}/rank_N.log")
