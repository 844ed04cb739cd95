"""Threads at several context lengths, for the cases that time fork, mount and rewind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from octopus_trl import Cursor, Engine

from .checks import tokens_of, warm_up
from .clock import percentiles_s, timed
from .setting import Line, Setting, WrongResult

P50_MS, P99_MS = 0.1, 0.25  # issue B: fork, mount and rewind, whatever the context
WARM_UP = 10  # calls
STATES = 64  # open boundaries, threads and what the prompt cache keeps


@dataclass(slots=True)
class Place:
    """A thread at one context length.

    Attributes:
        root: after `tokens` tokens.
        sibling: forked there, `span` tokens on.
        prefill_s: seconds that the prefill of the context took, from the first token on.
    """

    tokens: int
    root: Cursor
    sibling: Cursor
    prefill_s: float


@dataclass(slots=True)
class Contexts:
    """One engine, and the places that fitted the budget.

    Attributes:
        missing: lengths without a place, and why.
        span: tokens that every sibling added.
    """

    engine: Engine
    places: list[Place]
    missing: dict[int, str]
    span: list[int]


def contexts(setting: Setting) -> Contexts:
    """Give the places, prefilled at the first call: each length goes on from the one before."""
    if "contexts" not in setting.kept:
        setting.kept["contexts"] = _contexts(setting)
    return setting.kept["contexts"]


def _contexts(setting: Setting) -> Contexts:
    sizes = setting.sizes
    lengths = sizes.contexts
    span = tokens_of(setting, sizes.span, seed=41)
    # A place's sibling, and the baseline's copy of its text with a tool text behind it.
    tokens = lengths[-1] + (len(lengths) + 2) * (sizes.span + sizes.tool + sizes.page_size)
    engine = Engine(
        setting.load(),
        page_size=sizes.page_size,
        num_pages=tokens // sizes.page_size + 64,
        num_states=STATES,
        prefill_chunk=sizes.prefill_chunk,
    )
    warm_up(setting, engine)
    text = tokens_of(setting, lengths[-1], seed=42)
    made = Contexts(engine, [], {}, span)
    done, total_s = 0, 0.0
    for length in lengths:
        needed = setting.prefill_s(length - done + sizes.span)
        if not setting.fits(needed):
            made.missing[length] = setting.out_of_budget(needed)
            continue
        with timed() as seconds, setting.busy(f"prefill of {length} tokens"):
            root = engine.open(text[:length])
        setting.saw_prefill(length - done, seconds.value)
        done, total_s = length, total_s + seconds.value
        sibling = engine.extend(engine.fork(root), span)
        made.places.append(Place(length, root, sibling, total_s))
    return made


def time_primitive(
    setting: Setting,
    name: str,
    call: Callable[[Place, Cursor], Cursor],
    start: Callable[[Place], Cursor],
    baseline: Callable[[Place], tuple[str, float | None]],
) -> Iterator[Line]:
    """Yield p50 and p99 of a primitive at every place, how flat they are, and the bytes it copied.

    Args:
        name: "fork", "mount" or "rewind", a key of the engine's `bytes_copied`.
        call: what is timed: gets the place and the cursor that `start` gave for it, and returns
            the cursor to close.
        baseline: name and milliseconds of what does the same without pages.

    Raises:
        WrongResult: bytes were copied, or the counters say another number of calls.
    """
    made = contexts(setting)
    engine, repeats = made.engine, setting.sizes.repeats
    before = engine.stats()
    medians = []
    for place in made.places:
        with setting.busy(f"{name} at {place.tokens} tokens"):
            times = _time(engine, place, call, start, repeats)
            other, other_ms = baseline(place)
        p50, p99 = percentiles_s(times)
        medians.append(p50)
        for what, seconds, limit in (("p50", p50, P50_MS), ("p99", p99, P99_MS)):
            yield Line.cost(
                f"{name} at {place.tokens} tokens, {what} of {repeats}",
                seconds * 1e3,
                "ms",
                limit,
                baseline=(other, other_ms),
            )
    found = [op for place in made.places for op in _operations(engine, place, call, start)]
    what = f"tensor operations that {len(made.places)} calls of {name} dispatched"
    which = f": {sorted(set(found))}" if found else ""
    yield Line.cost(what + which, len(found), "operations", 0)
    for length, reason in made.missing.items():
        yield Line.not_run(f"{name} at {length} tokens", reason)
    after = engine.stats()
    calls = after[f"{name}s"] - before[f"{name}s"]
    expected = (repeats + WARM_UP + 1) * len(made.places)
    if calls != expected:
        raise WrongResult(f"{calls} calls of {name} counted, {expected} made")
    copied = after["bytes_copied"][name] - before["bytes_copied"][name]
    yield Line.cost(
        f"bytes of KV and state that {calls} calls of {name} copied", copied, "bytes", 0
    )
    if len(medians) > 1:
        low, high = made.places[0].tokens, made.places[-1].tokens
        ratio = medians[-1] / medians[0]
        yield Line.cost(f"{name} p50 at {high} over that at {low} tokens", ratio, "times", 1)


class Recorder(TorchDispatchMode):
    """Notes the name of every tensor operation, on whatever device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _operations(
    engine: Engine,
    place: Place,
    call: Callable[[Place, Cursor], Cursor],
    start: Callable[[Place], Cursor],
) -> list[str]:
    """Names of the tensor operations of one call."""
    cursor = start(place)
    with Recorder() as recorder:
        moved = call(place, cursor)
    engine.close(moved)
    return recorder.names


def _time(
    engine: Engine,
    place: Place,
    call: Callable[[Place, Cursor], Cursor],
    start: Callable[[Place], Cursor],
    repeats: int,
) -> list[float]:
    """Seconds of each call after `WARM_UP` that do not count; what it returns is closed."""
    times = []
    for _ in range(WARM_UP + repeats):
        cursor = start(place)
        with timed() as seconds:
            moved = call(place, cursor)
        times.append(seconds.value)
        engine.close(moved)
    return times[WARM_UP:]
