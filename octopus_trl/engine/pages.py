"""The page pool: counted pages of token slots, held as ranges (host integers only).

A page is `page_size` consecutive slots in every attention layer. A holder owns ranges
`(page, lo, hi)` of pages, not whole pages, so a page can be shared by a parent, which filled
slots 0:lo, and by the one child that went on writing behind it; other children start a page of
their own. Nothing is ever copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octopus_trl.errors import IntegrityError, PagesExhausted

Slots = npt.NDArray[np.int64]


class Range(NamedTuple):
    """Slots lo:hi of one page."""

    page: int
    lo: int
    hi: int


class PagePool:
    """Reference counts and fill marks of pages.

    Attributes:
        refs: [pages] ranges that hold each page; a page with none is free.
        fill: [pages] first slot of each page that nobody has written yet.
        peak: most pages held at once.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.refs = np.zeros(num_pages, dtype=np.int32)
        self.fill = np.zeros(num_pages, dtype=np.int32)
        self.peak = 0
        self._freed: list[int] = []  # used before and free again; reused first, memory is warm
        self._fresh = 0  # pages from here on were never used

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._freed) + self.num_pages - self._fresh

    @property
    def num_held(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - self.num_free

    def needed(self, last: Range | None, count: int) -> int:
        """Count the new pages that `count` tokens behind the range `last` take."""
        return -(-max(0, count - self._room(last)) // self.page_size)

    def grow(self, ranges: list[Range], before: Range | None, count: int) -> Slots:
        """Append room for `count` tokens to `ranges` and return their slots, in order.

        Args:
            ranges: the holder's own ranges, changed in place.
            before: last range of the holder's parent, whose partial page may be gone on with.
        Raises:
            PagesExhausted: too few free pages; nothing was changed.
        """
        last = ranges[-1] if ranges else before
        needed = self.needed(last, count)
        if needed > self.num_free:
            raise PagesExhausted(needed, self.num_free, hint="close cursors or raise num_pages")
        parts: list[Slots] = []
        if last is not None and (part := min(self._room(last), count)):
            page, lo, hi = last
            if ranges:
                ranges[-1] = Range(page, lo, hi + part)
            else:
                ranges.append(Range(page, hi, hi + part))
                self.refs[page] += 1
            self.fill[page] = hi + part
            parts.append(self._slots(page, hi, hi + part))
            count -= part
        while count:
            page, part = self._take(), min(count, self.page_size)
            ranges.append(Range(page, 0, part))
            self.refs[page], self.fill[page] = 1, part
            parts.append(self._slots(page, 0, part))
            count -= part
        self.peak = max(self.peak, self.num_held)
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    def grow_in_place(self, ranges: list[Range]) -> int | None:
        """Append room for one token in the last page and return its slot, None where it is full.

        The quick way of most decode steps; `grow` does the same.
        """
        if not ranges:
            return None
        page, lo, hi = ranges[-1]
        if hi == self.page_size or self.fill[page] != hi:
            return None
        ranges[-1] = Range(page, lo, hi + 1)
        self.fill[page] = hi + 1
        return page * self.page_size + hi

    def shrink(self, ranges: list[Range], count: int) -> None:
        """Give back the last `count` tokens of `ranges`, changed in place."""
        while count:
            page, lo, hi = ranges.pop()
            part = min(count, hi - lo)
            if part < hi - lo:
                ranges.append(Range(page, lo, hi - part))
                if self.fill[page] == hi:
                    self.fill[page] = hi - part
            else:
                self.release([Range(page, lo, hi)])
            count -= part

    def release(self, ranges: Sequence[Range]) -> None:
        """Give ranges back; the top range of a page that others hold frees its slots again."""
        for page, lo, hi in reversed(ranges):
            self.refs[page] -= 1
            if not self.refs[page]:
                self.fill[page] = 0
                self._freed.append(page)
            elif self.fill[page] == hi:
                self.fill[page] = lo

    def frees(self, ranges: Sequence[Range]) -> bool:
        """Whether releasing these ranges frees a page."""
        return any(self.refs[span.page] == 1 for span in ranges)

    def split(self, ranges: Sequence[Range], count: int) -> tuple[list[Range], list[Range]]:
        """Divide ranges after `count` tokens; a page cut in two is held twice from now on."""
        head: list[Range] = []
        tail: list[Range] = []
        for page, lo, hi in ranges:
            cut = min(hi, lo + max(0, count))
            if cut > lo:
                head.append(Range(page, lo, cut))
            if hi > cut:
                tail.append(Range(page, cut, hi))
            self.refs[page] += lo < cut < hi
            count -= hi - lo
        return head, tail

    def slots(self, ranges: Sequence[Range]) -> Slots:
        """List the slots of ranges in order, `page · page_size + offset`."""
        parts = [self._slots(*span) for span in ranges]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def check(self, holders: Sequence[Sequence[Range]]) -> None:
        """Recount everything from the ranges of all holders.

        Raises:
            IntegrityError: a count, a fill mark or the free list differs, or two ranges overlap.
        """
        refs = np.zeros_like(self.refs)
        spans: dict[int, list[tuple[int, int]]] = {}
        for ranges in holders:
            for page, lo, hi in ranges:
                if not (0 <= page < self.num_pages and 0 <= lo < hi <= self.fill[page]):
                    raise IntegrityError(f"range {(page, lo, hi)} is not within the written slots")
                refs[page] += 1
                spans.setdefault(page, []).append((lo, hi))
        if wrong := np.flatnonzero(refs != self.refs).tolist():
            page = wrong[0]
            raise IntegrityError(f"page {page} counts {self.refs[page]} holders, has {refs[page]}")
        for page, held in spans.items():
            held.sort()
            if any(first[1] > second[0] for first, second in pairwise(held)):
                raise IntegrityError(f"page {page}: ranges {held} overlap")
        if self.fill.max() > self.page_size or self.fill[self.refs == 0].any():
            raise IntegrityError("a free page has a fill mark, or a mark exceeds the page size")
        free = sorted([*self._freed, *range(self._fresh, self.num_pages)])
        if free != np.flatnonzero(self.refs == 0).tolist():
            raise IntegrityError("the free list differs from the pages that nobody holds")

    def _room(self, last: Range | None) -> int:
        """Slots left behind a range in its page, if nobody wrote there."""
        if last is None or self.fill[last.page] != last.hi:
            return 0
        return self.page_size - last.hi

    def _take(self) -> int:
        if self._freed:
            return self._freed.pop()
        self._fresh += 1
        return self._fresh - 1

    def _slots(self, page: int, lo: int, hi: int) -> Slots:
        first = page * self.page_size
        return np.arange(first + lo, first + hi, dtype=np.int64)
