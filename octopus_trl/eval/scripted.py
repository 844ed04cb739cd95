"""An engine without a model: every turn is written by a script that reads the thread's own text.

The agent's episode loop runs on it unchanged, so a scripted episode is the trace that a model
would leave if it sampled the same words: same results, mounts, boundaries and positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octopus_trl.agent.systems import POSITIONS
from octopus_trl.errors import ClosedCursor, ConfigError
from octopus_trl.protocols import Finished, SamplingParams


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens that came at once: what was fed, or one turn.

    Attributes:
        end: tokens of the chain through this block.
        position: position just past it.
        text: as decoded, control tokens shown.
    """

    is_turn: bool
    end: int
    position: int
    text: str


class Script(Protocol):
    """Writes the turns of one episode's threads."""

    def turn(self, blocks: Sequence[Block]) -> str:
        """Give the text of the next turn, without its end token, after these blocks."""


@dataclass(slots=True)
class ScriptedCursor:
    """A chain of blocks; mounts only move the position, as a script reads no foreign text.

    Attributes:
        read: what was mounted, each span after how many tokens of the chain.
    """

    script: Script
    blocks: list[Block] = field(default_factory=list)
    read: list[tuple[int, list[Block]]] = field(default_factory=list)
    fork_tokens: int = 0
    position: int = 0
    closed: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the chain."""
        return self.blocks[-1].end if self.blocks else 0


class ScriptedEngine:
    """`EngineLike` over scripts.

    Args:
        tokenizer: decodes what is fed and encodes what is written; its `eos_token_id` ends turns.
        script_of: gives the script of an episode from its prompt's text.
    """

    policy_version = 0
    num_free_pages = 1 << 30

    def __init__(self, tokenizer: Any, script_of: Callable[[str], Script]) -> None:
        self._tokenizer, self._script_of = tokenizer, script_of
        self._queue: deque[tuple[int, ScriptedCursor]] = deque()
        self._tickets = 0
        self._counts = dict.fromkeys(("forks", "mounts", "rewinds", "tokens_fed", "turns"), 0)

    @property
    def has_work(self) -> bool:
        """Whether a submitted turn has not been written."""
        return bool(self._queue)

    def open(self, tokens: Sequence[int]) -> ScriptedCursor:
        """Start a chain and ask whose script it is."""
        text = self._decode(tokens)
        cursor = ScriptedCursor(self._script_of(text))
        return self._append(cursor, False, len(tokens), text)

    def fork(self, cursor: ScriptedCursor) -> ScriptedCursor:
        """Continue the same chain under the same script."""
        self._check(cursor)
        self._counts["forks"] += 1
        return ScriptedCursor(
            cursor.script,
            list(cursor.blocks),
            list(cursor.read),
            cursor.num_tokens,
            cursor.position,
        )

    def extend(self, cursor: ScriptedCursor, tokens: Sequence[int]) -> ScriptedCursor:
        """Feed tokens."""
        self._check(cursor)
        return self._append(cursor, False, len(tokens), self._decode(tokens)) if tokens else cursor

    def mount(
        self,
        cursor: ScriptedCursor,
        source: ScriptedCursor,
        since: ScriptedCursor | None = None,
        *,
        position: str = "jump",
        exchange: str = "mount",
    ) -> ScriptedCursor:
        """Move to where the rule puts a reader of what the source wrote since its fork.

        Args:
            position: see `dag.starts`.
            exchange: "mount" or "splice"; a script has no states, so they are the same here.
        Raises:
            ConfigError: `position` or `exchange` is unknown.
        """
        self._check(cursor)
        for name, value, known in (
            ("position", position, POSITIONS),
            ("exchange", exchange, ("mount", "splice")),
        ):
            if value not in known:
                raise ConfigError(f"{name}={value!r}: must be one of {', '.join(known)}")
        self._counts["mounts"] += 1
        floor = source.fork_tokens if since is None else since.num_tokens
        known_blocks = set(map(id, cursor.blocks)).union(
            *(map(id, span) for _, span in cursor.read)
        )
        first, length, new = 0, 0, []
        for block in source.blocks:
            if block.end > floor and id(block) not in known_blocks:
                length += block.end - first
                new.append(block)
            first = block.end
        if new:
            cursor.read.append((cursor.num_tokens, new))
            if position == "jump":
                cursor.position = max(cursor.position, new[-1].position)
            elif position == "reencode":
                cursor.position += length
        return cursor

    def rewind(self, cursor: ScriptedCursor, num_tokens: int) -> ScriptedCursor:
        """Keep the blocks through `num_tokens`.

        Raises:
            ConfigError: no block ends there.
        """
        self._check(cursor)
        kept = [block for block in cursor.blocks if block.end <= num_tokens]
        if not kept or kept[-1].end != num_tokens:
            raise ConfigError(
                f"rewind to {num_tokens} tokens: blocks end at {[b.end for b in cursor.blocks]}; "
                "a script is rewound to the end of a block"
            )
        self._counts["rewinds"] += 1
        cursor.blocks, cursor.position = kept, kept[-1].position
        cursor.read = [(at, span) for at, span in cursor.read if at < num_tokens]
        return cursor

    def close(self, cursor: ScriptedCursor) -> None:
        """End the cursor."""
        cursor.closed = True

    def generate(
        self,
        cursors: Sequence[ScriptedCursor],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        until: Collection[int],
    ) -> list[tuple[list[int], list[float]]]:
        """Write one turn on each cursor."""
        return [self._write(cursor) for cursor in cursors]

    def submit(
        self,
        cursor: ScriptedCursor,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        until: Collection[int],
    ) -> int:
        """Feed tokens and queue the next turn."""
        self.extend(cursor, tokens)
        self._tickets += 1
        self._queue.append((self._tickets, cursor))
        return self._tickets

    def step(self) -> list[Finished]:
        """Write every queued turn; each was certain to its script, so its log-probability is 0."""
        finished = [
            Finished(ticket, *self._write(cursor), reason="stop") for ticket, cursor in self._queue
        ]
        self._queue.clear()
        return finished

    def cancel(self, ticket: int) -> tuple[list[int], list[float]]:
        """Take a queued turn out; none of it was written."""
        self._queue = deque(item for item in self._queue if item[0] != ticket)
        return [], []

    def stats(self) -> dict[str, Any]:
        """Count what was asked of the engine."""
        return dict(self._counts)

    def _write(self, cursor: ScriptedCursor) -> tuple[list[int], list[float]]:
        self._check(cursor)
        text = cursor.script.turn(cursor.blocks)
        tokens = [*self._tokenizer.encode(text, add_special_tokens=False)]
        tokens.append(self._tokenizer.eos_token_id)
        self._counts["turns"] += 1
        self._append(cursor, True, len(tokens), text)
        return tokens, [0.0] * len(tokens)

    def _append(
        self, cursor: ScriptedCursor, is_turn: bool, count: int, text: str
    ) -> ScriptedCursor:
        if not is_turn:
            self._counts["tokens_fed"] += count
        cursor.position += count
        cursor.blocks.append(Block(is_turn, cursor.num_tokens + count, cursor.position, text))
        return cursor

    def _check(self, cursor: ScriptedCursor) -> None:
        if cursor.closed:
            raise ClosedCursor("this scripted cursor was closed")

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text
