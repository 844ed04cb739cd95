"""What a mixer asks of the pass that it runs in: packed (training) or paged (generation).

One patched model serves both. A context travels as the keyword `octopus` through the model's own
forward to every mixer; it holds metadata only, so that it survives gradient checkpointing of both
kinds (a tensor that needs a gradient must never hide in it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from octopus_trl.shapes import ConvTail, Hidden, Keys, Queries, RecurrentState, Values


@dataclass(frozen=True, slots=True)
class LevelRows:
    """Rows lo:hi (steps where a pass has `Steps`) that one recurrent call covers, as runs.

    Attributes:
        cu_seqlens: [R + 1] int64, run boundaries counted from `lo`.
        single: every run holds exactly one row (a decode step).
    """

    lo: int
    hi: int
    cu_seqlens: Tensor
    single: bool


@dataclass(frozen=True, slots=True)
class Steps:
    """What recurrent layers step through where that is not the rows of the pass in their order: a
    reader's state may step through rows that another thread has computed.

    Attributes:
        rows: [S] int64, the row whose inputs each step takes.
        own: [T] int64, the step whose output is each row's.
        cut: [S] bool, steps that give no gradient to the inputs they take; None for no such step.
    """

    rows: Tensor
    own: Tensor
    cut: Tensor | None = None

    def inputs(self, x: Tensor) -> Tensor:
        """Give the inputs [S, ...] of all steps from those of the rows [T, ...]."""
        taken = x.index_select(0, self.rows)
        if self.cut is None:
            return taken
        return torch.where(self.cut.view(-1, *[1] * (x.dim() - 1)), taken.detach(), taken)


def by_level(
    levels: Sequence[LevelRows], *tensors: Tensor, steps: Steps | None = None
) -> Iterator[tuple[LevelRows, tuple[Tensor, ...]]]:
    """Give each level its rows of some tensors [T, ...], or the inputs of its steps.

    One split for all levels, whose gradient is one concatenation; a slice a level would fill as
    many zeros as the whole row has, a level.
    """
    if steps is not None:
        tensors = tuple(steps.inputs(x) for x in tensors)
    sizes = [level.hi - level.lo for level in levels]
    yield from zip(levels, zip(*(x.split(sizes) for x in tensors)), strict=True)


def own_outputs(outs: Sequence[Tensor], steps: Steps | None) -> Tensor:
    """Join the outputs of all levels, and drop those of steps through other threads' rows."""
    joined = outs[0] if len(outs) == 1 else torch.cat(list(outs))
    return joined if steps is None else joined.index_select(0, steps.own)


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
        """Recurrent schedule: all steps in order, each level needs only what earlier ones
        stored.
        """

    @property
    def steps(self) -> Steps | None:
        """What the recurrent schedule steps through, None for the rows as they are."""

    def attend(self, layer: int, q: Queries, k: Keys, v: Values, scale: float) -> Queries:
        """Attend from every row to what it sees on this layer; q and k carry their rotation."""

    def carry(self, layer: int, tail_dtype: Any) -> Carry:
        """Begin a recurrent layer's forward; the carry lives only as long as that forward."""

    def finish(self, hidden: Hidden, head: nn.Module) -> Any:
        """Turn the last hidden states [T, d] into the model's output."""
