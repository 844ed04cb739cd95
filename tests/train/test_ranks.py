"""DDP and ZeRO-1, 2, 3 over ranks with 1, 3 and 0 rows are one process, number for number."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tolerances import AFTER_STEPS
from tests.train.equal_worker import CHECKPOINTED, RANKS, STEPS
from tests.train.forks import MODES

ROOT = Path(__file__).parents[2]
ZERO = pytest.mark.skipif(
    "zero3" not in MODES, reason="deepspeed is not installed: DS_BUILD_OPS=0 pip install deepspeed"
)
WRAPPED = {"ddp": "DistributedDataParallel"}
OPTIMIZER = {
    "zero1": "DeepSpeedZeroOptimizer",
    "zero2": "DeepSpeedZeroOptimizer",
    "zero3": "DeepSpeedZeroOptimizer_Stage3",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Everything that the ranks of each mode saw."""
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.equal_worker", str(folder)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    logs = "".join(path.read_text()[-1500:] for path in folder.glob("*/rank_*.log"))
    assert done.returncode == 0, f"{done.stderr[-2000:]}\n{logs}"
    return {
        mode: [
            torch.load(folder / mode / f"found_{rank}.pt", weights_only=False)
            for rank in range(1 if mode == "one" else RANKS)
        ]
        for mode in ("one", *MODES)
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mode", ["ddp", *(pytest.param(mode, marks=ZERO) for mode in ("zero1", "zero2", "zero3"))]
)
def test_uneven_ranks_give_the_gradient_and_the_parameters_of_one_process(
    runs: dict[str, list[dict[str, Any]]], mode: str
) -> None:
    (one,), ranks = runs["one"], runs[mode]
    # What was launched is what ran.
    for found in ranks:
        assert found["wrapped"] == WRAPPED.get(mode, "DeepSpeedEngine")
        if mode in OPTIMIZER:
            assert found["optimizer"] == OPTIMIZER[mode]
            assert found["global_steps"] == STEPS
        assert (found["reentrant"] is not None) == (mode in CHECKPOINTED)
    # Rows: one, three and none with tokens; everyone runs as many passes and meets as often.
    first = [found["rows"][1] for found in ranks]
    assert [sum(map(bool, rows)) for rows in first] == [1, 3, 0]
    assert {len(rows) for rows in first} == {3}
    assert ranks[0]["collectives"]
    assert all(found["collectives"] == ranks[0]["collectives"] for found in ranks)

    expected = torch.cat([part.flatten() for part in one["gradient"].values()])
    assert list(ranks[0]["gradient"]) == list(one["gradient"])
    gradient = torch.cat([part.flatten() for part in ranks[0]["gradient"].values()])
    assert (gradient - expected).norm() <= 2e-6 * expected.norm()
    assert (gradient - expected).abs().max() <= 1e-6 * expected.abs().max()
    for name, value in one["parameters"].items():
        assert (ranks[0]["parameters"][name] - value).abs().max() <= AFTER_STEPS, name
        for found in ranks:
            assert torch.equal(found["parameters"][name], ranks[0]["parameters"][name]), name
    for entry, wanted in zip(ranks[0]["log"][:STEPS], one["log"], strict=False):
        for name in ("loss", "grad_norm", "reward", "rollout_kl/mean", "rollout_kl/max_abs"):
            assert entry[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-7), name
