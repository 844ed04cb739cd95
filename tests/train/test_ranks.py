"""DDP and ZeRO-1, 2, 3 over ranks with 1, 3 and 0 rows are one process, number for number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tolerances import AFTER_STEPS, FLOAT64
from tests.train.equal_worker import CHECKPOINTED, RANKS, STEPS
from tests.train.forks import MODES

ZERO = pytest.mark.skipif(
    "zero3" not in MODES, reason="deepspeed is not installed: DS_BUILD_OPS=0 pip install deepspeed"
)
GRADIENT = 1e-6  # relative, by norm, float32: measured 5e-7 to 6e-7, see docs/ranks.md
WRAPPED = {"ddp": "DistributedDataParallel"}
OPTIMIZER = {
    "zero1": "DeepSpeedZeroOptimizer",
    "zero2": "DeepSpeedZeroOptimizer",
    "zero3": "DeepSpeedZeroOptimizer_Stage3",
}


Found = dict[str, Any]


@pytest.fixture(scope="module")
def alone(
    run_scene: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Found]:
    """What one process did, in float32 and in float64."""
    folder = tmp_path_factory.mktemp("one")
    cases = ("one", "one in float64")
    run_scene("equal", folder, *cases)
    return {case: torch.load(folder / case / "found_0.pt", weights_only=False) for case in cases}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mode", ["ddp", *(pytest.param(mode, marks=ZERO) for mode in ("zero1", "zero2", "zero3"))]
)
def test_uneven_ranks_give_the_gradient_and_the_parameters_of_one_process(
    run_scene: Callable[..., None], alone: dict[str, Found], tmp_path: Path, mode: str
) -> None:
    one = alone["one"]
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

    assert list(ranks[0]["gradient"]) == list(one["gradient"])
    assert apart(ranks[0], one) <= GRADIENT
    # No further from the true gradient than rounding has put one process, give or take its half.
    true = alone["one in float64"]
    assert apart(ranks[0], true) <= apart(one, true) + GRADIENT / 2
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
    assert apart(ranks[0], one) <= GRADIENT


@pytest.mark.timeout(900)
def test_without_rounding_uneven_ranks_are_one_process(
    run_scene: Callable[..., None], alone: dict[str, Found], tmp_path: Path
) -> None:
    run_scene("equal", tmp_path, "ddp in float64")
    one = alone["one in float64"]
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"ddp in float64/found_{rank}.pt", weights_only=False)
        assert {part.dtype for part in found["gradient"].values()} == {torch.float64}
        assert apart(found, one) <= FLOAT64
        for name, value in one["parameters"].items():
            assert (found["parameters"][name] - value).abs().max() <= FLOAT64, name


def gradient_of(found: Found) -> torch.Tensor:
    """Join the gradients of all parameters."""
    return torch.cat([part.flatten().double() for part in found["gradient"].values()])


def apart(found: Found, other: Found) -> float:
    """Give the relative difference of two gradients, by norm."""
    expected = gradient_of(other)
    return float((gradient_of(found) - expected).norm() / expected.norm())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["ddp", pytest.param("zero2", marks=ZERO)])
def test_tiled_mlps_and_offloaded_activations_on_uneven_ranks_give_the_gradient_of_one_process(
    run_scene: Callable[..., None], alone: dict[str, Found], tmp_path: Path, mode: str
) -> None:
    case = f"tiled {mode}"
    run_scene("equal", tmp_path, case)
    for rank in range(RANKS):
        found = torch.load(tmp_path / case / f"found_{rank}.pt", weights_only=False)
        assert found["checkpointed"]
        assert apart(found, alone["one"]) <= GRADIENT


@ZERO
def test_tiled_mlps_under_zero3_are_refused(run_scene: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="mlp_tile_tokens=7: ZeRO-3 gathers"):
        run_scene("equal", tmp_path, "tiled zero3")
