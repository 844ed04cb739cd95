"""Prefill in chunks, fresh and over a shared prefix, and of one short text, against a plain forward
of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from octopus_trl import Cursor, Engine

from .checks import check_logits, plain_logits, tokens_of
from .clock import percentiles_s, sample_s, timed
from .setting import Line, Setting

WARM_UP = 3  # calls of each shape: a GPU engine compiles in the first and captures in the second


def run(setting: Setting) -> Iterator[Line]:
    """Yield tokens/s for each `prefill_chunk`, where the share is MFU, and the time of a tool text.

    FLOPs by `Shapes.prefill_flops`, peak 989 TFLOP/s on an H200 in bf16 and this device's own
    matrix product elsewhere.
    """
    sizes, shapes = setting.sizes, setting.shapes
    prefix = tokens_of(setting, sizes.prefix, seed=61)
    new = tokens_of(setting, sizes.new, seed=62)
    whole = [*prefix, *new]
    plain_s, reason = _plain_s(setting, prefix, whole)
    fresh_limit = setting.rates.flops * sizes.prefix / shapes.prefill_flops(sizes.prefix, 0)
    new_limit = setting.rates.flops * sizes.new / shapes.prefill_flops(sizes.new, sizes.prefix)
    for chunk in sizes.chunks:
        fresh = f"prefill of {sizes.prefix} tokens, chunks of {chunk}"
        shared = f"prefill of {sizes.new} tokens on {sizes.prefix} shared, chunks of {chunk}"
        needed = setting.prefill_s(len(whole) + 2 * sizes.new)
        if not setting.fits(needed):
            yield Line.not_run(fresh, setting.out_of_budget(needed))
            yield Line.not_run(shared, setting.out_of_budget(needed))
            continue
        with setting.busy(fresh):
            fresh_s, new_s, short_s = _ours_s(
                setting, prefix, new, chunk, check=plain_s is not None
            )
        yield Line.rate(
            f"{fresh}, share is MFU",
            sizes.prefix / fresh_s,
            "tokens/s",
            fresh_limit,
            baseline=(
                f"plain forward of transformers over the same tokens, tokens/s{reason}",
                None if plain_s is None else sizes.prefix / plain_s[0],
            ),
        )
        yield Line.rate(
            f"{shared}, share is MFU",
            sizes.new / new_s,
            "tokens/s",
            new_limit,
            baseline=(
                f"plain forward over all {len(whole)} tokens, new tokens/s{reason}",
                None if plain_s is None else sizes.new / plain_s[1],
            ),
        )
        yield Line.cost(
            f"{sizes.tool} tokens of text on {sizes.prefix} shared to logits, p50 of "
            f"{len(short_s)}, chunks of {chunk}, share is that of reading the weights once",
            percentiles_s(short_s)[0] * 1e3,
            "ms",
            setting.shapes.weight_bytes / setting.rates.bytes_s * 1e3,
            baseline=(
                f"plain forward over the {sizes.prefix} tokens before it, ms{reason}",
                None if plain_s is None else plain_s[0] * 1e3,
            ),
        )


def _plain_s(
    setting: Setting, prefix: list[int], whole: list[int]
) -> tuple[tuple[float, float] | None, str]:
    """Seconds of plain forwards over the prefix and over all, and why there are none."""
    needed = 2 * setting.prefill_s(len(prefix) + len(whole))
    if not setting.fits(needed):
        return None, f": not run ({setting.out_of_budget(needed)})"
    model = setting.load()
    seconds = []
    with setting.busy("plain forwards of transformers"):
        for tokens in (prefix, whole):
            plain_logits(model, tokens)  # kernels that are compiled for a length are compiled here
            with timed() as took:
                end = plain_logits(model, tokens)
            seconds.append(took.value)
    setting.kept["prefill_end"] = end[0]
    return (seconds[0], seconds[1]), ""


def _ours_s(
    setting: Setting, prefix: list[int], new: list[int], chunk: int, *, check: bool
) -> tuple[float, float, list[float]]:
    """Seconds of opening a prompt, of extending a fork of it, and of giving several forks a tool
    text each and asking for their logits; shapes warmed up before.

    Args:
        check: compare the logits at the end with the plain forward's.
    """
    sizes = setting.sizes
    pages = math.ceil((len(prefix) + 2 * len(new)) / sizes.page_size) + 16
    engine = Engine(
        setting.load(),
        page_size=sizes.page_size,
        num_pages=pages + math.ceil(chunk / sizes.page_size),
        num_states=16,
        prefill_chunk=chunk,
    )
    first = engine.open(new[:1])
    for _ in range(WARM_UP):
        engine.close(engine.extend(engine.fork(first), new[:chunk]))
    with timed() as fresh:
        root = engine.open(prefix)
    setting.saw_prefill(len(prefix), fresh.value)
    engine.close(engine.extend(engine.fork(root), new))
    thread = engine.fork(root)
    with timed() as extended:
        engine.extend(thread, new)
    if check:
        check_logits(setting, engine.logits(thread), setting.kept["prefill_end"])
    tool = tokens_of(setting, sizes.tool, seed=63)

    def read(reader: Cursor) -> Cursor:
        engine.logits(engine.extend(reader, tool))
        return reader

    short = []
    for _ in range(WARM_UP + max(3, sizes.repeats // 10)):
        reader = engine.fork(root)
        short += sample_s(lambda reader=reader: read(reader), repeats=1, after=engine.close)  # type: ignore[misc]
    engine.sleep()
    return fresh.value, extended.value, short[WARM_UP:]
