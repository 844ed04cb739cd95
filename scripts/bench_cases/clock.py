"""Wall-clock time of work on whatever device is there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class Seconds:
    """Duration of a block, known after its end."""

    value = 0.0


@contextmanager
def timed() -> Iterator[Seconds]:
    """Time a block, the device's work included."""
    seconds = Seconds()
    sync()
    begin = time.perf_counter()
    yield seconds
    sync()
    seconds.value = time.perf_counter() - begin


def sync() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_s(call: Callable[[], Any], *, repeats: int = 3) -> float:
    """Median seconds of a call, after one that does not count."""
    call()
    return statistics.median(sample_s(call, repeats=repeats))


def sample_s(
    call: Callable[[], Any],
    *,
    repeats: int,
    after: Callable[[Any], Any] | None = None,
    before: Callable[[], Any] | None = None,
) -> list[float]:
    """Seconds of each of several calls, the device's work included.

    Args:
        before: made untimed before each call.
        after: gets what the call returned, untimed.
    """
    times = []
    for _ in range(repeats):
        if before is not None:
            before()
        with timed() as seconds:
            result = call()
        times.append(seconds.value)
        if after is not None:
            after(result)
    return times


def percentiles_s(times: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    p50, p99 = np.percentile(times, [50, 99])
    return float(p50), float(p99)


def replay_s(work: Callable[[], Any], *, repeats: int = 7) -> float:
    """Median seconds of work on a GPU, captured once and replayed: no launch from the host in it.

    Args:
        work: many launches over different data, so that neither the replay itself nor a cache
            that still holds the last one's data is what is timed.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])
