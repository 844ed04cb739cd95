"""Means and peaks over the tokens of one optimizer step, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Meter:
    """Sums, counts and largest values under fixed names.

    The names are given once and are the same on every rank, so that one sum and one maximum over
    ranks hold them all.
    """

    def __init__(self, means: Iterable[str], peaks: Iterable[str] = ()) -> None:
        self._means, self._peaks = tuple(means), tuple(peaks)
        self.clear()

    def clear(self) -> None:
        """Forget everything seen."""
        self._totals = {name: [0.0, 0.0] for name in self._means}
        self._largest = dict.fromkeys(self._peaks, float("-inf"))

    def add(self, name: str, total: float, count: float) -> None:
        """Add `count` values that sum to `total` to a mean."""
        entry = self._totals[name]
        entry[0] += float(total)
        entry[1] += float(count)

    def peak(self, name: str, value: float) -> None:
        """Raise a largest value."""
        self._largest[name] = max(self._largest[name], float(value))

    def totals(self, name: str) -> tuple[float, float]:
        """Give the sum and the count of a mean on this rank."""
        total, count = self._totals[name]
        return total, count

    def reduce(self, accelerator: Any) -> dict[str, float]:
        """Give every mean and peak over all ranks; names without a value are left out.

        Every rank must call it; the collectives are two, whatever was seen.
        """
        if accelerator.num_processes > 1:
            self._gather(accelerator)
        found = {name: total / count for name, (total, count) in self._totals.items() if count > 0}
        found |= {name: value for name, value in self._largest.items() if value > float("-inf")}
        return found

    def _gather(self, accelerator: Any) -> None:
        wide = torch.float32 if accelerator.device.type == "mps" else torch.float64
        flat = [value for name in self._means for value in self._totals[name]]
        sums = torch.tensor(flat, dtype=wide, device=accelerator.device)
        sums = accelerator.reduce(sums, reduction="sum").tolist()
        self._totals = {name: [sums[2 * i], sums[2 * i + 1]] for i, name in enumerate(self._means)}
        if self._peaks:
            largest = torch.tensor(
                [self._largest[name] for name in self._peaks], dtype=wide, device=accelerator.device
            )
            gathered = accelerator.gather(largest).view(-1, len(self._peaks)).max(dim=0).values
            self._largest = dict(zip(self._peaks, gathered.tolist(), strict=True))
