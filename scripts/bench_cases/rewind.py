"""Rewind: a thread goes back to a snapshot, against prefilling what it keeps."""

from __future__ import annotations

from collections.abc import Iterator

from .contexts import Place, contexts, time_primitive
from .setting import Line, Setting


def run(setting: Setting) -> Iterator[Line]:
    """Yield the time of going back from `span` tokens past each context to its end."""
    made = contexts(setting)
    engine = made.engine
    before = engine.stats()["replayed"]

    def prefilled(place: Place) -> tuple[str, float]:
        return "prefill of the tokens that stay, once, ms", place.prefill_s * 1e3

    yield from time_primitive(
        setting,
        "rewind",
        call=lambda place, cursor: engine.rewind(cursor, place.tokens),
        start=lambda place: engine.fork(place.sibling),
        baseline=prefilled,
    )
    replayed = engine.stats()["replayed"] - before
    yield Line.cost("tokens replayed by all these rewinds", replayed, "tokens", 0)
