"""The runs behind `test_failing_rank.py`: two ranks, of which the second fails."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from octopus_trl.train import ranks
from tests.tiny import SHORT_LENGTHS
from tests.train.forks import fork_ranks
from tests.train.runs import SHALLOW, alternating, asked_rows, make_trainer, replayed

# What fails, and whether the process of rank 1 lives on for a while with its connections open.
CASES = {"reward": False, "drawing": False, "update": False, "update, and it hangs": True}
CAUSE = "the second rank broke"
HANGS_S = 5.0


class Broken(Exception):
    """What rank 1 raises."""


def run(folder: Path, case: str, rank: int) -> None:
    """Train, and break on rank 1."""
    ranks.GRACE_S = 1.0

    def judge(completions: Any, **kwargs: Any) -> Any:
        if case == "reward" and rank == 1:
            raise Broken(CAUSE)
        return alternating(completions, **kwargs)

    def fail(*given: Any, **named: Any) -> Any:
        raise Broken(CAUSE)

    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 2}
    settings |= {"max_turns": 2, "max_new_tokens": 4, "num_pages": 200, "window": 1024}
    trainer = make_trainer(
        folder / "run", None, asked_rows(4), reward=judge, shape=SHALLOW, **settings
    )
    if rank == 1 and case == "drawing":
        trainer._policy._awake = fail
    if rank == 1 and case.startswith("update"):
        trainer.accelerator.backward = fail
    try:
        if case == "drawing":
            trainer.train()
        else:
            with replayed(sizes=(4,), lengths=SHORT_LENGTHS):
                trainer.train()
    finally:
        if rank == 1 and CASES[case]:
            time.sleep(HANGS_S)


def main(out: Path) -> None:
    """Run every case and note how its ranks ended."""
    ends = {}
    for case in CASES:
        folder = out / case

        def call(rank: int, case: str = case, folder: Path = folder) -> None:
            run(folder, case, rank)

        ends[case] = fork_ranks(2, "ddp", folder, call)
    (out / "ends.json").write_text(json.dumps(ends))
