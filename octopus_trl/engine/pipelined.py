"""Turns on fused passes: the host runs one step behind the device.

Every turn with a lane always has one token on its way. An iteration launches the step that feeds
that token, whatever it is (a stop token is fed too), and only then waits for the step before, to
read it; so the device has the next step queued while the host looks at the last one. What is on the
host when an iteration ends is as it is after an iteration of `Scheduler`: all known tokens are fed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from octopus_trl.engine.batch import Growth
from octopus_trl.engine.fused_runner import FusedRunner
from octopus_trl.engine.graphs import Drawn, StepRow
from octopus_trl.engine.prefill import Part
from octopus_trl.engine.primitives import Primitives
from octopus_trl.engine.scheduler import Scheduler
from octopus_trl.engine.turn import Turn
from octopus_trl.errors import OctopusError

MOST_ALONG = 64  # given tokens of a turn that may go with the decode steps, one a step
# Given tokens that one iteration feeds in a pass of their own while others draw: four decode steps
# of 16 rows on an H200 (17 ms and 4.4 ms, 2026-12-01).
MOST_BESIDE = 512


class _Row(NamedTuple):
    """A turn in a launch, and which of its draws the launch makes; below 0 it is of no use."""

    turn: Turn
    growth: Growth
    number: int


class _Flight(NamedTuple):
    """A launch whose draws have not been read."""

    rows: list[_Row]
    drawn: Drawn


class PipelinedScheduler(Scheduler):
    """Runs turns to their ends on fused passes; see `Scheduler`."""

    _runner: FusedRunner

    def __init__(
        self, runner: FusedRunner, primitives: Primitives, epoch: Callable[[], int]
    ) -> None:
        super().__init__(runner, primitives, epoch)
        self.exact = runner.passes.exact
        self._lanes: dict[int, StepRow] = {}  # by serial of the growth
        self._flights: list[_Flight] = []

    def _work(self) -> None:
        flights = self._flights
        self._flights = []
        try:
            self._prefill_parts()
            self._feed_lanes()
            self._enter_lanes()
        except BaseException:
            self._flights = flights + self._flights
            raise
        while flights:
            self._land(flights.pop(0))
        if not self._running:
            self._flights.clear()  # tokens after the last one of each turn

    # Prefill

    def _prefill_parts(self) -> None:
        """Feed given tokens in one pass: as many as a chunk holds, oldest turns first.

        While turns draw there are at most `MOST_BESIDE` of them: a step comes after each such pass,
        so a turn that draws waits for one pass between two tokens, and so does the text for a step.
        Exact passes hold one chain each and keep their grid: fewer than two chunks go there.
        """
        pending = [turn for turn in self._outside() if turn.fed < self._to_prefill(turn)]
        if all(self._fits_a_lane(turn) for turn in pending):
            return
        with self._runner.counters.timed("prefill"):
            exact, chunk = self._runner.passes.exact, self._runner.prefill_chunk
            left = min(chunk, MOST_BESIDE) if self._lanes and not exact else chunk
            parts: list[tuple[Turn, Part]] = []
            for turn in pending:
                # Where a chain is cut may depend on the others only if its bits may.
                part = self._part(turn, chunk if exact else left)
                if part is None:
                    continue
                if not self._runner.passes.prefill.holds([part, *(part for _, part in parts)]):
                    self._runner.give_back(part)
                    break
                parts.append((turn, part))
                left -= len(part.tokens)
                if exact:
                    self._pass(parts)
                    parts = []
                if left <= 0 and (self._lanes or not exact):
                    break
            self._pass(parts)

    def _outside(self) -> list[Turn]:
        """List the running turns without a lane."""
        if len(self._lanes) == len(self._running):
            return []
        return [turn for turn in self._running if self._lane(turn) is None]

    def _fits_a_lane(self, turn: Turn) -> bool:
        """Whether the tokens that a turn still has to be given go with the decode steps.

        A pass for few tokens costs the turns that decode about two steps; fed one a step they cost
        nothing but their own turn's time.
        """
        left = self._to_prefill(turn) - turn.fed
        return left <= 0 or (not self.exact and left <= min(len(self._lanes), MOST_ALONG))

    def _part(self, turn: Turn, most: int) -> Part | None:
        """Make room for a turn's next tokens, at most `most`."""
        growth = turn.growth
        if growth is None:
            return None  # it paused for one before it
        chunk = self._next_chunk(turn, most)
        try:
            return self._within(turn, lambda: self._runner.reserve_chunk(growth, chunk))
        except OctopusError as error:
            self._fail(turn, error)
            return None

    def _pass(self, parts: Sequence[tuple[Turn, Part]]) -> None:
        parts = [(turn, part) for turn, part in parts if turn.growth is part.growth]
        if not parts:
            return
        try:
            self._runner.feed([part for _, part in parts])
        except BaseException as error:
            for turn, _ in parts:
                self._fail(turn, error)
            if not isinstance(error, Exception):
                raise
            return
        for turn, part in parts:
            self._advance(turn, len(part.tokens))

    # Decode

    def _feed_lanes(self) -> None:
        """Launch the next step of every turn with a lane."""
        if not self._lanes:
            return
        ready = [turn for turn in self._running if self._lane(turn) is not None]
        reserved = [turn for turn in ready if turn.growth is not None and self._room_for(turn)]
        rows = [
            _Row(turn, turn.growth, turn.fed - len(turn.given) + 1)
            for turn in reserved
            if turn.growth is not None  # it may have paused for a later one
        ]
        width = self._runner.max_width
        for group, lo in enumerate(range(0, len(rows), width)):
            self._launch(rows[lo : lo + width], group)
        self._runner.tree.states.tidy()

    def _room_for(self, turn: Turn) -> bool:
        growth = turn.growth
        assert growth is not None
        if self._runner.step_in_place(growth):
            return True
        try:
            return self._within(turn, lambda: self._runner.reserve(growth)) is not None
        except OctopusError as error:
            self._fail(turn, error)
            return False

    def _launch(self, rows: list[_Row], group: int) -> None:
        steps = self._runner.passes.steps
        lanes = [self._lanes[row.growth.serial] for row in rows]
        try:
            with self._runner.counters.timed("decode"):
                known = [row.turn.known_at(row.turn.fed) for row in rows]
                drawn = steps.feed(
                    lanes,
                    [max(0, row.number) for row in rows],
                    [-1 if token is None else token for token in known],
                    group=group,
                )
        except BaseException as error:
            self._runner.passes.forget()
            for row in rows:
                self._runner.take_back(row.growth)
                self._fail(row.turn, error)
            if not isinstance(error, Exception):
                raise
            return
        self._runner.counters.decode_steps += 1
        for row, token in zip(rows, known, strict=True):
            self._runner.stepped(row.growth)
            if token is not None:
                row.growth.node.tokens.append(token)
                self._advance(row.turn, 1)
        self._flights.append(_Flight(rows, drawn))

    def _enter_lanes(self) -> None:
        """Give a lane to every turn that needs no pass, and draw the next token of those that have
        been fed all they know.
        """
        entering: list[tuple[Turn, StepRow]] = []
        for turn in self._outside():
            growth = turn.growth
            if growth is None or not self._fits_a_lane(turn):
                continue
            lane = self._runner.take_lane()
            if lane is None:
                break
            row = StepRow(lane, growth, turn.params, turn.seed)
            self._lanes[growth.serial] = row
            if turn.fed == turn.length:
                entering.append((turn, row))
            else:
                growth.hidden = self._runner.passes.steps.hidden[lane]
        width = self._runner.max_width
        for lo in range(0, len(entering), width):
            self._draw_first(entering[lo : lo + width])

    def _draw_first(self, entering: Sequence[tuple[Turn, StepRow]]) -> None:
        steps = self._runner.passes.steps
        try:
            with self._runner.counters.timed("sample"):
                lanes = [row for _, row in entering]
                steps.enter(lanes)
                rows = [_Row(turn, row.growth, len(turn.tokens)) for turn, row in entering]
                drawn = steps.draw(lanes, [row.number for row in rows])
                for row in lanes:
                    row.growth.hidden = steps.hidden[row.lane]
        except BaseException as error:
            for turn, _ in entering:
                self._fail(turn, error)
            if not isinstance(error, Exception):
                raise
            return
        self._flights.append(_Flight(rows, drawn))

    def _land(self, flight: _Flight) -> None:
        """Read the draws of a launch; the step that feeds them is under way already."""
        with self._runner.counters.timed("wait"):
            tokens, logps = flight.drawn.read()
        self._runner.passes.steps.done(flight.drawn)
        for (turn, growth, number), token, logp in zip(flight.rows, tokens, logps, strict=True):
            if turn.growth is not growth or number != len(turn.tokens):
                continue  # it ended or paused, or the token is known from before a pause
            if not math.isfinite(logp):
                self._runner.take_back(growth)
                self._fail(turn, OctopusError("the model gave logits that are not finite"))
                continue
            turn.tokens.append(token)
            turn.logps.append(logp)
            growth.node.tokens.append(token)
            self._advance(turn, 1)
            if token in turn.until:
                self._finish(turn, "stop")
            elif len(turn.tokens) >= turn.params.max_tokens:
                self._finish(turn, "length")

    # Ends

    def _lane(self, turn: Turn) -> StepRow | None:
        return None if turn.growth is None else self._lanes.get(turn.growth.serial)

    def _leave(self, growth: Growth) -> None:
        row = self._lanes.pop(growth.serial, None)
        if row is not None:
            self._runner.give_lane(row.lane)

    def _feed_known(self, turn: Turn, growth: Growth) -> None:
        """Feed all tokens that a turn knows, in chunks."""
        while turn.fed < turn.length:
            chunk = self._next_chunk(turn, self._runner.prefill_chunk)
            part = self._runner.reserve_chunk(growth, chunk)
            self._runner.feed([part])
            self._advance(turn, len(part.tokens))
