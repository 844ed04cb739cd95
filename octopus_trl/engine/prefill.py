"""Prefill through the fused pass: runs of tokens of several chains at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octopus_trl.engine.batch import Growth
from octopus_trl.engine.pages import Slots
from octopus_trl.engine.row_work import DeviceTable, PackedWork, WorkShape, run_of
from octopus_trl.engine.staging import Device, Layout, Staging
from octopus_trl.engine.worklist import Run, WorkLayout
from octopus_trl.models.fused import FusedModel, TokenRows

_LEAST = 64  # rows of the smallest layout; each next one holds four times as many


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


class PrefillPass:
    """Feeds parts, at most `max_rows` tokens at once.

    Args:
        num_slots: token slots of the pool.
        both: see `WorkShape.lists`.
    """

    def __init__(
        self,
        fused: FusedModel,
        device: Device,
        shape: WorkShape,
        *,
        max_rows: int,
        num_slots: int,
        both: bool,
    ) -> None:
        self.max_rows, self._num_lists = max_rows, 1 + both
        self._capacity = self._num_lists * places_for(num_slots)
        self._fused, self._device = fused, device
        self._table = DeviceTable(device, self._capacity)
        self._works: dict[int, PackedWork] = {}
        rows = min(_LEAST, max_rows)
        while rows not in self._works:
            layout = WorkLayout(rows, max_items=2 * rows + 512, max_partials=4 * rows + 1024)
            self._works[rows] = PackedWork(shape, self._table, layout, both=both)
            rows = min(4 * rows, max_rows)
        layouts = {rows: Layout(_fields(rows) + work.fields) for rows, work in self._works.items()}
        self._layouts = layouts
        self._staging = Staging(device, max(layout.nbytes for layout in layouts.values()))

    def holds(self, parts: Sequence[Part]) -> bool:
        """Whether one pass can take these parts; one of at most `max_rows` tokens always fits."""
        places = self._num_lists * sum(part.num_places for part in parts)
        return len(parts) == 1 or (
            sum(len(part.tokens) for part in parts) <= self.max_rows and places <= self._capacity
        )

    def __call__(self, parts: Sequence[Part]) -> Tensor:
        """Run one pass; [parts, d], hidden states after the last token of each."""
        lengths = [len(part.tokens) for part in parts]
        num, runs = sum(lengths), len(parts)
        size = next(rows for rows in self._works if rows >= num)
        layout, work = self._layouts[size], self._works[size]
        _, host = self._staging.write()
        arrays = {name: field.of_host(host) for name, field in layout.fields.items()}
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        arrays["bounds"][: runs + 1] = bounds
        arrays["last"][:runs] = bounds[1:] - 1
        arrays["read_states"][:runs] = [part.growth.read_slot for part in parts]
        arrays["write_states"][:runs] = [part.write_slot or 0 for part in parts]
        for part, lo, hi in zip(parts, bounds[:-1], bounds[1:], strict=True):
            arrays["tokens"][lo:hi] = part.tokens
            arrays["positions"][lo:hi] = np.arange(part.position, part.position + hi - lo)
            arrays["slots"][lo:hi] = -1 if part.replay else part.slots
        self._table.reset()
        lists = work.lists()
        lists.plan([_run_of(part) for part in parts])
        work.write(lists, arrays)
        self._fused.cover(max(part.position + len(part.tokens) for part in parts))
        self._staging.send(layout.nbytes)
        views = {
            name: field.of_device(self._staging.buffer) for name, field in layout.fields.items()
        }
        works = work.bind(views)
        hidden = torch.empty(
            runs, self._fused.spec.hidden_size, dtype=self._fused.memory.dtype,
            device=self._device.place,
        )  # fmt: skip

        def run() -> None:
            seen, tree_seen = works()
            rows = TokenRows(
                views["tokens"][:num],
                views["positions"][:num],
                views["slots"][:num],
                seen,
                tree_seen,
                views["read_states"][:runs],
                views["write_states"][:runs],
                views["bounds"][: runs + 1],
            )
            torch.index_select(self._fused(rows), 0, views["last"][:runs], out=hidden)

        self._device.launch(run)
        return hidden


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
        ("positions", "int32", rows),
        ("slots", "int32", rows),
    ]
