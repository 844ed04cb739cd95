"""The slot table: where the places that attention reads lie in the pools (host integers only).

A device tensor holds, for every stretch of text that rows of a pass see, its slots one after
another. The host keeps a mirror and hands out which part of it changed, so that a long shared
prefix is sent once. Stretches are found again by the identity of their arrays.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octopus_trl.engine.pages import Slots

_LONG = 1024  # a stretch of this length is left where it lies; shorter neighbours are joined
_ROOM = 256  # places kept free behind text that grows
_GAP = 1024  # changed parts nearer than this are sent as one
_MOST_KNOWN = 4096  # sequences whose places are remembered

Stretch = tuple[int, int]  # first place, and number of slots


class TableFull(Exception):
    """No place is left behind the last stretch; `SlotTable.reset` starts over."""


@dataclass(slots=True)
class _Growing:
    lo: int
    room: int


class SlotTable:
    """Places of stretches, given out one behind the other and all taken back at once.

    Attributes:
        capacity: places; twice the live slots keep resets rare.
        mirror: [capacity + 1] int32, what the device's table must hold. Nobody reads the last
            place; padding writes there.
        num_resets: times that everything was forgotten.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.mirror = np.zeros(capacity + 1, dtype=np.int32)
        self.num_resets = -1
        self.reset()

    def reset(self) -> None:
        """Forget every place; whatever is placed next is sent again.

        Called when the table is full, and when what was sent may not have arrived: after a pass
        that failed, or after the device's tensors were given back.
        """
        self.num_resets += 1
        self._used = 0
        self._dirty: list[tuple[int, int]] = []
        self._at: dict[int, int] = {}
        self._kept: dict[int, Slots] = {}  # an array that is kept keeps its identity
        self._known: dict[tuple[int, ...], list[Stretch]] = {}
        self._growing: dict[Hashable, _Growing] = {}

    def place(self, spans: Sequence[Slots], *, whole: bool = False) -> list[Stretch]:
        """Give the places of frozen text, in few stretches.

        Args:
            spans: slots of each part; the same array objects for the same parts.
            whole: in one stretch, wherever the parts lie already.
        Raises:
            TableFull: nothing is left.
        """
        key = (whole, *map(id, spans))
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            spans = [span for span in spans if len(span)]
            self._kept.update(zip(map(id, spans), spans, strict=True))
            if whole:
                self._known[key] = [self.join(spans)] if spans else []
            else:
                self._known[key] = self._stretches(spans)
        return self._known[key]

    def grow(self, key: Hashable, own: Slots) -> Stretch:
        """Place text that grows, with room behind it, and send what changed since the last time.

        Returns:
            Its first place, and the number of slots that fit there.
        Raises:
            TableFull: nothing is left.
        """
        length = len(own)
        growing = self._growing.get(key)
        if growing is None or length >= growing.room:
            room = max(_ROOM, length + length // 2)
            growing = _Growing(self._take(room), room)
            self._growing[key] = growing
            changed = 0
        else:
            differs = self.mirror[growing.lo : growing.lo + length] != own
            changed = int(differs.argmax()) if length and differs.any() else length
        if changed < length:
            lo = growing.lo + changed
            self.mirror[lo : growing.lo + length] = own[changed:]
            self._dirty.append((lo, growing.lo + length))
        return growing.lo, growing.room

    def join(self, spans: Sequence[Slots]) -> Stretch:
        """Place text in one stretch that only the next pass reads.

        Raises:
            TableFull: nothing is left.
        """
        length = sum(map(len, spans))
        lo = self._take(length)
        np.concatenate(spans, out=self.mirror[lo : lo + length], casting="unsafe")
        self._dirty.append((lo, lo + length))
        return lo, length

    def set(self, places: npt.NDArray[np.int64], slots: Slots) -> None:
        """Write places that the device writes by itself; they are not sent."""
        self.mirror[places] = slots

    def take_dirty(self) -> list[tuple[int, int]]:
        """Give the ranges of `mirror` that changed since the last call, as (lo, hi)."""
        ranges: list[tuple[int, int]] = []
        for lo, hi in sorted(self._dirty):
            if ranges and lo - ranges[-1][1] < _GAP:
                ranges[-1] = (ranges[-1][0], max(hi, ranges[-1][1]))
            else:
                ranges.append((lo, hi))
        self._dirty = []
        return ranges

    def _stretches(self, spans: Sequence[Slots]) -> list[Stretch]:
        """Leave long text where it lies and bring short neighbours together."""
        parts: list[tuple[int, int, list[Slots]]] = []  # place or -1, length, arrays
        for span in spans:
            lo, length = self._at.get(id(span), -1), len(span)
            if parts and lo >= 0 and parts[-1][0] >= 0 and sum(parts[-1][:2]) == lo:
                parts[-1] = (parts[-1][0], parts[-1][1] + length, [*parts[-1][2], span])
            else:
                parts.append((lo, length, [span]))
        stretches: list[Stretch] = []
        short: list[tuple[int, int, list[Slots]]] = []
        for part in [*parts, (0, _LONG, [])]:
            if part[0] < 0 or part[1] < _LONG:
                short.append(part)
                continue
            if len(short) == 1 and short[0][0] >= 0:
                stretches.append(short[0][:2])
            elif short:
                stretches.append(self._write([span for _, _, spans in short for span in spans]))
            short = []
            if part[2]:
                stretches.append(part[:2])
        return stretches

    def _write(self, spans: Sequence[Slots]) -> Stretch:
        lo, length = self.join(spans)
        place = lo
        for span in spans:
            self._at[id(span)] = place
            place += len(span)
        return lo, length

    def _take(self, count: int) -> int:
        if self._used + count > self.capacity:
            raise TableFull
        self._used += count
        return self._used - count
