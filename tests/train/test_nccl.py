"""On two GPUs with NCCL: uneven ranks are one process, generation waits for nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.nccl_worker import MODES, RANKS

ROOT = Path(__file__).parents[2]
# Products and reductions of a GPU in float32, three steps of AdamW behind them.
RELATIVE, AFTER_STEPS, KL = 1e-5, 1e-5, 1e-7


def read(folder: Path, mode: str, ranks: int) -> list[dict[str, Any]]:
    return [torch.load(folder / mode / f"found_{r}.pt", weights_only=False) for r in range(ranks)]


@pytest.mark.multi_gpu
@pytest.mark.timeout(600)
def test_two_gpus_with_uneven_rows_are_one_gpu_and_generate_by_themselves(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.nccl_worker", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OCTOPUS_KERNELS": "maths"},  # the references, which round the least
        capture_output=True,
        text=True,
        check=False,
    )
    logs = "".join(path.read_text()[-2500:] for path in tmp_path.glob("*/rank_*.log"))
    assert done.returncode == 0, f"{done.stderr[-2000:]}\n{logs}"
    (one,) = read(tmp_path, "one", 1)
    expected = torch.cat([part.flatten() for part in one["gradient"].values()])
    for mode in MODES:
        ranks = read(tmp_path, mode, RANKS)
        assert [found["device"] for found in ranks] == ["cuda:0", "cuda:1"]
        assert [found["backend"] for found in ranks] == ["nccl", "nccl"]
        wrapped = "DistributedDataParallel" if mode == "ddp" else "DeepSpeedEngine"
        assert all(found["wrapped"] == wrapped for found in ranks)
        assert [sum(map(bool, found["rows"][1])) for found in ranks] == [3, 0]
        assert ranks[0]["collectives"] == ranks[1]["collectives"] != []
        gradient = torch.cat([part.flatten() for part in ranks[0]["gradient"].values()])
        error = ((gradient - expected).norm() / expected.norm()).item()
        moved = max(
            (ranks[0]["parameters"][name] - value).abs().max().item()
            for name, value in one["parameters"].items()
        )
        print(f"{mode}: gradient {error:.1e} relative, parameters after 3 steps {moved:.1e}")  # noqa: T201
        assert error <= RELATIVE
        assert moved <= AFTER_STEPS
    if "zero3" in MODES:
        first, second = read(tmp_path, "generating", RANKS)
        for found in (first, second):
            assert all(generation["collectives"] == [] for generation in found["generations"])
            assert all(not generation["split"] for generation in found["generations"])
        assert first["generations"][-1]["decoded"] < second["generations"][-1]["decoded"]
        kl = [entry["rollout_kl/mean"] for entry in first["log"] if "rollout_kl/mean" in entry]
        print(f"zero3: KL of each step {kl}; {first['described']}")  # noqa: T201
        assert max(kl) <= KL
