"""What a mixer asks of the pass that it runs in: packed (training) or paged (generation).

One patched model serves both. A context travels as the keyword `octopus` through the model's own
forward to every mixer; it holds metadata only, so that it survives gradient checkpointing of both
kinds (a tensor that needs a gradient must never hide in it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from octopus_trl.shapes import ConvTail, Hidden, Keys, Queries, RecurrentState, Values


@dataclass(frozen=True, slots=True)
class LevelRows:
    """Rows lo:hi that one recurrent call covers, as runs.

    Attributes:
        cu_seqlens: [R + 1] int64, run boundaries counted from `lo`.
        single: every run holds exactly one row (a decode step).
    """

    lo: int
    hi: int
    cu_seqlens: Tensor
    single: bool


def by_level(
    levels: Sequence[LevelRows], *tensors: Tensor
) -> Iterator[tuple[LevelRows, tuple[Tensor, ...]]]:
    """Give each level its rows of some tensors [T, ...].

    One split for all of them, whose gradient is one concatenation; a slice a level would fill as
    many zeros as the whole row has, a level.
    """
    sizes = [level.hi - level.lo for level in levels]
    yield from zip(levels, zip(*(x.split(sizes) for x in tensors)), strict=True)


class Carry(Protocol):
    """Hands states from run to run within the forward of one recurrent layer."""

    def load(self, level: int) -> tuple[ConvTail, RecurrentState]:
        """Give the convolution tail and state that each run of a level starts from."""

    def store(self, level: int, tail: ConvTail, state: RecurrentState) -> None:
        """Keep the tail and state that each run of a level ended with."""


class Context(Protocol):
    """One pass over rows of tokens."""

    @property
    def input_ids(self) -> Tensor:
        """[1, T] int64."""

    @property
    def position_ids(self) -> Tensor:
        """[1, T] int64, arbitrary order."""

    @property
    def levels(self) -> list[LevelRows]:
        """Recurrent schedule: all rows in order, each level needs only what earlier ones stored."""

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scale: float) -> Queries:
        """Attend from every row to what it sees on this layer; q and k carry their rotation."""

    def carry(self, layer: int, tail_dtype: Any) -> Carry:
        """Begin a recurrent layer's forward; the carry lives only as long as that forward."""

    def finish(self, hidden: Hidden, head: nn.Module) -> Any:
        """Turn the last hidden states [T, d] into the model's output."""
