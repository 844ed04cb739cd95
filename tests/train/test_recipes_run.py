"""Every recipe of the shipped policy runs, and what it is about shows in its figures.

`pytest --slow -s tests/train/test_recipes_run.py` prints the figures of each.
"""

from __future__ import annotations

import json
import math
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from octopus_trl.train.records import read_generations
from tests.tolerances import KL_CPU

ROOT = Path(__file__).parents[2]
RECIPES = {
    path.stem.removeprefix("config_"): path
    for path in sorted((ROOT / "recipes/tiny-hybrid/grpo").glob("*.yaml"))
}
# Two updates on one group of four each; reuse makes four updates of one generation of two groups.
SHORT = {"max_steps": 2, "per_device_train_batch_size": 4, "save_strategy": "no"}
LONGER = {"off_policy": {"max_steps": 4}}
SHOWN = (
    "reward",
    "grad_norm",
    "rollout_kl/mean",
    "rollout_kl/mounted",
    "clip_ratio/region_mean",
    "ratio/max",
    "importance_weight/mean",
    "credit/change",
    "credit/clipped_share",
    "credit/read_share",
)
# Systems without a thread that mounts another.
NO_MOUNTS = {"compact", "flat", "hidden", "summary", "transcript"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_of_the_shipped_policy_trains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SHORT, **LONGER.get(name, {}), "output_dir": tmp_path / "run"}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(RECIPES[name]), *words])
    began = time.monotonic()
    assert runpy.run_path("scripts/train.py")["main"]() == 0
    seconds = time.monotonic() - began

    state = json.loads((tmp_path / "run/trainer_state.json").read_text())
    steps = [entry for entry in state["log_history"] if "loss" in entry]
    assert len(steps) == settings["max_steps"]
    for step in steps:
        figures = {key: step[key] for key in SHOWN if key in step}
        print(f"{name}, step {step['step']}, {seconds:.0f} s in all: {figures}")  # noqa: T201
    recipe = yaml.safe_load(RECIPES[name].read_text())
    assert all(math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"]) for step in steps)
    check(name, steps, recipe)
    traces = read_generations(tmp_path / "run")
    assert any(trace.mounts[at] for trace in traces for at in range(len(trace.segments))) is (
        name not in NO_MOUNTS
    )


def check(name: str, steps: list[dict[str, Any]], recipe: dict[str, Any]) -> None:
    """Hold the figures to what the recipe is about."""
    first = steps[0]
    if name == "drop_mounts":
        assert first["rollout_kl/mounted"] > 1e3 * KL_CPU
        assert first["rollout_kl/unmounted"] <= KL_CPU
    else:
        assert all(step["rollout_kl/mean"] <= KL_CPU for step in steps if "reward" in step)
    assert ("credit/change" in first) is ("credit" in recipe)
    if name == "off_policy":
        # Two halves of a generation, then both again: no update has moved the first one.
        assert first["ratio/max"] == pytest.approx(1.0, abs=1e-4)
        assert first["clip_ratio/region_mean"] == 0.0
        moved = steps[0]["grad_norm"] > 0  # a group of equal rewards moves nothing
        assert (steps[2]["ratio/max"] > 1.0001) is (moved or steps[1]["grad_norm"] > 0)
    else:
        assert first["ratio/max"] == pytest.approx(1.0, abs=1e-4)
