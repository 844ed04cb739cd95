"""Turns over time: admission, chunked prefill, draws, decode.

One step feeds one chunk to every turn that still has given tokens, then draws and feeds one token
of every other turn. Which turns share a step changes when a token comes, never which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octopus_trl.engine.batch import Growth
from octopus_trl.engine.cursor import Cursor
from octopus_trl.engine.pages import Slots
from octopus_trl.engine.primitives import Primitives
from octopus_trl.engine.runner import Runner
from octopus_trl.engine.sampler import Draw, draw
from octopus_trl.errors import OctopusError, StaleVersion, StatesExhausted
from octopus_trl.protocols import Finished, FinishReason, SamplingParams


@dataclass(eq=False, slots=True)
class Turn:
    """One submitted turn.

    Attributes:
        given: tokens to feed before the first draw; the first `fed` are through.
        until: ids that end the turn.
        growth: the node it grows, from admission on.
        tokens, logps: drawn and fed.
    """

    ticket: int
    cursor: Cursor
    given: list[int]
    params: SamplingParams
    until: frozenset[int]
    seed: int
    growth: Growth | None = None
    fed: int = 0
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)


class Ended(NamedTuple):
    """A turn's end, and the exception behind an error."""

    finished: Finished
    error: BaseException | None


class Scheduler:
    """Runs turns to their ends.

    Args:
        epoch: gives the engine's present epoch; a turn of another one ends in an error.
    """

    def __init__(self, runner: Runner, primitives: Primitives, epoch: Callable[[], int]) -> None:
        self._runner, self._primitives, self._epoch = runner, primitives, epoch
        self._waiting: list[Turn] = []
        self._running: list[Turn] = []
        self._unclaimed: list[Ended] = []

    @property
    def is_idle(self) -> bool:
        """Whether no turn is queued or running."""
        return not (self._waiting or self._running)

    @property
    def has_work(self) -> bool:
        """Whether a turn's end has not been handed out."""
        return not self.is_idle or bool(self._unclaimed)

    @property
    def growing(self) -> list[Growth]:
        """Nodes that running turns grow."""
        return [turn.growth for turn in self._running if turn.growth is not None]

    def submit(self, turn: Turn) -> None:
        """Queue a turn."""
        turn.cursor._turn = turn.ticket
        self._waiting.append(turn)

    def cancel(self, ticket: int) -> Turn | None:
        """Take a turn out; its cursor keeps what was drawn, or is untouched if nothing was."""
        for queue in (self._waiting, self._running):
            for turn in queue:
                if turn.ticket == ticket:
                    queue.remove(turn)
                    self._end(turn)
                    return turn
        return None

    def step(self) -> list[Ended]:
        """Run one iteration; returns the turns that ended and were not handed out before."""
        self._iterate()
        ended, self._unclaimed = self._unclaimed, []
        return ended

    def run(self, tickets: Sequence[int]) -> list[Ended]:
        """Run until some turns have ended; what ends beside them is kept for `step`."""
        done: dict[int, Ended] = {}
        while len(done) < len(tickets):
            self._iterate()
            for ended in self._unclaimed:
                if ended.finished.ticket in tickets:
                    done[ended.finished.ticket] = ended
            self._unclaimed = [e for e in self._unclaimed if e.finished.ticket not in done]
        return [done[ticket] for ticket in tickets]

    def _iterate(self) -> None:
        if self.is_idle:
            return
        with self._runner.counters.timed("step"), self._runner.evaluating():
            self._refuse_stale()
            self._admit()
            for turn in [turn for turn in self._running if turn.fed < len(turn.given)]:
                self._prefill(turn)
            ready = [turn for turn in self._running if turn.fed == len(turn.given)]
            width = self._runner.max_width
            for lo in range(0, len(ready), width):
                self._draw_and_feed(ready[lo : lo + width])

    def _refuse_stale(self) -> None:
        epoch = self._epoch()
        for turn in [*self._waiting, *self._running]:
            if turn.cursor._tail.epoch != epoch:
                self._fail(turn, StaleVersion("the weights changed while the turn ran"))

    def _admit(self) -> None:
        while self._waiting:
            turn = self._waiting[0]
            cursor = turn.cursor
            try:
                with self._runner.counters.timed("admit"):
                    turn.growth = self._runner.begin(
                        cursor._tail,
                        cursor._pending,
                        cursor._position,
                        self._epoch(),
                        num_tokens=len(turn.given),
                    )
                    if not turn.given:
                        turn.growth.hidden = self._runner.ensure_hidden(cursor._tail)
            except StatesExhausted as error:
                if self._running:
                    return  # a running turn frees its slot when it ends
                self._fail(turn, error)
            except Exception as error:  # noqa: BLE001 one turn's failure stays its own
                self._fail(turn, error)
            else:
                self._waiting.pop(0)
                self._running.append(turn)

    def _prefill(self, turn: Turn) -> None:
        assert turn.growth is not None
        chunk = turn.given[turn.fed : turn.fed + self._runner.prefill_chunk]
        try:
            with self._runner.counters.timed("prefill"):
                self._runner.prefill(turn.growth, chunk)
        except BaseException as error:
            self._fail(turn, error)
            if not isinstance(error, Exception):
                raise
            return
        turn.fed += len(chunk)
        if turn.fed == len(turn.given):
            self._runner.counters.prefilled += len(turn.given)

    def _draw_and_feed(self, turns: list[Turn]) -> None:
        counters, width = self._runner.counters, self._runner.width(len(turns))
        wanted = [
            Draw(turn.growth.hidden, turn.params, turn.seed, len(turn.tokens))
            for turn in turns
            if turn.growth is not None and turn.growth.hidden is not None
        ]
        with counters.timed("sample"):
            drawn = draw(wanted, self._runner.logits, width=width)
        rows: list[tuple[Turn, Growth, int, float, Slots]] = []
        for turn, (token, logp) in zip(turns, drawn, strict=True):
            assert turn.growth is not None
            if not math.isfinite(logp):
                self._fail(turn, OctopusError("the model gave logits that are not finite"))
                continue
            try:
                slots = self._runner.reserve(turn.growth)
            except OctopusError as error:
                self._fail(turn, error)
            else:
                rows.append((turn, turn.growth, token, logp, slots))
        if not rows:
            return
        try:
            with counters.timed("decode"):
                self._runner.decode(
                    [row[1] for row in rows], [row[2] for row in rows], [row[4] for row in rows]
                )
        except BaseException as error:
            for turn, *_ in rows:
                self._fail(turn, error)
            if not isinstance(error, Exception):
                raise
            return
        for turn, _, token, logp, _ in rows:
            turn.tokens.append(token)
            turn.logps.append(logp)
            if token in turn.until:
                self._finish(turn, "stop")
            elif len(turn.tokens) >= turn.params.max_tokens:
                self._finish(turn, "length")

    def _finish(self, turn: Turn, reason: FinishReason) -> None:
        self._running.remove(turn)
        self._end(turn)
        self._runner.counters.turns += 1
        self._unclaimed.append(Ended(Finished(turn.ticket, turn.tokens, turn.logps, reason), None))

    def _fail(self, turn: Turn, error: BaseException) -> None:
        for queue in (self._waiting, self._running):
            if turn in queue:
                queue.remove(turn)
        self._end(turn)
        text = f"{type(error).__name__}: {error}"
        failed = Finished(turn.ticket, turn.tokens, turn.logps, "error", text)
        self._unclaimed.append(Ended(failed, error))

    def _end(self, turn: Turn) -> None:
        """Freeze what a turn grew, or take it back if its given tokens are not all through."""
        turn.cursor._turn = None
        growth, turn.growth = turn.growth, None
        if growth is None:
            return
        if growth.node.tokens and turn.fed == len(turn.given):
            self._primitives.advance(turn.cursor, self._runner.finish(growth))
        else:
            self._runner.abort(growth)
