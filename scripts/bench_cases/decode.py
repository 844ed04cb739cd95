"""Decode: threads that share a long prefix, steady state, against transformers' generation."""

from __future__ import annotations

import math
from collections.abc import Iterator

from octopus_trl import Cursor, Engine, SamplingParams

from .checks import check_decode, check_logits, plain_logits, tokens_of, warm_up
from .clock import timed
from .profile import STEPS, write_profile
from .setting import Line, Setting
from .stock import continuous_rate, generate_rate

SPARE = STEPS + 6  # tokens that a turn may still draw when the clock stops: none ends before
SAVED_STATES = 16  # beside one a thread and one a fork


def run(setting: Setting) -> Iterator[Line]:
    """Yield tokens/s for each number of threads, and what transformers reaches on as many."""
    sizes = setting.sizes
    check_decode(setting)
    engine = make_engine(setting, max(sizes.threads))
    warm_up(setting, engine)
    root_tokens = tokens_of(setting, sizes.shared, seed=31)
    with timed() as seconds, setting.busy(f"decode: prefix of {sizes.shared} tokens"):
        root = engine.open(root_tokens)
    setting.saw_prefill(sizes.shared, seconds.value)
    cursors: list[Cursor] = []
    unchecked: list[int] | None = root_tokens
    for threads in sizes.threads:
        name = (
            f"decode, {threads} threads, {sizes.shared} shared + {sizes.own} own tokens, "
            f"{sizes.steps} steps"
        )
        needed = setting.prefill_s((threads - len(cursors)) * sizes.own) + 2 * threads / 64
        if not setting.fits(needed):
            yield Line.not_run(name, setting.out_of_budget(needed))
            continue
        with timed() as seconds, setting.busy(f"{name}: own tokens"):
            fed = grow(setting, engine, root, cursors, threads)
        setting.saw_prefill(fed, seconds.value)
        with setting.busy(name):
            rate = steady_rate(setting, engine, cursors, check=unchecked)
        unchecked = None
        step_s = setting.shapes.decode_s(
            threads, shared=sizes.shared, own=sizes.own, rates=setting.rates
        )
        yield from against_stock(setting, name, threads, rate, threads / step_s)
    engine.sleep()


def make_engine(setting: Setting, threads: int) -> Engine:
    """Make an engine that holds the prefix and every thread's own tokens."""
    sizes = setting.sizes
    own = sizes.own + sizes.warm_steps + sizes.steps + SPARE
    once = sizes.shared + sizes.prefill_chunk + 3 * sizes.page_size  # prefix and warm-up
    pages = math.ceil(once / sizes.page_size) + threads * (own // sizes.page_size + 3)
    return Engine(
        setting.load(),
        page_size=sizes.page_size,
        num_pages=pages,
        num_states=2 * threads + SAVED_STATES,
        prefill_chunk=sizes.prefill_chunk,
    )


def grow(
    setting: Setting, engine: Engine, root: Cursor, cursors: list[Cursor], threads: int
) -> int:
    """Fork threads until there are enough and give each its own tokens; returns those fed.

    Own tokens before the turn are so many that their mean over the timed steps is `sizes.own`.
    """
    sizes = setting.sizes
    length = max(1, sizes.own - sizes.warm_steps - sizes.steps // 2)
    fed = 0
    while len(cursors) < threads:
        own = tokens_of(setting, length, seed=1_000 + len(cursors))
        cursors.append(engine.extend(engine.fork(root), own))
        fed += length
    return fed


def steady_rate(
    setting: Setting, engine: Engine, cursors: list[Cursor], check: list[int] | None
) -> float:
    """Tokens/s of turns that all decode at once; a fork of each thread decodes, and is closed.

    Args:
        check: the prefix, to compare the logits after the first thread's turn with those of a plain
            forward over its whole chain.
    """
    sizes = setting.sizes
    length = sizes.warm_steps + sizes.steps + SPARE
    forks = [engine.fork(cursor) for cursor in cursors]
    tickets = [
        engine.submit(fork, [], SamplingParams(max_tokens=length, seed=seed), until=())
        for seed, fork in enumerate(forks)
    ]
    for _ in range(sizes.warm_steps):
        engine.step()
    before = engine.stats()["decoded"]
    with timed() as seconds:
        for _ in range(sizes.steps):
            engine.step()
    decoded = engine.stats()["decoded"] - before
    if setting.profile is not None:
        write_profile(setting.profile / f"decode_{len(cursors)}.txt", engine.step)
    drawn = [engine.cancel(ticket)[0] for ticket in tickets]
    if check is not None:
        own = max(1, sizes.own - sizes.warm_steps - sizes.steps // 2)
        chain = [*check, *tokens_of(setting, own, seed=1_000), *drawn[0]]
        check_logits(setting, engine.logits(forks[0]), plain_logits(setting.load(), chain)[0])
    for fork in forks:
        engine.close(fork)
    return decoded / seconds.value


def against_stock(
    setting: Setting, name: str, threads: int, rate: float, limit: float
) -> Iterator[Line]:
    """Yield the figure beside `generate`, and beside continuous batching."""
    sizes = setting.sizes
    work = f"{threads} sequences of {sizes.prompt} tokens + {sizes.baseline_steps}"
    needed = setting.prefill_s(threads * sizes.prompt) + sizes.baseline_steps / 5
    generate: tuple[str, float | None]
    if setting.fits(needed):
        with setting.busy(f"{name}: generate"):
            stock, reason = generate_rate(setting, threads)
        failed = f": failed ({reason})" if stock is None else ""
        generate = (f"transformers generate, {work}{failed}", stock)
    else:
        generate = (f"transformers generate: not run ({setting.out_of_budget(needed)})", None)
    yield Line.rate(name, rate, "tokens/s", limit, baseline=generate)
    # Prefill is inside this figure and its kernels are other ones, so it has a line of its own.
    if setting.fits(needed):
        with setting.busy(f"{name}: continuous batching"):
            batched, reason = continuous_rate(setting, threads)
        baseline = f"transformers continuous batching, {work}, prefill included"
        if batched is None:
            baseline = f"transformers continuous batching: does not run ({reason})"
        yield Line.rate(
            f"{name}, against continuous batching",
            rate,
            "tokens/s",
            limit,
            baseline=(baseline, batched),
        )
