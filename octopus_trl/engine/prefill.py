"""Prefill through the fused pass: runs of tokens of several chains at once.

A pass launches some 900 kernels, which takes the host far longer than short text takes the device.
So a pass of few tokens is padded to one of few sizes and replayed as a CUDA graph, which reads all
that differs from pass to pass from the staging buffer. Padding rows belong to no run: no other row
sees them, and nothing of theirs is kept. Padding runs are empty: they carry the zero state to the
zero state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octopus_trl.engine.batch import Growth
from octopus_trl.engine.captures import CapturedPasses
from octopus_trl.engine.counters import Counters
from octopus_trl.engine.pages import Slots
from octopus_trl.engine.row_work import DeviceTable, PackedWork, WorkShape, run_of
from octopus_trl.engine.staging import Array, Device, Layout, Staging
from octopus_trl.engine.states import ZERO_SLOT
from octopus_trl.engine.worklist import Run, WorkLayout
from octopus_trl.kernels._chunks import can_capture, chunk_table, most_chunks
from octopus_trl.models.fused import FusedModel, TokenRows

# Passes of more tokens run operation by operation, and 0 lets every pass do so. On an H200 on
# 2026-12-01 a pass of Qwen3.5-4B over 32,768 tokens of context took the host 64 ms; captured, 7 ms
# for up to 64 rows, 17 for 512 and 56 for 2,048, of which 53 are the device's.
MOST_CAPTURED = 2048
_LEAST = 64  # rows of the smallest size; each next one holds twice as many
_RUNS = (1, 4, 16, 64)  # runs of a padded pass; more run operation by operation


@dataclass(slots=True)
class Part:
    """Consecutive tokens of one chain.

    Attributes:
        slots: places of the tokens, which `growth` does not see yet.
        write_slot: state slot for the end; None for a model without recurrent layers.
        replay: the keys and values are in their places already.
    """

    growth: Growth
    tokens: Sequence[int]
    position: int
    slots: Slots
    write_slot: int | None
    replay: bool = False

    @property
    def num_places(self) -> int:
        """Most places of the slot table that a list takes for it."""
        growth = self.growth
        seen = sum(map(len, growth.spans)) + sum(map(len, growth.mounted))
        return places_for(seen + len(growth.seen.slots(mounted=True)) + len(self.tokens))


def places_for(num_seen: int) -> int:
    """Bound the places of the slot table for text that one chain sees, growing text included."""
    return 2 * num_seen + 512


class _Size(NamedTuple):
    """Rows, runs and chunks that a pass is made for."""

    rows: int
    runs: int
    chunks: int


class PrefillPass(CapturedPasses):
    """Feeds parts, at most `max_rows` tokens at once.

    Args:
        num_slots: token slots of the pool.
        both: see `WorkShape.lists`.
        capture: replay CUDA graphs where the model's kernels allow it. A size runs once operation
            by operation, so that kernels compile and are tuned on real text, and is captured the
            second time. Without, padded passes run operation by operation.
    """

    def __init__(
        self,
        fused: FusedModel,
        device: Device,
        shape: WorkShape,
        counters: Counters,
        *,
        max_rows: int,
        num_slots: int,
        both: bool,
        capture: bool,
    ) -> None:
        self.max_rows, self._num_lists = max_rows, 1 + both
        self._capacity = self._num_lists * places_for(num_slots)
        super().__init__(fused, counters)
        self._device = device
        refused = capture and fused.spec.is_hybrid and not can_capture()
        self.capture, self._most = capture and not refused, 0 if refused else MOST_CAPTURED
        # Without states a padding run costs nothing.
        self._runs = _RUNS if fused.spec.is_hybrid else _RUNS[-1:]
        self._table = DeviceTable(device, self._capacity)
        self._works: dict[int, PackedWork] = {}
        rows = min(_LEAST, max_rows)
        while rows not in self._works:
            layout = WorkLayout(rows, max_items=2 * rows + 512, max_partials=4 * rows + 1024)
            self._works[rows] = PackedWork(shape, self._table, layout, both=both)
            rows = min(2 * rows, max_rows)
        layouts = {rows: Layout(_fields(rows) + work.fields) for rows, work in self._works.items()}
        self._layouts = layouts
        self._staging = Staging(device, max(layout.nbytes for layout in layouts.values()))
        self._views = {
            rows: {
                name: field.of_device(self._staging.buffer) for name, field in layout.fields.items()
            }
            for rows, layout in layouts.items()
        }
        self._ready = {rows: work.bind(self._views[rows]) for rows, work in self._works.items()}
        # Where padded passes leave their last hidden states: no graph's own memory outlives it.
        self._ends = torch.zeros(
            _RUNS[-1], fused.spec.hidden_size, dtype=fused.memory.dtype, device=device.place
        )
        self._ran: set[_Size] = set()

    def holds(self, parts: Sequence[Part]) -> bool:
        """Whether one pass can take these parts; one of at most `max_rows` tokens always fits."""
        places = self._num_lists * sum(part.num_places for part in parts)
        return len(parts) == 1 or (
            sum(len(part.tokens) for part in parts) <= self.max_rows and places <= self._capacity
        )

    def release(self) -> None:
        """Drop the captured passes and their memory."""
        super().release()
        self._ran.clear()  # other adapters may bring other kernels

    def __call__(self, parts: Sequence[Part]) -> Tensor:
        """Run one pass; [parts, d], hidden states after the last token of each."""
        num, runs = sum(len(part.tokens) for part in parts), len(parts)
        rows = next(rows for rows in self._works if rows >= num)
        padded = self._padded(num, runs)
        size = padded or _Size(num, runs, sum(most_chunks(len(part.tokens), 1) for part in parts))
        layout, work = self._layouts[rows], self._works[rows]
        _, host = self._staging.write()
        arrays = {name: field.of_host(host) for name, field in layout.fields.items()}
        _write(parts, arrays, size)
        self._table.reset()
        lists = work.lists()
        lists.plan([_run_of(part) for part in parts])
        work.write(lists, arrays)
        self._cover(max(part.position + len(part.tokens) for part in parts))
        hidden = torch.empty(
            runs, self._fused.spec.hidden_size, dtype=self._fused.memory.dtype,
            device=self._device.place,
        )  # fmt: skip
        run = self._operations(rows, size, hidden) if padded is None else self._prepared(padded)
        self._staging.send(layout.nbytes)
        self._device.launch(run)
        if padded is not None:
            self._ran.add(padded)
            ends = self._ends[:runs]
            self._device.launch(lambda: hidden.copy_(ends))
        return hidden

    def _padded(self, num: int, runs: int) -> _Size | None:
        """Give the size that a pass is padded to; None where it runs as it is."""
        rows = next(rows for rows in self._works if rows >= num)
        if rows > self._most or runs > self._runs[-1]:
            return None
        runs = min(rows, next(most for most in self._runs if most >= runs))
        return _Size(rows, runs, most_chunks(rows, runs))

    def _prepared(self, size: _Size) -> Callable[[], object]:
        """Give the call that runs a padded pass: a graph's replay, or the operations themselves."""
        run = self._operations(size.rows, size, self._ends[: size.runs])
        if not self.capture:
            return run
        if size not in self._ran:
            return lambda: self._captures.rehearse(run)
        if size not in self._graphs:
            with self._counters.timed("capture"):
                self._graphs[size] = self._captures.capture(run)
        return self._graphs[size].replay

    def _operations(self, rows: int, size: _Size, out: Tensor) -> Callable[[], None]:
        """Give the call that runs a pass over what was sent.

        Args:
            rows: of the layout that it was sent in.
            out: [runs, d] takes the hidden states after the last row of each run.
        """
        views, works = self._views[rows], self._ready[rows]
        num_rows, runs, num_chunks = size

        def run() -> None:
            seen, tree_seen = works()
            # fla keeps what it makes of `cu_seqlens` by tensor object. One object for each time
            # that the operations run: a captured pass then makes all of it inside its graph.
            bounds = views["bounds"][: runs + 1]
            chunks = views["chunks"][: 2 * num_chunks].view(num_chunks, 2)
            pass_rows = TokenRows(
                views["tokens"][:num_rows],
                views["positions"][:num_rows],
                views["slots"][:num_rows],
                seen,
                tree_seen,
                views["read_states"][:runs],
                views["write_states"][:runs],
                bounds,
                chunks if self._fused.spec.is_hybrid else None,
            )
            torch.index_select(self._fused(pass_rows), 0, views["last"][:runs], out=out)

        return run


def _write(parts: Sequence[Part], arrays: dict[str, Array], size: _Size) -> None:
    """Write the rows and runs of a pass, and padding up to its size."""
    runs = len(parts)
    bounds = np.cumsum([0, *(len(part.tokens) for part in parts)])
    num = int(bounds[-1])
    for name, values in (
        ("bounds", bounds),
        ("last", bounds[1:] - 1),
        ("read_states", [part.growth.read_slot for part in parts]),
        ("write_states", [part.write_slot or ZERO_SLOT for part in parts]),
    ):
        arrays[name][: len(values)] = values
    arrays["bounds"][runs + 1 : size.runs + 1] = num
    arrays["last"][runs : size.runs] = 0
    arrays["read_states"][runs : size.runs] = ZERO_SLOT
    arrays["write_states"][runs : size.runs] = ZERO_SLOT
    for part, lo, hi in zip(parts, bounds[:-1], bounds[1:], strict=True):
        arrays["tokens"][lo:hi] = part.tokens
        arrays["positions"][lo:hi] = np.arange(part.position, part.position + hi - lo)
        arrays["slots"][lo:hi] = -1 if part.replay else part.slots
    arrays["tokens"][num : size.rows] = 0
    arrays["positions"][num : size.rows] = 0
    arrays["slots"][num : size.rows] = -1
    arrays["chunks"][: 2 * size.chunks] = chunk_table(bounds, size.chunks).ravel()


def _run_of(part: Part) -> Run:
    own = np.concatenate([part.growth.seen.slots(mounted=True), part.slots])
    return run_of(part.growth, len(part.tokens), own)


def _fields(rows: int) -> list[tuple[str, str, int]]:
    return [
        ("tokens", "int64", rows),
        ("bounds", "int64", rows + 1),
        ("last", "int64", rows),
        ("read_states", "int64", rows),
        ("write_states", "int64", rows),
        ("chunks", "int64", 2 * rows),
        ("positions", "int32", rows),
        ("slots", "int32", rows),
    ]
