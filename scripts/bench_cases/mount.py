"""Mount: a sibling's text becomes readable, against prefilling it; and the turn that reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from octopus_trl import Cursor, SamplingParams

from .checks import tokens_of
from .clock import percentiles_s, sample_s
from .contexts import Place, contexts, time_primitive
from .setting import Line, Setting

PAPER_MS = 1.44  # assembly of a turn over pages; with transcripts 358.5 (paper, `wire-time`)


def run(setting: Setting) -> Iterator[Line]:
    """Yield the time of a mount at every context length, and of assembling the turn that reads."""
    made = contexts(setting)
    engine, span = made.engine, made.span

    def prefilled(place: Place) -> tuple[str, float | None]:
        name = f"prefill of the sibling's {len(span)} tokens, ms"
        needed = 2 * setting.prefill_s(len(span))
        if not setting.fits(needed):
            return f"{name}: not run ({setting.out_of_budget(needed)})", None
        times = _times(setting, place, lambda reader: engine.extend(reader, span), repeats=2)
        return name, min(times) * 1e3

    yield from time_primitive(
        setting,
        "mount",
        call=lambda place, cursor: engine.mount(cursor, place.sibling),
        start=lambda place: engine.fork(place.root),
        baseline=prefilled,
    )
    tool = tokens_of(setting, setting.sizes.tool, seed=51)
    for place in made.places:
        yield from _turn(setting, place, tool)


def _turn(setting: Setting, place: Place, tool: list[int]) -> Iterator[Line]:
    """Yield how long a turn that mounts takes: until it is queued, and until its logits are there.

    What the paper calls assembly is the first: pages are gathered and the turn could be computed.
    The second adds one pass of the model over the tool text.
    """
    made = contexts(setting)
    engine, span = made.engine, made.span

    def queued(reader: Cursor) -> int:
        engine.mount(reader, place.sibling)
        return engine.submit(reader, tool, SamplingParams(max_tokens=1, seed=0), until=())

    def computed(reader: Cursor) -> Any:
        engine.mount(reader, place.sibling)
        return engine.logits(engine.extend(reader, tool))

    def pasted(reader: Cursor) -> Any:
        return engine.logits(engine.extend(reader, [*span, *tool]))

    with setting.busy(f"turn that mounts at {place.tokens} tokens"):
        repeats = max(3, setting.sizes.repeats // 10)
        ready = _times(setting, place, queued, repeats=repeats)
        whole = _times(setting, place, computed, repeats=repeats)
    baseline: tuple[str, float | None]
    needed = 2 * setting.prefill_s(len(span) + len(tool))
    if setting.fits(needed):
        pasting = _times(setting, place, pasted, repeats=2)
        baseline = (
            f"transcript: sibling's {len(span)} tokens and the tool text prefilled, to logits, ms",
            min(pasting) * 1e3,
        )
    else:
        baseline = (f"transcript: not run ({setting.out_of_budget(needed)})", None)
    where = f"at {place.tokens} tokens, {len(span)} mounted, p50"
    yield Line.cost(
        f"assembly of a turn: mount and queue {len(tool)} tokens of tool text, {where}",
        percentiles_s(ready)[0] * 1e3,
        "ms",
        PAPER_MS,
        baseline=baseline,
    )
    weights_ms = setting.shapes.weight_bytes / setting.rates.bytes_s * 1e3
    yield Line.cost(
        f"turn to logits: mount and prefill {len(tool)} tokens of tool text, {where}, "
        f"of which reading the weights once takes {weights_ms:.2f} at least",
        percentiles_s(whole)[0] * 1e3,
        "ms",
        PAPER_MS,
        baseline=baseline,
    )


def _times(
    setting: Setting, place: Place, call: Callable[[Cursor], Any], *, repeats: int
) -> list[float]:
    """Seconds of calls, each on a fresh fork of the place's thread; one call first is not timed."""
    engine = contexts(setting).engine
    times = []
    for _ in range(repeats + 1):
        reader = engine.fork(place.root)
        times += sample_s(lambda reader=reader: call(reader), repeats=1)  # type: ignore[misc]
        engine.close(reader)
    return times[1:]
