"""DDP and ZeRO-1, 2, 3 over ranks with 1, 3 and 0 rows are one process, number for number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tolerances import AFTER_STEPS
from tests.train.equal_worker import CHECKPOINTED, RANKS, STEPS
from tests.train.forks import MODES

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
def one(run_scene: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process did."""
    folder = tmp_path_factory.mktemp("one")
    run_scene("equal", folder, "one")
    found: dict[str, Any] = torch.load(folder / "one/found_0.pt", weights_only=False)
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mode", ["ddp", *(pytest.param(mode, marks=ZERO) for mode in ("zero1", "zero2", "zero3"))]
)
def test_uneven_ranks_give_the_gradient_and_the_parameters_of_one_process(
    run_scene: Callable[..., None], one: dict[str, Any], tmp_path: Path, mode: str
) -> None:
    run_scene("equal", tmp_path, mode)
    ranks = [
        torch.load(tmp_path / mode / f"found_{rank}.pt", weights_only=False)
        for rank in range(RANKS)
    ]
    # What was launched is what ran.
    for found in ranks:
        assert found["wrapped"] == WRAPPED.get(mode, "DeepSpeedEngine")
        if mode in OPTIMIZER:
            assert found["optimizer"] == OPTIMIZER[mode]
            assert found["global_steps"] == STEPS
        assert found["checkpointed"] == (mode in CHECKPOINTED)
    # Rows: one, three and none with tokens; everyone runs as many passes and meets as often.
    for step in range(STEPS):
        packed = [found["rows"][2 * step + 1] for found in ranks]  # after those of no advantage
        assert [sum(map(bool, rows)) for rows in packed] == [1, 3, 0]
        assert {len(rows) for rows in packed} == {3}
    assert ranks[0]["collectives"]
    assert all(found["collectives"] == ranks[0]["collectives"] for found in ranks)

    expected, gradient = gradient_of(one), gradient_of(ranks[0])
    assert list(ranks[0]["gradient"]) == list(one["gradient"])
    assert (gradient - expected).norm() <= 2e-6 * expected.norm()
    assert (gradient - expected).abs().max() <= 1e-6 * expected.abs().max()
    for name, value in one["parameters"].items():
        moved = value - one["start"][name]
        error = ranks[0]["parameters"][name] - value
        assert error.abs().max() <= AFTER_STEPS, name
        assert error.norm() <= 1e-2 * moved.norm(), name
        for found in ranks:
            assert torch.equal(found["parameters"][name], ranks[0]["parameters"][name]), name
    for entry, wanted in zip(ranks[0]["log"][:STEPS], one["log"], strict=False):
        for name in ("loss", "grad_norm", "reward", "rollout_kl/mean", "rollout_kl/max_abs"):
            assert entry[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-7), name


@pytest.mark.timeout(900)
def test_a_rank_without_a_token_in_any_accumulated_step_gives_the_gradient_of_one_process(
    run_scene: Callable[..., None], tmp_path: Path
) -> None:
    run_scene("equal", tmp_path, "four questions", "accumulated")
    one = torch.load(tmp_path / "four questions/found_0.pt", weights_only=False)
    ranks = [
        torch.load(tmp_path / "accumulated" / f"found_{rank}.pt", weights_only=False)
        for rank in range(2)
    ]
    assert [any(any(rows) for rows in found["rows"]) for found in ranks] == [False, True]
    assert gradient_of(ranks[0]).any()
    error = gradient_of(ranks[0]) - gradient_of(one)
    assert error.norm() <= 2e-6 * gradient_of(one).norm()


def gradient_of(found: dict[str, Any]) -> torch.Tensor:
    """Join the gradients of all parameters."""
    return torch.cat([part.flatten() for part in found["gradient"].values()])
