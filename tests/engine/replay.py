"""Plays a trace on an engine through its public calls."""

from __future__ import annotations

from torch import Tensor

from octopus_trl.engine import Cursor, Engine
from octopus_trl.trace import Trace


def play(engine: Engine, trace: Trace) -> tuple[dict[int, Cursor], list[Tensor], list[list[float]]]:
    """Append every segment of a trace, in order.

    Returns:
        For each segment a cursor at its end, the logits there [vocab], and the log-probability of
        its first token (none for a root).
    """
    at: dict[int, Cursor] = {}
    logits: list[Tensor] = []
    firsts: list[list[float]] = []
    for segment in trace.segments:
        if segment.parent is None:
            at[segment.id] = engine.open(segment.tokens)
            firsts.append([])
        else:
            cursor = engine.fork(at[segment.parent])
            for mount in segment.mounts:
                above = trace.segments[mount].parent
                engine.mount(cursor, at[mount], None if above is None else at[above])
            logps = engine.logits(cursor).log_softmax(-1)
            firsts.append([logps[segment.tokens[0]].item()])
            assert cursor.position == segment.start
            at[segment.id] = engine.extend(cursor, segment.tokens)
        logits.append(engine.logits(at[segment.id]))
    return at, logits, firsts
