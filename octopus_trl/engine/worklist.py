"""From the rows of a pass to the work of its attention kernel (host integers only).

Rows that see the same stretches form a group; a group's text is cut into chunks, and an item is one
chunk and the readers of one tile, so that a key is read from memory once however many rows see it.
The structure is made when rows or mounts change; in between only lengths grow.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octopus_trl.engine.pages import Slots
from octopus_trl.engine.slot_table import SlotTable, TableFull
from octopus_trl.engine.work_cut import cut, order_of
from octopus_trl.engine.work_layout import WorkLayout
from octopus_trl.errors import ConfigError

Ints = npt.NDArray[np.int64]

# Slots that sharing a text must save; below, each row reads it by itself. The next is taken where
# the layout is too small, and with the last no row shares anything.
_LEAST_SAVED = [256, 4096, 1 << 40]
_MOST_GROWTH = 256  # tokens until the structure is made again
_MOST_TRIES = 24  # longer and longer items until they fit the layout


@dataclass(frozen=True, slots=True)
class Run:
    """One chain in a pass.

    Attributes:
        key: names the text that grows, the same while it grows.
        spans: slots of the frozen text on the chain; the same array objects every time.
        own: slots of the growing text, those of this pass included.
        num_rows: rows of this pass, the last tokens of `own`; row j sees
            ``own[: len(own) - num_rows + 1 + j]``.
        mounted: slots of frozen text that is seen by mount, by layers of the mount set only.
    """

    key: Hashable
    spans: Sequence[Slots]
    own: Slots
    num_rows: int = 1
    mounted: Sequence[Slots] = ()


@dataclass(slots=True)
class _Pieces:
    """Text and its readers, before it is cut: each field one entry a piece.

    Attributes:
        lo, slots: places in the table.
        first, readers: their range in the list of reading rows.
        seen: slots that the first reader sees; each later one sees one more.
    """

    lo: list[int]
    slots: list[int]
    first: list[int]
    readers: list[int]
    seen: list[int]

    def add(self, lo: int, slots: int, first: int, readers: int, seen: int) -> None:
        self.lo.append(lo)
        self.slots.append(slots)
        self.first.append(first)
        self.readers.append(readers)
        self.seen.append(seen)


class WorkList:
    """The work of one kind of attention layer.

    Args:
        readers_per_tile: most readers of an item.
        num_kv_heads: items are worked on once a KV head.
        num_programs: programs that share the work on the device.
        mounts: whether these layers see mounted text.
        share: part of a program's work that an item is.
        chunk: slots of an item; None balances the programs.
        alone: no row shares anything, so that how a row's sums are split depends on its chain only
            (with a chunk that does not depend on the rows beside it).

    Attributes:
        packed: [layout.size] int32, changed in place.
        num_changed: leading entries of `packed` that changed in the last call.
    """

    def __init__(
        self,
        layout: WorkLayout,
        table: SlotTable,
        *,
        readers_per_tile: int,
        num_kv_heads: int,
        num_programs: int = 132,
        mounts: bool = True,
        share: float = 0.5,
        chunk: int | None = None,
        alone: bool = False,
    ) -> None:
        self.layout, self.table, self.mounts = layout, table, mounts
        self.packed = np.zeros(layout.size, dtype=np.int32)
        self.num_changed = layout.size
        self._views = layout.views(self.packed)
        self._per_tile = readers_per_tile
        self._kv_heads, self._programs, self._chunk = num_kv_heads, num_programs, chunk
        self._alone, self._share = alone, share
        self._own_items = self._places = np.empty(0, dtype=np.int64)
        self._left = 0
        self._clear_appends()

    @property
    def num_items(self) -> int:
        """Items in force."""
        return int(self._views["counts"][0])

    def plan(self, runs: Sequence[Run]) -> None:
        """Make the structure for some runs.

        Raises:
            ConfigError: more rows than the layout has room for.
            TableFull: the slot table has to be reset first.
        """
        num_rows = sum(run.num_rows for run in runs)
        if num_rows > self.layout.max_rows:
            raise ConfigError(
                f"the pass has {num_rows} rows, must be at most {self.layout.max_rows}: raise "
                "max_rows or pass fewer rows"
            )
        for least in _LEAST_SAVED:  # the more is shared, the more partial results there are
            pieces, rows, own = self._gather(runs, least)
            cuts = self._cut(pieces)
            if cuts is not None:
                self._fill(pieces, rows, own, cuts)
                return
        raise ConfigError(
            f"{num_rows} rows do not fit {self.layout.max_items} items and "
            f"{self.layout.max_partials} partials: raise max_items and max_partials"
        )

    def advance(self, slots: Slots) -> bool:
        """Let each run's own text grow by one slot.

        Args:
            slots: [runs], in the order of `plan`; all runs have one row.
        Returns:
            False where the room has ended: nothing was changed, `plan` must be called instead.
        """
        if self._left <= 0:
            return False
        self._left -= 1
        items, count = self._views["items"], len(slots)
        items[self._own_items, 1] += 1
        items[self._own_items, 4] += 1
        self.table.set(self._places, slots)
        appends = self._views["appends"]
        appends[:count, 0] = self._places
        appends[:count, 1] = slots
        self._places += 1
        self.num_changed = self.layout.offsets["items"] + 8 * self.num_items
        return True

    def _gather(
        self, runs: Sequence[Run], least: int
    ) -> tuple[_Pieces, npt.NDArray[np.int64], list[tuple[int, int, int]]]:
        """Group what runs see by its readers and place it in the table.

        Returns:
            The pieces, the reading rows that they point into, and for each run the piece of its
            growing text with its first place and its room.
        """
        firsts = np.cumsum([0, *(run.num_rows for run in runs)]).tolist()
        everyone_alone = self._alone or least == _LEAST_SAVED[-1]
        readers: dict[int, int] = {}  # array -> bits of the runs that share it
        arrays: dict[int, Slots] = {}
        for number, run in enumerate(runs):
            if everyone_alone or self._fills_tiles(run):
                continue
            bit, seen = 1 << number, self._seen(run)
            names = list(map(id, seen))
            arrays.update(zip(names, seen, strict=True))
            for name in names:
                readers[name] = readers.get(name, 0) | bit
        groups: dict[int, list[Slots]] = {}
        for name, bits in readers.items():
            groups.setdefault(bits, []).append(arrays[name])
        private: list[list[Slots]] = [[] for _ in runs]
        pieces, rows = _Pieces([], [], [], [], []), list(range(firsts[-1]))
        for bits, spans in groups.items():
            members = _members(bits)
            if (len(members) - 1) * sum(map(len, spans)) < least:
                for number in members:
                    private[number].extend(spans)
                continue
            first = len(rows)
            for number in members:
                rows.extend(range(firsts[number], firsts[number + 1]))
            for lo, length in self.table.place(spans):
                pieces.add(lo, length, first, len(rows) - first, length)
        own: list[tuple[int, int, int]] = []
        for number, run in enumerate(runs):
            first, count = firsts[number], run.num_rows
            if self._fills_tiles(run):
                lo, length = self.table.join([*self._seen(run), run.own])
                own.append((len(pieces.lo), lo, 0))
                pieces.add(lo, length, first, count, length - count + 1)
                continue
            mine = self._seen(run) if everyone_alone else private[number]
            for lo, length in self.table.place(mine, whole=everyone_alone):
                pieces.add(lo, length, first, count, length)
            lo, room = self.table.grow(run.key, run.own)
            own.append((len(pieces.lo), lo, room))
            pieces.add(lo, len(run.own), first, count, len(run.own) - count + 1)
        return pieces, np.asarray(rows, dtype=np.int64), own

    def _fills_tiles(self, run: Run) -> bool:
        """Whether a run's rows fill tiles by themselves: they read all they see in one sweep."""
        return 2 * run.num_rows > max(2, self._per_tile)

    def _seen(self, run: Run) -> Sequence[Slots]:
        return [*run.spans, *run.mounted] if self.mounts and run.mounted else run.spans

    def _cut(self, pieces: _Pieces) -> tuple[Ints, Ints] | None:
        """Choose the chunks: piece and first slot of each; None where no cut fits the layout."""
        slots = np.asarray(pieces.slots, dtype=np.int64)
        readers = np.asarray(pieces.readers, dtype=np.int64)
        tiles = -(-readers // self._per_tile)
        share, chunk = self._share, self._chunk
        for _ in range(_MOST_TRIES):
            piece, begin = cut(
                slots,
                readers,
                per_tile=self._per_tile,
                programs=max(1, self._programs // self._kv_heads),
                share=share,
                chunk=chunk,
            )
            num_items, num_partials = int(tiles[piece].sum()), int(readers[piece].sum())
            if num_items <= self.layout.max_items and num_partials <= self.layout.max_partials:
                return piece, begin
            share, chunk = 2 * share, chunk and 4 * chunk
        return None

    def _fill(
        self,
        pieces: _Pieces,
        rows: npt.NDArray[np.int64],
        own: Sequence[tuple[int, int, int]],
        cuts: tuple[Ints, Ints],
    ) -> None:
        """Write items, readers and bounds."""
        lo, slots, first, readers, seen = (
            np.asarray(field, dtype=np.int64)
            for field in (pieces.lo, pieces.slots, pieces.first, pieces.readers, pieces.seen)
        )
        tiles = -(-readers // self._per_tile)
        per_tile = -(-readers // np.maximum(1, tiles))
        chunk_piece, chunk_begin = cuts
        last_of = np.append(np.diff(chunk_piece) > 0, True)[: len(chunk_piece)]
        ends = np.where(last_of, slots[chunk_piece], np.append(chunk_begin[1:], 0)[: len(last_of)])
        counts = tiles[chunk_piece]
        chunk = np.repeat(np.arange(len(counts)), counts)
        tile = np.arange(len(chunk)) - np.repeat(np.cumsum(counts) - counts, counts)
        piece, begin = chunk_piece[chunk], chunk_begin[chunk]
        offset = tile * per_tile[piece]
        items = np.zeros((len(piece), 8), dtype=np.int64)
        items[:, 0] = lo[piece] + begin
        items[:, 1] = ends[chunk] - begin
        items[:, 3] = np.minimum(per_tile[piece], readers[piece] - offset)
        items[:, 4] = seen[piece] + offset - begin
        whole = seen[piece] == slots[piece]
        items[whole, 4] = items[whole, 1]
        order = order_of(items[:, 1], tiles[piece] > 1)
        items, piece, offset = items[order], piece[order], offset[order]
        items[:, 2] = np.cumsum(items[:, 3]) - items[:, 3]

        start = first[piece] + offset
        reading = np.arange(int(items[:, 3].sum())) + np.repeat(start - items[:, 2], items[:, 3])
        row = rows[reading]
        by_row = np.argsort(row, kind="stable")
        views = self._views
        views["counts"][0] = len(items)
        views["items"][: len(items)] = items
        views["readers"][: len(row), 0] = row
        views["readers"][by_row, 1] = np.arange(len(row))
        per_row = np.bincount(row, minlength=self.layout.max_rows)
        views["bounds"][0] = 0
        np.cumsum(per_row, out=views["bounds"][1:])
        self._clear_appends()
        self.num_changed = self.layout.offsets["readers"] + 2 * len(row)

        # The last chunk of each run's own text is the one that grows.
        last = np.full(len(lo), -1, dtype=np.int64)
        ends = items[:, 0] + items[:, 1] == (lo + slots)[piece]
        last[piece[ends]] = np.flatnonzero(ends)
        mine = np.asarray([entry[0] for entry in own], dtype=np.int64)
        self._own_items = last[mine] if len(mine) else mine
        self._places = np.asarray([entry[1] for entry in own], dtype=np.int64) + slots[mine]
        room = min((entry[2] for entry in own), default=0)
        left = [entry[2] - pieces.slots[entry[0]] for entry in own]
        single = len(rows) == 0 or all(pieces.readers[entry[0]] == 1 for entry in own)
        self._left = min(_MOST_GROWTH, *left) if left and room and single else 0

    def _clear_appends(self) -> None:
        self._views["appends"][:, 0] = self.table.capacity
        self._views["appends"][:, 1] = 0


class WorkLists:
    """The work of the layers in the mount set and, where those are not all, of the others.

    Args:
        lists: one, or the one with mounts and the one without; over one table.
    """

    def __init__(self, lists: Sequence[WorkList]) -> None:
        self.lists, self.table = tuple(lists), lists[0].table
        self._runs: list[Run] = []
        self._grown: list[Slots] = []

    def plan(self, runs: Sequence[Run]) -> None:
        """Make the structure of every list; due when rows, mounts or a run's rows change.

        Raises:
            ConfigError: the layout or the table has too little room.
        """
        self._runs, self._grown = list(runs), []
        try:
            self._plan()
        except TableFull:
            self.table.reset()
            try:
                self._plan()
            except TableFull:
                raise ConfigError(
                    f"the slot table has {self.table.capacity} places, fewer than the pass reads: "
                    "raise its capacity"
                ) from None

    def advance(self, slots: Slots) -> None:
        """Let each run's own text grow by one slot, in the order of `plan`."""
        self._grown.append(np.array(slots))
        if not all(one.advance(slots) for one in self.lists):
            grown = np.stack(self._grown, 1)
            self.plan(
                [
                    Run(run.key, run.spans, np.concatenate([run.own, more]), 1, run.mounted)
                    for run, more in zip(self._runs, grown, strict=True)
                ]
            )

    def _plan(self) -> None:
        for one in self.lists:
            one.plan(self._runs)


def _members(bits: int) -> list[int]:
    """List the positions of the set bits."""
    members = []
    while bits:
        low = bits & -bits
        members.append(low.bit_length() - 1)
        bits ^= low
    return members
