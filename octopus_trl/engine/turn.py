"""One turn from its submission to its end (host only)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from octopus_trl.engine.batch import Growth
from octopus_trl.engine.cursor import Cursor
from octopus_trl.protocols import Finished, SamplingParams


@dataclass(eq=False, slots=True)
class Turn:
    """One submitted turn.

    Attributes:
        given: tokens to feed before the first draw.
        until: ids that end the turn.
        growth: the node it grows, while it runs.
        tokens, logps: drawn.
        fed: tokens of `given` and then of `tokens` that the node holds.
        reached: most that was ever fed; less is fed again after a pause.
    """

    ticket: int
    cursor: Cursor
    given: list[int]
    params: SamplingParams
    until: frozenset[int]
    seed: int
    growth: Growth | None = None
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    fed: int = 0
    reached: int = 0

    @property
    def length(self) -> int:
        """Tokens that are known so far."""
        return len(self.given) + len(self.tokens)

    def known_at(self, place: int) -> int | None:
        """Give one known token, None where none is known yet."""
        cut = len(self.given)
        if place < cut:
            return self.given[place]
        return self.tokens[place - cut] if place - cut < len(self.tokens) else None

    def known(self, lo: int, hi: int) -> list[int]:
        """Give the known tokens lo:hi."""
        cut = len(self.given)
        return [*self.given[lo:hi], *self.tokens[max(0, lo - cut) : max(0, hi - cut)]]


class Ended(NamedTuple):
    """A turn's end, and the exception behind an error."""

    finished: Finished
    error: BaseException | None
