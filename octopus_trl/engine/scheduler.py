"""Turns over time: admission, chunked prefill, draws, decode, pauses.

One step feeds at most a chunk of given tokens, oldest turns first, then draws and feeds one token
of every turn that has been given all. So a turn that draws waits for one chunk between two of its
tokens, however much text the others are given, and the oldest turn that is given text gets on at
every step. While no turn draws, every other one gets a chunk. Which turns share a step changes when
a token comes, never which.

When pages run out the youngest turns pause: they give back all that they grew, wait with the others
in the order of their tickets, and are fed the same tokens again when there is room. The oldest turn
never pauses, so something always gets done; a turn that nobody can make room for is refused.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from typing import TypeVar

from octopus_trl.engine.batch import Growth
from octopus_trl.engine.pages import Slots
from octopus_trl.engine.primitives import Primitives
from octopus_trl.engine.runner import Runner
from octopus_trl.engine.sampler import Draw, draw
from octopus_trl.engine.turn import Ended, Turn
from octopus_trl.errors import OctopusError, PagesExhausted, PoolExhausted, StaleVersion
from octopus_trl.protocols import Finished, FinishReason

T = TypeVar("T")


class Scheduler:
    """Runs turns to their ends.

    Args:
        epoch: gives the engine's present epoch; a turn of another one ends in an error.

    Attributes:
        exact: what a paused turn had drawn is fed again one token a step, as it was at first, so
            that every bit comes out the same: on a CPU. Otherwise in chunks, which is faster.
    """

    def __init__(self, runner: Runner, primitives: Primitives, epoch: Callable[[], int]) -> None:
        self._runner, self._primitives, self._epoch = runner, primitives, epoch
        self.exact = runner.memory.device.type == "cpu"
        self._waiting: list[Turn] = []  # both in the order of tickets, oldest first
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
        """Queue a turn; a parked state that it starts from begins to come back beside the passes
        that run before it.
        """
        turn.cursor._turn = turn.ticket
        self._runner.tree.states.fetch(turn.cursor._tail)
        self._waiting.append(turn)

    def cancel(self, ticket: int, *, keep: bool = True) -> Turn | None:
        """Take a turn out; its cursor keeps what was drawn, or is untouched if nothing was.

        Args:
            keep: feed again what a paused turn had drawn; without room for it the turn is left
                with nothing.
        """
        for queue in (self._waiting, self._running):
            for turn in queue:
                if turn.ticket == ticket:
                    if keep and turn.tokens and turn.fed < turn.length:
                        self._catch_up(turn)
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
            self._work()

    def _work(self) -> None:
        """Feed a chunk of given tokens, then a token of every turn that draws."""
        pending = [turn for turn in self._running if turn.fed < self._to_prefill(turn)]
        chunk = self._runner.prefill_chunk
        left = chunk if len(pending) < len(self._running) else len(pending) * chunk
        for turn in pending:
            count = min(chunk, self._to_prefill(turn) - turn.fed)
            if turn.growth is not None and count <= left:
                self._prefill(turn)
                left -= count
        ready = [turn for turn in self._running if turn.fed >= self._to_prefill(turn)]
        width = self._runner.max_width
        for lo in range(0, len(ready), width):
            self._decode([turn for turn in ready[lo : lo + width] if turn.growth is not None])

    def _refuse_stale(self) -> None:
        epoch = self._epoch()
        for turn in [*self._waiting, *self._running]:
            if turn.cursor._tail.epoch != epoch:
                self._fail(turn, StaleVersion("the weights changed while the turn ran"))

    # Room

    def _admit(self) -> None:
        while self._waiting:
            turn = self._waiting[0]
            try:
                self._begin(turn, spare=sum(map(self._pages_to_come, self._running)))
            except PoolExhausted as error:
                if self._running:
                    return  # what a running turn takes may be free when it has ended
                self._fail(turn, error)
            except Exception as error:  # noqa: BLE001 one turn's failure stays its own
                self._fail(turn, error)
            else:
                self._waiting.pop(0)
                insort(self._running, turn, key=lambda turn: turn.ticket)

    def _begin(self, turn: Turn, *, spare: int = 0) -> None:
        """Start the node of a turn that fits with all its known tokens and one more.

        Args:
            spare: pages that must stay free beside it, or it would soon have to pause again.
        """
        cursor = turn.cursor
        with self._runner.counters.timed("admit"):
            growth = self._runner.begin(
                cursor._tail,
                cursor._pending,
                cursor._position,
                self._epoch(),
                num_tokens=turn.length + 1,
                spare=spare,
            )
            try:
                if not turn.given:
                    growth.hidden = self._runner.ensure_hidden(cursor._tail)
            except BaseException:
                self._runner.abort(growth)
                raise
            turn.growth = growth

    def _pages_to_come(self, turn: Turn) -> int:
        """Count the pages that a running turn needs for what it knows and one token more."""
        assert turn.growth is not None
        return self._runner.pages_for(turn.growth, turn.length + 1 - turn.fed)

    def _within(self, turn: Turn, work: Callable[[], T]) -> T | None:
        """Do work that takes pages, with younger turns paused until it finds room.

        Returns None where `turn` itself had to pause for older ones, or was refused because no
        other turn could make room.
        """
        while True:
            try:
                return work()
            except PagesExhausted as error:
                younger = [other for other in self._running if other.ticket > turn.ticket]
                giver = next(filter(self._holds_pages, reversed(younger)), None)
                if giver is not None:
                    self._pause(giver)
                elif self._running[0] is not turn:
                    self._pause(turn)
                    return None
                else:
                    self._fail(turn, error)
                    return None

    def _holds_pages(self, turn: Turn) -> bool:
        assert turn.growth is not None
        return self._runner.tree.pages.frees(turn.growth.node.ranges)

    def _pause(self, turn: Turn) -> None:
        """Take a running turn back to where it began; its draws are kept and fed again later."""
        assert turn.growth is not None
        growth, turn.growth, turn.fed = turn.growth, None, 0
        self._leave(growth)
        self._runner.abort(growth)
        self._running.remove(turn)
        insort(self._waiting, turn, key=lambda turn: turn.ticket)
        self._runner.counters.preempted += 1

    def _catch_up(self, turn: Turn) -> None:
        """Feed all that a paused turn had drawn at once, if there is room."""
        if turn.cursor._tail.epoch != self._epoch():
            return
        try:
            with self._runner.evaluating():
                if turn.growth is None:
                    self._begin(turn)
                growth = turn.growth
                assert growth is not None
                self._feed_known(turn, growth)
        except BaseException as error:
            growth, turn.growth, turn.fed = turn.growth, None, 0
            if growth is not None:
                self._runner.abort(growth)
            if not isinstance(error, PoolExhausted):
                raise

    def _feed_known(self, turn: Turn, growth: Growth) -> None:
        """Feed all tokens that a turn knows, as they were fed before it paused."""
        while turn.fed < self._to_prefill(turn):
            self._feed_chunk(turn, growth)
        while turn.fed < turn.length:
            slots = self._runner.reserve(growth)
            self._runner.decode([growth], turn.known(turn.fed, turn.fed + 1), [slots])
            self._advance(turn, 1)

    # Passes

    def _to_prefill(self, turn: Turn) -> int:
        """Count the first known tokens that go in chunks."""
        return len(turn.given) if self.exact else turn.length

    def _prefill(self, turn: Turn) -> None:
        growth = turn.growth
        assert growth is not None
        try:
            with self._runner.counters.timed("prefill"):
                self._within(turn, lambda: self._feed_chunk(turn, growth))
        except BaseException as error:
            self._fail(turn, error)
            if not isinstance(error, Exception):
                raise

    def _next_chunk(self, turn: Turn, most: int) -> list[int]:
        """Give the next known tokens to feed at once, at most `most`."""
        # Given tokens and drawn ones never share a chunk: the grid stays what it was at first.
        end = len(turn.given) if turn.fed < len(turn.given) else turn.length
        return turn.known(turn.fed, min(end, turn.fed + most))

    def _feed_chunk(self, turn: Turn, growth: Growth) -> None:
        chunk = self._next_chunk(turn, self._runner.prefill_chunk)
        self._runner.prefill(growth, chunk)
        self._advance(turn, len(chunk))

    def _advance(self, turn: Turn, count: int) -> None:
        """Count tokens that went through: for the first time, or again after a pause."""
        counters, given = self._runner.counters, len(turn.given)
        if turn.fed == turn.reached > given:  # the common case
            turn.fed = turn.reached = turn.fed + count
            counters.decoded += count
            return
        again = max(0, min(turn.fed + count, turn.reached) - turn.fed)
        turn.fed += count
        counters.miss("paused", again)
        if turn.fed > turn.reached:
            if turn.reached < given <= turn.fed:
                counters.miss("first_seen", given)
            if turn.reached <= given < turn.fed:
                counters.began(turn.cursor, given)
            if turn.fed > given:
                counters.decoded += turn.fed - max(given, turn.reached)
            turn.reached = turn.fed

    def _decode(self, turns: list[Turn]) -> None:
        """Feed one token to each turn: what it drew before it paused, or a new draw."""
        drawn = self._draw([turn for turn in turns if turn.fed == turn.length])
        rows: list[tuple[Turn, Growth, int, Slots]] = []
        for turn in turns:
            growth = turn.growth
            if growth is None:
                continue  # it paused for one before it
            token, logp = drawn.get(turn.ticket, (0, 0.0))
            if turn.fed < turn.length:
                [token] = turn.known(turn.fed, turn.fed + 1)
            elif not math.isfinite(logp):
                self._fail(turn, OctopusError("the model gave logits that are not finite"))
                continue
            slots = self._reserve(turn, growth)
            if slots is not None:
                rows.append((turn, growth, token, slots))
        if not rows:
            return
        try:
            with self._runner.counters.timed("decode"):
                self._runner.decode(
                    [row[1] for row in rows], [row[2] for row in rows], [row[3] for row in rows]
                )
        except BaseException as error:
            for turn, *_ in rows:
                self._fail(turn, error)
            if not isinstance(error, Exception):
                raise
            return
        for turn, *_ in rows:
            if turn.fed == turn.length:
                token, logp = drawn[turn.ticket]
                turn.tokens.append(token)
                turn.logps.append(logp)
            self._advance(turn, 1)
            if turn.fed < turn.length:
                continue
            if turn.tokens[-1] in turn.until:
                self._finish(turn, "stop")
            elif len(turn.tokens) >= turn.params.max_tokens:
                self._finish(turn, "length")

    def _reserve(self, turn: Turn, growth: Growth) -> Slots | None:
        try:
            return self._within(turn, lambda: self._runner.reserve(growth))
        except OctopusError as error:
            self._fail(turn, error)
            return None

    def _draw(self, turns: list[Turn]) -> dict[int, tuple[int, float]]:
        """Draw a token and its log-probability for each turn, by ticket."""
        if not turns:
            return {}
        wanted = [
            Draw(turn.growth.hidden, turn.params, turn.seed, len(turn.tokens))
            for turn in turns
            if turn.growth is not None and turn.growth.hidden is not None
        ]
        with self._runner.counters.timed("sample"):
            drawn = draw(wanted, self._runner.logits, width=self._runner.width(len(turns)))
        return {turn.ticket: pair for turn, pair in zip(turns, drawn, strict=True)}

    # Ends

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
        """Freeze what a turn grew, or take it back if its given tokens are not all through.

        What it had drawn and holds no more, because it was paused, is forgotten.
        """
        turn.cursor._turn = None
        kept = max(0, turn.fed - len(turn.given))
        del turn.tokens[kept:], turn.logps[kept:]
        growth, turn.growth = turn.growth, None
        if growth is None:
            return
        self._leave(growth)
        if growth.node.tokens and turn.fed >= len(turn.given):
            self._primitives.advance(turn.cursor, self._runner.finish(growth))
        else:
            self._runner.abort(growth)

    def _leave(self, growth: Growth) -> None:
        """Forget a growth that is about to end."""
