"""Captured work keeps its place among what is launched before and after it, on a stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from octopus_trl.engine import captures
from octopus_trl.engine.captures import Captures


class Stream:
    def __init__(self) -> None:
        self.awaited: list[Any] = []

    def wait_stream(self, other: Any) -> None:
        self.awaited.append(other)


@pytest.mark.parametrize("fails", [False, True])
def test_what_comes_after_a_rehearsal_waits_for_it_also_where_it_fails(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, side = Stream(), Stream()
    monkeypatch.setattr(captures, "_side_stream", lambda place: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())

    def run() -> None:
        assert (side.awaited, current.awaited) == ([current], [])
        if fails:
            raise MemoryError

    with pytest.raises(MemoryError) if fails else nullcontext():
        Captures(torch.device("cpu")).rehearse(run)
    assert current.awaited == [side]


def test_a_first_capture_that_fails_leaves_no_pool_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pool without a graph cannot be captured into again."""
    used: list[object] = []

    @contextmanager
    def graph(made: object, *, pool: object, **named: object) -> Iterator[None]:
        used.append(pool)
        yield

    monkeypatch.setattr(captures, "_side_stream", lambda place: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda place: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)

    def fail() -> None:
        raise MemoryError

    made = Captures(torch.device("cpu"))
    with pytest.raises(MemoryError):
        made.capture(fail)
    made.capture(object)
    with pytest.raises(MemoryError):
        made.capture(fail)
    made.capture(object)
    assert used[0] is not used[1]
    assert used[1] is used[2] is used[3]
