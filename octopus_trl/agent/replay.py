"""Episodes once more, with a difference: turns repeat the record until the root is fed other text.

A root's turn is repeated where everything before it, the text just fed included, is that of a
recorded turn; from the first other token on the engine samples. The threads below it keep their
recorded words, whatever they are fed. With the logical clock (`deterministic`) an episode that
nothing is changed in comes out as it was, without a sampled token.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octopus_trl.errors import ConfigError, IntegrityError
from octopus_trl.protocols import EngineLike, Finished, FinishReason, SamplingParams
from octopus_trl.trace import Segment, Trace

OFF = -1  # stands in the place of a recorded turn: nothing on record follows


class Script:
    """The turns of one recorded episode by the turn before them, each given out once.

    Args:
        again: turns that are never given out, so that they are sampled again.
    """

    def __init__(self, trace: Trace, again: Collection[int] = ()) -> None:
        self._after: defaultdict[int | None, list[Segment]] = defaultdict(list)
        self._fed: dict[int, list[int]] = {}
        self._roots = {thread.id for thread in trace.threads if thread.parent is None}
        for segment in trace.segments:
            if segment.kind != "action" or segment.id in again:
                continue
            fed: list[int] = []
            above = segment.parent
            while above is not None and trace.segments[above].kind != "action":
                fed[:0] = trace.segments[above].tokens
                above = trace.segments[above].parent
            self._after[above].append(segment)
            self._fed[segment.id] = fed

    def take(
        self,
        tip: int | None,
        thread: int | None,
        fed: Sequence[int],
        most: int,
        until: Collection[int],
    ) -> Segment | None:
        """Give the recorded turn that comes next, None where there is none.

        A turn that was taken back while it was written is no record of where it would have ended.

        Args:
            tip: turn that the chain ends with, apart from what was fed since.
            thread: whose turn it is; None where it has had none yet.
        """
        turns = self._after[tip]
        mine = [turn for turn in turns if thread in (None, turn.thread)]
        found = [turn for turn in mine if self._fed[turn.id] == list(fed)]
        if not found and thread is not None and thread not in self._roots:
            found = mine
        if not found:
            return None
        turn = found[0]
        turns.remove(turn)
        ended = turn.tokens[-1] in until or len(turn.tokens) >= most
        return turn if ended else None


@dataclass(slots=True, eq=False)
class Place:
    """A cursor of the engine, and where it stands on the record that it follows.

    Attributes:
        chain: its tokens.
        thread: number of its thread on the record, None until it has repeated a turn.
        turns: end on the chain and recorded number of each turn on it, `OFF` for sampled ones.
    """

    real: Any
    chain: list[int]
    script: Script
    thread: int | None = None
    turns: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of the chain."""
        return len(self.chain)

    @property
    def position(self) -> int:
        """Position that the next token takes."""
        position: int = self.real.position
        return position

    @property
    def closed(self) -> bool:
        """Whether the cursor was closed."""
        closed: bool = self.real.closed
        return closed

    def next_turn(self, tokens: Sequence[int], most: int, until: Collection[int]) -> Segment | None:
        """Take the recorded turn that follows once `tokens` are fed, None where none does."""
        end, tip = self.turns[-1] if self.turns else (0, None)
        fed = [*self.chain[end:], *tokens]
        return self.script.take(tip, self.thread, fed, most, until)

    def grow(self, tokens: Sequence[int], turn: int) -> None:
        """Append text that ends with a turn."""
        self.chain.extend(tokens)
        self.turns.append((len(self.chain), turn))

    def shrink(self, num_tokens: int) -> None:
        """Keep the first tokens of the chain."""
        del self.chain[num_tokens:]
        while self.turns and self.turns[-1][0] > num_tokens:
            self.turns.pop()


@dataclass(slots=True)
class _Turn:
    place: Place
    fed: list[int] = field(default_factory=list)


class ReplayEngine:
    """An engine whose turns repeat recorded episodes; follows `EngineLike`.

    Args:
        engine: what runs the model.
        traces: the record of each episode, in the order in which they will be opened.
        again: for each of them the turns that are sampled again although nothing changed before
            them; none by default.
    """

    def __init__(
        self,
        engine: EngineLike,
        traces: Iterable[Trace],
        again: Iterable[Collection[int]] | None = None,
    ) -> None:
        self.engine = engine
        self.num_repeated = 0
        records = list(traces)
        sampled = [()] * len(records) if again is None else list(again)
        self._scripts = deque(Script(*each) for each in zip(records, sampled, strict=True))
        self._ended: deque[Finished] = deque()
        self._turns: dict[int, _Turn] = {}
        self._next_ticket = -1

    def open(self, tokens: Sequence[int]) -> Place:
        """Open the next episode's root.

        Raises:
            ConfigError: more episodes are opened than were given.
        """
        if not self._scripts:
            raise ConfigError("more episodes are opened than records were given: give one each")
        real = self.engine.open(tokens)
        return Place(real, list(tokens), self._scripts.popleft())

    def fork(self, cursor: Place) -> Place:
        """Return a new cursor at the same place."""
        return replace(
            cursor,
            real=self.engine.fork(cursor.real),
            chain=list(cursor.chain),
            turns=list(cursor.turns),
            thread=None,
        )

    def extend(self, cursor: Place, tokens: Sequence[int]) -> Place:
        """Append tokens to the cursor's chain."""
        self.engine.extend(cursor.real, tokens)
        cursor.chain.extend(tokens)
        return cursor

    def mount(self, cursor: Place, source: Place, since: Place | None = None, **rule: Any) -> Place:
        """Make readable what `source`'s chain holds; `rule` goes on to the engine."""
        after = since.real if since is not None else None
        self.engine.mount(cursor.real, source.real, after, **rule)
        return cursor

    def rewind(self, cursor: Place, num_tokens: int) -> Place:
        """Keep the first tokens of the chain."""
        self.engine.rewind(cursor.real, num_tokens)
        cursor.shrink(num_tokens)
        return cursor

    def close(self, cursor: Place) -> None:
        """Release the cursor."""
        self.engine.close(cursor.real)

    def generate(
        self,
        cursors: Sequence[Place],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        until: Collection[int],
    ) -> list[tuple[list[int], list[float]]]:
        """Refuse: episodes run by `submit` and `step`.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("a replay runs turns by submit and step: use EpisodeRunner")

    def submit(
        self,
        cursor: Place,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        until: Collection[int],
    ) -> int:
        """Queue a turn: the recorded one where the record goes on."""
        turn = cursor.next_turn(tokens, sampling.max_tokens, until)
        if turn is None:
            ticket = self.engine.submit(cursor.real, tokens, sampling, until=until)
            self._turns[ticket] = _Turn(cursor, list(tokens))
            return ticket
        text = [*tokens, *turn.tokens]
        self.engine.extend(cursor.real, text)
        cursor.grow(text, turn.id)
        cursor.thread = turn.thread
        self.num_repeated += 1
        ticket, self._next_ticket = self._next_ticket, self._next_ticket - 1
        logps = list(turn.logps or [float("nan")] * len(turn.tokens))
        reason: FinishReason = "stop" if turn.tokens[-1] in until else "length"
        self._ended.append(Finished(ticket, list(turn.tokens), logps, reason))
        return ticket

    def step(self) -> list[Finished]:
        """Give what ended: repeated turns at once, sampled ones as the engine ends them."""
        ended = list(self._ended)
        self._ended.clear()
        if self.engine.has_work:
            for finished in self.engine.step():
                self._grow(self._turns.pop(finished.ticket), finished.tokens)
                ended.append(finished)
        return ended

    def cancel(self, ticket: int) -> tuple[list[int], list[float]]:
        """Take a turn back and return what it had sampled."""
        for finished in self._ended:
            if finished.ticket == ticket:
                self._ended.remove(finished)
                return finished.tokens, finished.logps
        tokens, logps = self.engine.cancel(ticket)
        if ticket not in self._turns:
            raise IntegrityError(f"ticket {ticket} was never given out by this replay")
        self._grow(self._turns.pop(ticket), tokens)
        return tokens, logps

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters."""
        return self.engine.stats()

    @property
    def has_work(self) -> bool:
        """Whether a turn has not been returned by `step`."""
        return bool(self._ended) or self.engine.has_work

    @property
    def policy_version(self) -> int:
        """Optimizer step of the weights that the engine runs."""
        return self.engine.policy_version

    @property
    def num_free_pages(self) -> int:
        """Pages that no cursor holds."""
        return self.engine.num_free_pages

    def _grow(self, turn: _Turn, tokens: Sequence[int]) -> None:
        """Put what a sampled turn left on its cursor on the chain."""
        if turn.place.real.num_tokens > len(turn.place.chain):
            turn.place.grow([*turn.fed, *tokens], OFF)
