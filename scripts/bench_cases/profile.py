"""Where the time of a few steps goes, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from .clock import timed

STEPS = 10
ROWS = 45


def write_profile(path: Path, step: Callable[[], Any], *, steps: int = STEPS) -> None:
    """Profile calls and write a table, longest first, with what the device was busy for."""
    activities, order = [ProfilerActivity.CPU], "self_cpu_time_total"
    if torch.cuda.is_available():
        activities, order = [*activities, ProfilerActivity.CUDA], "self_device_time_total"
    with torch.profiler.profile(activities=activities) as profiler, timed() as seconds:
        for _ in range(steps):
            step()
    events = profiler.key_averages()
    busy_ms = sum(event.self_device_time_total for event in events) / 1e3 / steps
    head = (
        f"{steps} steps under the profiler, {seconds.value * 1e3 / steps:.3f} ms each, "
        f"device busy {busy_ms:.3f} ms of it\n\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + events.table(sort_by=order, row_limit=ROWS, max_name_column_width=90))
