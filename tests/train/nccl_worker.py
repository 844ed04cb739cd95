"""The runs behind `test_nccl.py`: DDP and ZeRO-3 over NCCL, and one process on one of the GPUs."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

from tests.train import equal_worker, generating_worker
from tests.train.forks import DEEPSPEED, fork_ranks

RANKS = 2
SIZES = (9, 0)  # three rows on the first rank, none on the second
MODES = ("ddp", "zero3") if DEEPSPEED else ("ddp",)


def main(out: Path) -> None:
    """Run the updates, then generation from resident copies. No CUDA before the forks."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if DEEPSPEED:
        os.environ["DS_ACCELERATOR"] = "cuda"
    for mode in ("one", *MODES):
        world = 1 if mode == "one" else RANKS
        folder = out / mode

        def call(rank: int, mode: str = mode, world: int = world, folder: Path = folder) -> None:
            if world == 1:
                os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # else the trainer would split over both
            equal_worker.run(folder, mode, rank, world, sizes=SIZES, use_cpu=False)

        codes = fork_ranks(world, mode, folder, call, timeout_s=120)
        if any(codes):
            sys.exit(f"{mode}: ranks ended with {codes}; see {folder}/rank_N.log")
    if DEEPSPEED:
        folder = out / "generating"

        def draw(rank: int) -> None:
            generating_worker.run(folder, "adapter", rank, use_cpu=False)

        codes = fork_ranks(RANKS, "zero3", folder, draw, timeout_s=120)
        if any(codes):
            sys.exit(f"generating: ranks ended with {codes}; see {folder}/rank_N.log")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
