"""What the engine's operations mean, token by token, written out from DESIGN §2 and §6.

A token has a predecessor and a set of tokens that became readable just before it; a cursor is a
list of tokens. Nothing is shared with the engine. `trace` turns what happened into a `Trace`, cut
where a chain forks and where a mount begins, ends or is read, for the packed pass and the brute
force to score.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from octopus_trl.trace import Segment, ThreadRecord, Trace


@dataclass
class Place:
    """What a cursor holds.

    Attributes:
        chain: token numbers, root first.
        origin: length of the chain when it was forked, 0 for one that was opened.
        pending: tokens that become readable at the next token, in the order they were read.
    """

    thread: int
    chain: list[int]
    origin: int = 0
    pending: dict[int, None] = field(default_factory=dict)


class Ledger:
    """Every token that was ever fed, and every cursor that was ever made.

    Args:
        rule, exchange: where a reader goes on after a mount and how it reads, as a trace names
            them.
    """

    def __init__(self, rule: str = "jump", exchange: str = "mount") -> None:
        self.rule, self.exchange = rule, exchange
        self.reads: list[set[int]] = []
        self.tokens: list[int] = []
        self.parents: list[int | None] = []
        self.mounts: list[dict[int, None]] = []
        self.kinds: list[str] = []
        self.owners: list[int] = []
        self.starts: list[int] = []
        self.thread_parents: list[int | None] = []

    def open(self, tokens: Sequence[int]) -> Place:
        """Start a chain of its own."""
        place = self._place(None, [])
        self.extend(place, tokens, kind="prompt")
        return place

    def fork(self, place: Place) -> Place:
        """Make another cursor at the same place."""
        return self._place(place.thread, place.chain, len(place.chain), place.pending)

    def extend(self, place: Place, tokens: Sequence[int], kind: str = "tool") -> None:
        """Append tokens; the first reads what was mounted since the last."""
        for token in tokens:
            self.starts.append(self.position(place))
            self.parents.append(place.chain[-1] if place.chain else None)
            self.mounts.append(place.pending)
            self.tokens.append(token)
            self.kinds.append(kind)
            self.owners.append(place.thread)
            place.chain.append(len(self.tokens) - 1)
            place.pending = {}

    def mount(self, place: Place, source: Place, since: Place | None = None) -> int:
        """Make the source's chain readable after its fork, or after what it shares with `since`.

        Returns how many tokens are new to the reader.
        """
        shared = source.origin
        if since is not None:
            shared = 0
            for one, other in zip(source.chain, since.chain):
                if one != other:
                    break
                shared += 1
        seen = self.visible(place)
        new = [token for token in source.chain[shared:] if token not in seen]
        place.pending = place.pending | dict.fromkeys(new)
        self.reads.append(set(new))
        return len(new)

    def rewind(self, place: Place, num_tokens: int) -> None:
        """Keep the first tokens; what was mounted after them is forgotten with their successors."""
        place.chain = place.chain[:num_tokens]
        place.origin = min(place.origin, num_tokens)
        place.pending = {}

    def visible(self, place: Place) -> set[int]:
        """List all that the next token sees besides itself."""
        read = {mount for token in place.chain for mount in self.mounts[token]}
        return read | set(place.chain) | set(place.pending)

    def position(self, place: Place) -> int:
        """Place the next token past everything that it sees, or as the rule says."""
        if self.rule != "jump":
            end = self.starts[place.chain[-1]] + 1 if place.chain else 0
            return end + (len(place.pending) if self.rule == "reencode" else 0)
        return max((self.starts[token] + 1 for token in self.visible(place)), default=0)

    def trace(self) -> tuple[Trace, list[tuple[int, int]]]:
        """Give the trace of all tokens, and for each token its segment and place in it."""
        children: dict[int | None, list[int]] = {}
        for token, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(token)
        cuts = {token for token, mounts in enumerate(self.mounts) if mounts}
        for siblings in children.values():
            if len(siblings) > 1:
                cuts |= set(siblings)
        for span in [span for span in self.reads if span]:
            for token, parent in enumerate(self.parents):
                if (token in span) != (parent in span):
                    cuts.add(token)
        where: list[tuple[int, int]] = []
        segments: list[Segment] = []
        for token, parent in enumerate(self.parents):
            above = None if parent is None else where[parent]
            if (
                above is not None
                and parent is not None
                and token not in cuts
                and self.kinds[token] == self.kinds[parent]
                and self.owners[token] == self.owners[parent]
            ):
                segments[above[0]].tokens.append(self.tokens[token])
                where.append((above[0], above[1] + 1))
                continue
            mounts = list(dict.fromkeys(where[mount][0] for mount in self.mounts[token]))
            segments.append(
                Segment(
                    len(segments),
                    self.owners[token],
                    None if above is None else above[0],
                    self.kinds[token],
                    [self.tokens[token]],
                    mounts,
                    self.starts[token],
                )
            )
            where.append((len(segments) - 1, 0))
        threads = [ThreadRecord(i, parent) for i, parent in enumerate(self.thread_parents)]
        trace = Trace("ledger", "p", threads=threads, segments=segments)
        trace.position, trace.exchange = self.rule, self.exchange
        return trace, where

    def _place(
        self,
        parent: int | None,
        chain: list[int],
        origin: int = 0,
        pending: Iterable[int] = (),
    ) -> Place:
        self.thread_parents.append(parent)
        return Place(len(self.thread_parents) - 1, list(chain), origin, dict.fromkeys(pending))
