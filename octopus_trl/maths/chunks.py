"""Order in which a scan meets the chunks of many runs at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Schedule(NamedTuple):
    """Chunk c of every run that has one, longest run first, then chunk c + 1.

    Attributes:
        runs: [R] int64, runs by falling length.
        sizes: runs that still have a chunk, for each chunk index.
        slots: [T] int64, place of each row among the N * L padded rows in that order.
    """

    runs: Tensor
    sizes: list[int]
    slots: Tensor

    @property
    def num_chunks(self) -> int:
        """N: chunks of all runs."""
        return sum(self.sizes)

    def restored(self, final: Tensor) -> Tensor:
        """Put values of runs, which a scan leaves in its own order, back in theirs."""
        inverse = torch.empty_like(self.runs)
        inverse[self.runs] = torch.arange(len(self.runs), device=self.runs.device)
        return final.index_select(0, inverse)

    def chunks(self, x: Tensor, length: int) -> Tensor:
        """Lay [T, H, ...] out as [N, H, L, ...]; padded rows are zero."""
        padded = x.new_zeros(self.num_chunks * length, *x.shape[1:])
        padded = padded.index_copy(0, self.slots, x)
        return padded.unflatten(0, (self.num_chunks, length)).transpose(1, 2)

    def rows(self, x: Tensor) -> Tensor:
        """Take the T real rows of [N, H, L, ...] back in the order of the pack."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.slots)


def schedule(lengths: list[int], chunk: int, device: torch.device) -> Schedule:
    """Plan a scan over runs of these lengths in chunks of `chunk` rows; a run may be empty."""
    counts = [-(-length // chunk) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda run: -counts[run])
    sizes: list[int] = []
    alive = len(order)
    for index in range(max(counts, default=0)):
        while counts[order[alive - 1]] <= index:
            alive -= 1
        sizes.append(alive)
    before = torch.tensor([0, *sizes]).cumsum(0)
    rank = torch.empty(len(order), dtype=torch.int64)
    rank[torch.tensor(order)] = torch.arange(len(order))
    length = torch.tensor(lengths)
    run = torch.repeat_interleave(torch.arange(len(order)), length)
    within = torch.arange(len(run)) - (length.cumsum(0) - length)[run]
    step = within // chunk
    slots = (before[step] + rank[run]) * chunk + within % chunk
    return Schedule(torch.tensor(order, device=device), sizes, slots.to(device))
