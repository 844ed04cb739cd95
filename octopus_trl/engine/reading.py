"""Reading a sibling's span: where it lies, or by prefilling it again (DESIGN §3).

Under `reencode` the span's tokens run once more as a side branch of its reader, after its own end,
at its next positions and from its own recurrent state, and that copy is what the reader sees on the
layers that see mounts. The reader's state never steps through it: the reader goes on from its end,
at the position past the copy. What is read before the next token is one such branch, each span
behind the one read before it.
"""

from __future__ import annotations

from octopus_trl.engine.checks import check_position
from octopus_trl.engine.cursor import Cursor, Mount, Node, chain
from octopus_trl.engine.primitives import Primitives
from octopus_trl.engine.runner import Runner


def read_span(
    primitives: Primitives,
    runner: Runner,
    cursor: Cursor,
    source: Cursor,
    since: Cursor | None,
    epoch: int,
    position: str,
) -> None:
    """Make what `source` holds after `since` readable, where it lies or as a copy, and count it.

    Args:
        position: where the reader goes on: "jump" past the span (paper Eq. 2), "unshifted" where it
            stood, "reencode" past a copy of the span that is prefilled there and read instead.
    Raises:
        ConfigError: `position` is none of these.
        PagesExhausted, StatesExhausted: too little room for a copy; nothing was changed.
    """
    check_position(position)
    counters = runner.counters
    if position == "reencode":
        with runner.evaluating():
            new = _mount_again(primitives, runner, cursor, source, since, epoch)
        counters.reencoded(new)
    else:
        with counters.copying("mount"):
            new = primitives.mount(cursor, source, since, shifts=position == "jump")
    counters.mounts += bool(new)


def _mount_again(
    primitives: Primitives,
    runner: Runner,
    cursor: Cursor,
    source: Cursor,
    since: Cursor | None,
    epoch: int,
) -> int:
    """Prefill a span again and make that readable; returns how many of its tokens are new.

    Raises:
        PagesExhausted, StatesExhausted: too little room; nothing was changed.
    """
    span = primitives.span(cursor, source, since)
    tokens = [token for node in _unread(cursor, span) for token in node.tokens]
    if not tokens:
        return 0
    pending = cursor._pending
    at = max((index for index, mount in enumerate(pending) if mount.repeats), default=-1)
    before = pending[at] if at >= 0 else None
    tail = cursor._tail if before is None else before.tail
    side = runner.grow(tail, tokens, pending[at + 1 :], cursor._position, epoch)
    repeats = (*(() if before is None else before.repeats), span)
    mount = Mount(side, cursor._tail, repeats=repeats)
    runner.tree.hold_mount(mount)  # it takes over the hold that `grow` gave
    cursor._pending = (*(other for other in pending if other is not before), mount)
    cursor._position = side.end
    if before is not None:
        runner.tree.drop_mount(before)
    return len(tokens)


def _unread(cursor: Cursor, span: Mount) -> list[Node]:
    """List the nodes of a span that the reader sees neither where they lie nor as a copy."""
    own = chain(cursor._tail)
    known = set(map(id, own)) if span.root is None else set()
    for mounts in (*(node.mounts for node in own), cursor._pending):
        for mount in mounts:
            for read in mount.repeats or (mount,):
                if read.root is span.root:
                    known.update(map(id, read.nodes()))
    new = [node for node in span.nodes() if id(node) not in known]
    return new[::-1]
