"""Two processes give the gradients of one, however unevenly their rows are spread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.ddp_worker import CASES, run
from tests.train.runs import difference

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ddp")
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
            *("--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"),
            *("-m", "tests.train.ddp_worker", str(folder)),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = torch.load(folder / "found.pt", weights_only=False)
    return found


@pytest.mark.parametrize("case", sorted(CASES))
def test_gradients_and_figures_of_two_uneven_processes_are_those_of_one(
    two_processes: dict[str, Any], case: str, tmp_path: Path
) -> None:
    both, one = two_processes[case], run(tmp_path, case, 1)
    assert both["wrapped"] == "DistributedDataParallel"
    assert difference(both["gradients"], one["gradients"]) < 2e-5
    assert both["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    for name, value in one["figures"].items():
        assert both["figures"][name] == pytest.approx(value, rel=1e-4, abs=1e-7), name


def test_ranks_really_were_uneven_and_one_had_nothing(two_processes: dict[str, Any]) -> None:
    uneven = two_processes["uneven"]["owned"]
    assert sum(map(bool, uneven[0])) != sum(map(bool, uneven[1]))
    nothing = two_processes["one rank without a token"]["owned"]
    assert any(not any(rank) for rank in nothing)
