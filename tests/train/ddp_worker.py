"""One rank of `test_ddp.py`: runs updates on uneven ranks and keeps gradients and figures."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.train.runs import Gradients, asked_rows, make_trainer, replayed

# The first two of four questions go to the first rank.
CASES: dict[str, dict[str, Any]] = {
    "uneven": {"sizes": (6, 6, 40, 40), "settings": {"max_row_tokens": 480}},
    "one rank without a token": {
        "sizes": (0, 0, 40, 40),
        "settings": {"max_row_tokens": 480, "gradient_accumulation_steps": 2},
    },
}
FIGURES = ("loss", "reward", "rollout_kl/mean", "rollout_kl/max_abs", "importance_weight/mean")


def run(out: Path, case: str, world: int) -> dict[str, Any]:
    """Run one update of four questions over `world` ranks and give what it did."""
    keep, rows = Gradients(), []
    accumulated = CASES[case]["settings"].get("gradient_accumulation_steps", 1)
    trainer = make_trainer(
        out,
        None,
        asked_rows(4),
        callbacks=[keep],
        max_grad_norm=1.0,
        shuffle_dataset=False,
        per_device_train_batch_size=8 // world // accumulated,
        **CASES[case]["settings"],
    )
    pack = trainer._rows

    def pack_and_keep(*trees: Any) -> Any:
        rows.append(pack(*trees))
        return rows[-1]

    setattr(trainer, "_rows", pack_and_keep)  # noqa: B010 - a method of one object
    with replayed(sizes=CASES[case]["sizes"]):
        trainer.train()
    owned = [int(row.num_owned.sum()) for each in rows for row in each]
    return {
        "gradients": keep.steps[0],
        "figures": {name: trainer.state.log_history[0].get(name) for name in FIGURES},
        "grad_norm": trainer.state.log_history[0]["grad_norm"],
        "owned": trainer.accelerator.gather(torch.tensor(owned)).view(world, -1).tolist(),
        "wrapped": type(trainer.model_wrapped).__name__,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    found = {case: run(folder / "run", case, 2) for case in CASES}
    if int(torch.distributed.get_rank()) == 0:
        torch.save(found, folder / "found.pt")
    torch.distributed.destroy_process_group()
