"""What the rows of a fused pass see: from growing nodes to the attention work on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octopus_trl.engine.pages import Slots
from octopus_trl.engine.slot_table import SlotTable
from octopus_trl.engine.staging import Array, Device
from octopus_trl.engine.worklist import Run, WorkLayout, WorkList, WorkLists
from octopus_trl.kernels import select
from octopus_trl.kernels._decode_tuning import Tuning
from octopus_trl.maths.decode_attention import AttentionWork
from octopus_trl.models.spec import ModelSpec

WHOLE = 1 << 30  # a chunk that never ends


@dataclass(frozen=True, slots=True)
class WorkShape:
    """How a device's kernel takes its work; see `WorkList`.

    Attributes:
        num_kv_heads, group: KV heads, and query heads of each.
        head_dim: of the layers; None where the references run, which take any work.
        processors: of the device.
        alone: every run reads its text alone and each part of it in one sweep, so that how a row's
            sums are split depends on its own chain only.
    """

    num_kv_heads: int
    group: int
    head_dim: int | None = None
    processors: int = 132
    alone: bool = False

    @classmethod
    def of(cls, spec: ModelSpec, place: torch.device, *, alone: bool) -> WorkShape:
        """Ask the kernel and the device."""
        group = spec.num_heads // spec.num_kv_heads
        if place.type != "cuda":
            return cls(spec.num_kv_heads, group, alone=alone)
        processors = torch.cuda.get_device_properties(place).multi_processor_count
        return cls(spec.num_kv_heads, group, spec.head_dim, processors, alone)

    def lists(self, layout: WorkLayout, table: SlotTable, *, both: bool) -> WorkLists:
        """Make the work lists of one pass, cut as the kernel of its number of rows wants it.

        Args:
            both: some attention layers lie outside the mount set.
        """
        programs, share, readers = self.processors, 0.5, max(1, 128 // self.group)
        if self.head_dim is not None:
            tuning = Tuning.of(self.head_dim, layout.max_rows)
            programs, share = programs * tuning.programs, tuning.share
            readers = tuning.readers_per_tile(self.group)
        return WorkLists(
            [
                WorkList(
                    layout,
                    table,
                    readers_per_tile=readers,
                    num_kv_heads=self.num_kv_heads,
                    num_programs=programs,
                    mounts=mounts,
                    share=share,
                    chunk=WHOLE if self.alone else None,
                    alone=self.alone,
                )
                for mounts in ([True, False] if both else [True])
            ]
        )


class DeviceTable(SlotTable):
    """A slot table and the tensor on the device that mirrors it.

    Attributes:
        slots: [capacity + 1] int32; queue: [1] int32, see `AttentionWork`.
        resets: how often all places were taken back.
    """

    def __init__(self, device: Device, capacity: int) -> None:
        self.resets = 0
        super().__init__(capacity)
        self._device = device
        self.slots = torch.zeros(capacity + 1, dtype=torch.int32, device=device.place)
        self.queue = torch.zeros(1, dtype=torch.int32, device=device.place)

    def reset(self) -> None:
        """Take every place back."""
        super().reset()
        self.resets += 1

    def send(self) -> None:
        """Start the copies of what changed."""
        for lo, hi in self.take_dirty():
            host = self._device.host_buffer(4 * (hi - lo)).view(torch.int32)
            host.numpy()[:] = self.mirror[lo:hi]
            self._device.launch(_copy(self.slots[lo:hi], host))


def _copy(target: Tensor, source: Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


class PackedWork:
    """The work lists of a pass as arrays of a packed buffer.

    Args:
        both: see `WorkShape.lists`.
    """

    def __init__(
        self, shape: WorkShape, table: DeviceTable, layout: WorkLayout, *, both: bool
    ) -> None:
        self._shape, self._table, self._both = shape, table, both
        self.layout = layout
        names = ["work", "tree_work"] if both else ["work"]
        self.fields = [(name, "int32", self.layout.size) for name in names]

    def lists(self) -> WorkLists:
        """Make empty lists that fit."""
        return self._shape.lists(self.layout, self._table, both=self._both)

    def bind(self, views: dict[str, Tensor]) -> Callable[[], tuple[AttentionWork, AttentionWork]]:
        """Make the call that brings the slot table up to date and gives the work of layers in the
        mount set and of the others.
        """
        table = self._table
        append = select("append_slots", table.slots.device)
        parts = [self.layout.views(views[name]) for name, *_ in self.fields]
        appends = [part.pop("appends") for part in parts]
        works = [AttentionWork(**part, slots=table.slots, queue=table.queue) for part in parts]

        def ready() -> tuple[AttentionWork, AttentionWork]:
            append(table.slots, appends=appends[0])
            return works[0], works[-1]

        return ready

    def pad(self, views: dict[str, Tensor]) -> None:
        """Make the work nothing at all, on the device alone."""
        for name, *_ in self.fields:
            views[name].zero_()
            self.layout.views(views[name])["appends"][:, 0] = self._table.capacity

    def write(self, lists: WorkLists, arrays: dict[str, Array]) -> None:
        """Copy planned lists into a packed buffer and send their new text."""
        for (name, *_), one in zip(self.fields, lists.lists, strict=True):
            arrays[name][:] = one.packed
        self._table.send()


class StepWork:
    """The work of decode steps: planned when rows come or go, and let grow in between.

    Args:
        table: shared by all widths and launch groups.
    """

    def __init__(
        self, shape: WorkShape, table: DeviceTable, widths: Sequence[int], *, both: bool
    ) -> None:
        self._table = table
        self._packed = {
            width: PackedWork(shape, table, WorkLayout(width), both=both) for width in widths
        }
        self._lists: dict[tuple[int, int], WorkLists] = {}
        # For each launch group what was planned last: its width, rows and the table's resets.
        self._last: dict[int, tuple[int, list[int], int]] = {}

    def fields(self, width: int) -> list[tuple[str, str, int]]:
        """List the arrays for a number of rows."""
        return self._packed[width].fields

    def bind(self, width: int, views: dict[str, Tensor]) -> Callable[[], tuple[Any, Any]]:
        """Make the call that gives a step of some width its work."""
        return self._packed[width].bind(views)

    def pad(self, width: int, views: dict[str, Tensor]) -> None:
        """Make the work of a step nothing at all, on the device alone."""
        self._packed[width].pad(views)

    def fill(
        self, growths: Sequence[Any], width: int, group: int, arrays: dict[str, Array]
    ) -> None:
        """Write what the growing nodes of a step see; each has grown by one slot since its last.

        Args:
            group: number of the launch among those of one iteration.
        """
        key, rows = (width, group), [growth.serial for growth in growths]
        if key not in self._lists:
            self._lists[key] = self._packed[width].lists()
        lists = self._lists[key]
        if self._last.get(group) == (width, rows, self._table.resets):
            lists.advance(np.array([growth.seen.last for growth in growths], dtype=np.int64))
        else:
            lists.plan([run_of(growth) for growth in growths])
        self._last[group] = (width, rows, self._table.resets)
        self._packed[width].write(lists, arrays)

    def forget(self) -> None:
        """Plan anew and send everything again: a pass failed, or the device's memory is new."""
        self._last.clear()
        self._table.reset()


def run_of(growth: Any, num_rows: int = 1, own: Slots | None = None) -> Run:
    """Say what the last rows of a growing node see.

    Args:
        own: slots of the growing text; None takes the node's.
    """
    return Run(
        growth.serial,
        growth.spans,
        growth.seen.slots(mounted=True) if own is None else own,
        num_rows,
        growth.mounted,
    )
