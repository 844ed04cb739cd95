"""What a training run left in its folder, as rows of figures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octopus_trl.errors import ConfigError

STATE = "trainer_state.json"


@dataclass(frozen=True, slots=True)
class Run:
    """The logged steps of one run.

    Attributes:
        name: last part of its folder.
        rows: one mapping a logged step, ascending, each with `step`.
    """

    name: str
    rows: list[dict[str, Any]]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Give the steps at which `key` was logged as a finite number, and its values."""
        points = [
            (int(row["step"]), float(row[key]))
            for row in self.rows
            if isinstance(row.get(key), int | float) and math.isfinite(row[key])
        ]
        return [step for step, _ in points], [value for _, value in points]


def read_run(folder: Path) -> Run:
    """Read a run's log: of the folder itself, or of its latest checkpoint.

    Raises:
        ConfigError: no log is there, it is cut, or it holds no step.
    """
    found = [folder / STATE, *sorted(folder.glob(f"checkpoint-*/{STATE}"), key=_step_of)[::-1]]
    path = next((path for path in found if path.is_file()), None)
    if path is None:
        raise ConfigError(
            f"{folder}: holds no {STATE} and no checkpoint with one; give the output_dir of a run"
        )
    try:
        log = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        rows = [row for row in log if "loss" in row or "reward" in row]
        rows.sort(key=lambda row: int(row["step"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is no trainer state ({error}); is the file whole?") from error
    if not rows:
        raise ConfigError(f"{path}: no step was logged yet; set logging_steps: 1")
    return Run(folder.resolve().name, rows)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Average each value with up to `window - 1` before it."""
    return [
        sum(values[max(0, at + 1 - window) : at + 1]) / min(window, at + 1)
        for at in range(len(values))
    ]


def _step_of(path: Path) -> int:
    number = path.parent.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1
