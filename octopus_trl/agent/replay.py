"""Episodes once more, with a difference: turns repeat the record until something else was fed.

A turn is repeated where its whole chain, the text just fed included, is that of a recorded turn;
from the first other token on the engine samples. With the logical clock (`deterministic`) an
episode that nothing is changed in comes out as it was, without a sampled token.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octopus_trl.errors import ConfigError, IntegrityError
from octopus_trl.protocols import EngineLike, Finished, FinishReason, SamplingParams
from octopus_trl.trace import Segment, Trace

Key = bytes


class Script:
    """The turns of one recorded episode by what stood before them, each given out once."""

    def __init__(self, trace: Trace) -> None:
        self._turns: defaultdict[Key, deque[Segment]] = defaultdict(deque)
        for segment in trace.segments:
            if segment.kind == "action":
                above, _ = trace.linearize(segment.id)
                self._turns[_key(above[: -len(segment.tokens)])].append(segment)

    def take(self, chain: Sequence[int], most: int, until: Collection[int]) -> Segment | None:
        """Give the next recorded turn after this chain, None where there is none.

        A turn that was taken back while it was written is no record of where it would have ended.
        """
        turns = self._turns.get(_key(chain))
        if not turns:
            return None
        turn = turns.popleft()
        ended = turn.tokens[-1] in until or len(turn.tokens) >= most
        return turn if ended else None


@dataclass(slots=True, eq=False)
class Place:
    """A cursor of the engine, the tokens on its chain, and the script that it follows."""

    real: Any
    chain: list[int]
    script: Script

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


@dataclass(slots=True)
class _Turn:
    place: Place
    fed: list[int] = field(default_factory=list)


class ReplayEngine:
    """An engine whose turns repeat recorded episodes; follows `EngineLike`.

    Args:
        engine: what runs the model.
        traces: the record of each episode, in the order in which they will be opened.
    """

    def __init__(self, engine: EngineLike, traces: Iterable[Trace]) -> None:
        self.engine = engine
        self.num_repeated = 0
        self._scripts = deque(Script(trace) for trace in traces)
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
        return replace(cursor, real=self.engine.fork(cursor.real), chain=list(cursor.chain))

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
        del cursor.chain[num_tokens:]
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
        """Queue a turn: the recorded one where the chain is the recorded one."""
        turn = cursor.script.take([*cursor.chain, *tokens], sampling.max_tokens, until)
        if turn is None:
            ticket = self.engine.submit(cursor.real, tokens, sampling, until=until)
            self._turns[ticket] = _Turn(cursor, list(tokens))
            return ticket
        self.extend(cursor, [*tokens, *turn.tokens])
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
            turn.place.chain += [*turn.fed, *tokens]


def _key(chain: Sequence[int]) -> Key:
    return hashlib.blake2b(array("q", chain).tobytes(), digest_size=16).digest()
