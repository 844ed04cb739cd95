"""Fork: a new thread at a long context, one and 64 at once, against copying the cache."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from octopus_trl import Cursor

from .clock import percentiles_s, sample_s
from .contexts import Place, contexts, time_primitive
from .setting import Line, Setting
from .stock import filled_cache

WAYS = 64
WAYS_MS = 0.3  # issue B
COPIES = 5


def run(setting: Setting) -> Iterator[Line]:
    """Yield the time of a fork and of 64 at every context length."""
    engine = contexts(setting).engine

    def copied_cache(place: Place) -> tuple[str, float]:
        cache = filled_cache(setting, place.tokens)
        times = sample_s(lambda: copy.deepcopy(cache), repeats=COPIES)
        return "deepcopy of transformers' DynamicCache, ms", percentiles_s(times)[0] * 1e3

    yield from time_primitive(
        setting,
        "fork",
        call=lambda place, cursor: engine.fork(cursor),
        start=lambda place: place.root,
        baseline=copied_cache,
    )

    for place in contexts(setting).places:

        def fork_many(place: Place = place) -> list[Cursor]:
            return [engine.fork(place.root) for _ in range(WAYS)]

        def close_many(children: list[Cursor]) -> None:
            for child in children:
                engine.close(child)

        times = sample_s(fork_many, repeats=setting.sizes.repeats // 5, after=close_many)
        yield Line.cost(
            f"{WAYS} forks of one thread at {place.tokens} tokens, p50",
            percentiles_s(times)[0] * 1e3,
            "ms",
            WAYS_MS,
            baseline=_copied_many(setting, place.tokens),
        )


def _copied_many(setting: Setting, tokens: int) -> tuple[str, float | None]:
    """Copy a cache 64 times; one copy is kept at a time, because 64 long ones do not fit."""
    cache = filled_cache(setting, tokens)

    def copies() -> None:
        for _ in range(WAYS):
            copy.deepcopy(cache)

    name = f"{WAYS} deepcopies of transformers' DynamicCache one after another, ms"
    (once,) = sample_s(copies, repeats=1)
    return name, once * 1e3
