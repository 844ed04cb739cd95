"""A run that is killed with SIGKILL and started again is the run that was left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octopus_trl.train.checkpoint import DOOMED, STAGING, last_checkpoint, missing_part
from tests.train.forks import DEEPSPEED
from tests.train.killed_worker import DRAWN, KILLS, STEPS, WORLD

ZERO = pytest.mark.skipif(
    not DEEPSPEED, reason="deepspeed is not installed: DS_BUILD_OPS=0 pip install deepspeed"
)
LOGGED = ("loss", "grad_norm", "learning_rate", "reward", "rollout_kl/mean", "entropy_estimate")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mode",
    [
        "one",
        pytest.param("any", marks=pytest.mark.slow),
        pytest.param("ddp", marks=pytest.mark.slow),
        pytest.param("zero2", marks=ZERO),
        pytest.param("zero3", marks=[ZERO, pytest.mark.slow]),
    ],
)
def test_killed_at_any_moment_and_resumed_every_step_is_bit_for_bit_the_same(
    run_scene: Callable[..., None], tmp_path: Path, mode: str
) -> None:
    run_scene("killed", tmp_path, mode)
    folder = tmp_path / mode
    print((folder / DRAWN).read_text())  # noqa: T201 - of a failing run, to see what was drawn
    for rank in range(WORLD.get(mode, 2)):
        straight, killed = (
            torch.load(folder / name / f"found_{rank}.pt", weights_only=False)
            for name in ("straight", "killed")
        )
        assert killed["step"] == straight["step"] == STEPS
        for name in LOGGED:
            assert values(killed, name) == values(straight, name), name
        assert len(values(straight, "loss")) == STEPS
        for name, value in straight["parameters"].items():
            assert torch.equal(killed["parameters"][name], value), name

    out = folder / "killed" / "run"
    kept = sorted(path for path in out.glob("checkpoint-*"))
    assert [path.name for path in kept] == [f"checkpoint-{STEPS - 1}", f"checkpoint-{STEPS}"]
    assert all(missing_part(path) is None for path in kept)
    assert not list((out / STAGING).glob(f"*{DOOMED}"))
    # The adapter on disk is the one that trained, whole, whatever split it.
    adapter = load_file(kept[-1] / "adapter_model.safetensors")
    trained = {
        name.replace(".default.", "."): value
        for name, value in torch.load(folder / "killed" / "found_0.pt", weights_only=False)[
            "parameters"
        ].items()
    }
    assert adapter.keys() == trained.keys()
    for name, value in trained.items():
        assert adapter[name].norm() > 0
        assert torch.equal(adapter[name], value), name
    assert KILLS[mode]


def test_a_checkpoint_that_was_about_to_be_replaced_is_put_back(tmp_path: Path) -> None:
    from octopus_trl.train.checkpoint import clear_staging, publish

    staged = tmp_path / STAGING / "checkpoint-1"
    staged.mkdir(parents=True)
    (staged / "model.bin").write_text("weights")
    publish(staged, tmp_path / "checkpoint-1", facts={"global_step": 1, "world_size": 1})
    # Killed between the two renames of `publish`.
    (tmp_path / "checkpoint-1").rename(tmp_path / STAGING / "checkpoint-1.older")
    assert last_checkpoint(tmp_path) is None
    clear_staging(tmp_path)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    assert not (tmp_path / STAGING).exists()


def values(found: dict[str, Any], name: str) -> list[Any]:
    return [entry[name] for entry in found["log"] if name in entry]
