"""What a terminal shows of a run: a bar where there is one, a line a step everywhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

# log key -> (short name, format)
SHOWN = {
    "loss": ("loss", "{:.4f}"),
    "reward": ("reward", "{:.3f}"),
    "eval_reward": ("eval reward", "{:.3f}"),
    "episode/forks": ("forks", "{:.1f}"),
    "episode/mounts": ("mounts", "{:.1f}"),
    "episode/rewinds": ("rewinds", "{:.2f}"),
    "packing/dedup_ratio": ("dedup", "{:.1f}"),
    "rollout_kl/mean": ("KL", "{:.1e}"),
    "grad_norm": ("grad", "{:.2g}"),
}


class ShowProgress(TrainerCallback):
    """Draws steps and episodes with the time left; without a terminal only prints lines."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bars: Progress | None = None
        self._steps: Any = None
        self._episodes: Any = None
        self._began = time.monotonic()
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock and, on a terminal, the bars."""
        self._began, self._first_step = time.monotonic(), state.global_step
        if not state.is_world_process_zero or not sys.stderr.isatty():
            return
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._steps = self._bars.add_task(
            "steps", total=state.max_steps, completed=state.global_step
        )
        self._episodes = self._bars.add_task("episodes", total=None)
        self._bars.start()

    def on_episode(self, done: int, total: int, trace: Any) -> None:
        """Move the bar of the running generation; the trainer calls it as each episode ends."""
        if self._bars is not None:
            self._bars.update(self._episodes, completed=done, total=total)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar of steps."""
        if self._bars is not None:
            self._bars.update(self._steps, completed=state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Print the figures of a step on one line."""
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        parts = [f"step {state.global_step}/{state.max_steps}", *shown(logs)]
        left = self.seconds_left(state)
        if left is not None:
            parts.append(f"{clock(left)} left")
        self._console.print("  ".join(parts), soft_wrap=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the bars away."""
        self.close()

    def close(self) -> None:
        """Take the bars away, also after an error."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def seconds_left(self, state: Any) -> float | None:
        """Estimate the time to the last step from the steps so far."""
        done = state.global_step - self._first_step
        if done < 1:
            return None
        return (time.monotonic() - self._began) / done * (state.max_steps - state.global_step)


def shown(logs: Mapping[str, Any]) -> list[str]:
    """Pick the figures that one line has room for."""
    return [
        f"{short} {form.format(logs[key])}"
        for key, (short, form) in SHOWN.items()
        if isinstance(logs.get(key), int | float)
    ]


def clock(seconds: float) -> str:
    """Write a time as h:mm:ss."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
