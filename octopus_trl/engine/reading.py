"""Reading a sibling's span: where it lies, as moved keys, or by prefilling it again (DESIGN §3).

Under `reencode` the span's tokens run once more as a side branch of its reader, after its own end,
at its next positions and from its own recurrent state, and that copy is what the reader sees on the
layers that see mounts. The reader's state never steps through it: the reader goes on from its end,
at the position past the copy. What is read before the next token is one such branch, each span
behind the one read before it.

Under `rerotate` keys and values are copied to pages of the reader's own, the keys moved so that the
highest position of all that is read before the next token is the one just before that token's.

A splice is a mount whose spans the reader's recurrent state steps through, too, when its next token
comes (`splicing`).
"""

from __future__ import annotations

import numpy as np
from torch import nn

from octopus_trl.engine.checks import check_position
from octopus_trl.engine.cursor import Cursor, Mount, Node, unread
from octopus_trl.engine.moving import copy_moved
from octopus_trl.engine.primitives import Primitives
from octopus_trl.engine.runner import Runner
from octopus_trl.errors import ConfigError
from octopus_trl.models import spec_of
from octopus_trl.models.rotation import inverse_frequencies
from octopus_trl.models.spec import check_splice

EXCHANGES = ("mount", "splice")


def check_reading(model: nn.Module, position: str, exchange: str) -> None:
    """Refuse a way of reading that is unknown, or that means nothing for this model.

    Raises:
        ConfigError: says which and why.
    """
    check_position(position)
    if position == "rerotate":
        inverse_frequencies(model)
    if exchange not in EXCHANGES:
        raise ConfigError(f"exchange={exchange!r}: must be one of {', '.join(EXCHANGES)}")
    if exchange == "splice":
        check_splice(spec_of(model))
        if position == "reencode":
            raise ConfigError(
                "position='reencode' with exchange='splice': text that is prefilled again is not "
                "the sibling's, so there is nothing of its to step through; set exchange: mount"
            )


def read_span(
    primitives: Primitives,
    runner: Runner,
    cursor: Cursor,
    source: Cursor,
    since: Cursor | None,
    position: str,
    exchange: str,
) -> None:
    """Make what `source` holds after `since` readable, where it lies or as a copy, and count it.

    Args:
        position: where the reader goes on: "jump" past the span (paper Eq. 2), "unshifted" where it
            stood, "rerotate" where it stood with a copy whose keys end just before that, "reencode"
            past a copy of the span that is prefilled there and read instead. A model without
            positions has no keys to move: then nothing is copied.
        exchange: "mount", or "splice": recurrent layers step through the span.
    Raises:
        ConfigError: one is unknown, or means nothing for this model.
        PagesExhausted, StatesExhausted: too little room for a copy; nothing was changed.
    """
    check_reading(runner.model, position, exchange)
    counters, spliced = runner.counters, exchange == "splice"
    if position == "reencode":
        with runner.evaluating():
            new = _mount_again(primitives, runner, cursor, source, since)
        counters.reencoded(new)
    elif position == "rerotate" and inverse_frequencies(runner.model) is not None:
        with runner.evaluating():
            new = _mount_moved(primitives, runner, cursor, source, since, spliced)
    else:
        with counters.copying("mount"):
            new = primitives.mount(
                cursor, source, since, shifts=position == "jump", spliced=spliced
            )
    counters.mounts += bool(new)


def _mount_moved(
    primitives: Primitives,
    runner: Runner,
    cursor: Cursor,
    source: Cursor,
    since: Cursor | None,
    spliced: bool,
) -> int:
    """Copy a span to pages of the reader's own, moved; returns how many of its tokens are new.

    Raises:
        PagesExhausted: too little room; nothing was changed.
    """
    span = primitives.span(cursor, source, since, shifts=False)
    new = _unread(cursor, span)
    if not new:
        return 0
    inv_freq = inverse_frequencies(runner.model)
    assert inv_freq is not None, "a model with positions"
    pending, tree = cursor._pending, runner.tree
    before = next((mount for mount in pending if mount.end is not None), None)
    end, tokens = new[-1].end, [token for node in new for token in node.tokens]
    repeats: tuple[Mount, ...] = (span,)
    slots = np.concatenate([node.cached_slots for node in new if node.cached_slots is not None])
    parts = []
    if before is not None:
        assert before.end is not None
        assert before.tail.cached_slots is not None
        end, repeats = max(end, before.end), (*before.repeats, span)
        tokens = [*before.tail.tokens, *tokens]
        parts = [(before.tail.cached_slots, before.end - end)]
    parts.append((slots, cursor._position - end))
    copy = copy_moved(
        runner, tokens, parts, end=cursor._position, epoch=cursor._tail.epoch, inv_freq=inv_freq
    )
    mounts = [Mount(copy, None, shifts=False, repeats=repeats, end=end)]
    if spliced:
        mounts.append(Mount(span.tail, span.base, span.root, False, spliced=True, read=False))
    for mount in mounts:
        tree.hold_mount(mount)
    cursor._pending = (*(other for other in pending if other is not before), *mounts)
    if before is not None:
        tree.drop_mount(before)
    return sum(len(node.tokens) for node in new)


def _mount_again(
    primitives: Primitives,
    runner: Runner,
    cursor: Cursor,
    source: Cursor,
    since: Cursor | None,
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
    grown = [index for index, each in enumerate(pending) if each.repeats and each.end is None]
    at = max(grown, default=-1)
    before = pending[at] if at >= 0 else None
    tail = cursor._tail if before is None else before.tail
    side = runner.grow(tail, tokens, pending[at + 1 :], cursor._position, tail.epoch)
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
    return unread(cursor._tail, cursor._pending, span, copies=True)[::-1]
