"""A frozen episode replayed on shared pages, against prefilling every turn's context again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from .mix import EPISODE_V1, Mix, read, trace_of
from .replay import (
    Implied,
    check_counters,
    flat_round_s,
    flat_tokens,
    ideal_s,
    implied_by,
    make_engine,
    new_tokens,
    replay,
)
from .setting import Line, Setting

HIT_RATE = 0.896  # paper, `kv-hit-rate`
DECODE_STEP_S = 0.005  # that the budget reckons with
REHEARSAL = 64  # lengths are divided by it


def run(setting: Setting) -> Iterator[Line]:
    """Yield speed, counters and memory of a replay; counters that the trace contradicts end it."""
    scale, page_size = setting.sizes.mix_scale, setting.sizes.page_size
    mix = read(EPISODE_V1).shortened(scale)
    trace = trace_of(mix, setting.load().config.vocab_size)
    implied = implied_by(trace, mix)
    name = f"{mix.name}, {len(mix.turns)} turns" + (f", lengths / {scale}" if scale > 1 else "")
    longest = [max(turn.sampled for turn in mix.of_round(n)) for n in range(mix.num_rounds)]
    needed = setting.prefill_s(implied.given) + DECODE_STEP_S * sum(longest)
    if not setting.fits(needed):
        yield Line.not_run(name, setting.out_of_budget(needed))
        return
    if setting.device.type == "cuda":
        rehearse(setting, mix)
    engine = make_engine(setting, implied.given + implied.sampled, len(trace.threads))
    with setting.busy(name):
        round_s = replay(engine, mix, trace)
    stats = engine.stats()
    check_counters(stats, implied)
    engine.check_integrity()
    engine.sleep()
    yield from _speed(setting, name, mix, implied, round_s)
    yield Line.rate(
        f"{name}: hit rate, limit is what the trace implies",
        stats["hit_rate"],
        "share of tokens",
        implied.hit_rate,
        baseline=("the paper's, over its own traffic", HIT_RATE),
    )
    flat = flat_tokens(implied, mix, range(mix.num_rounds))
    yield Line.cost(
        f"{name}: tokens prefilled again",
        stats["re_prefilled"],
        "tokens",
        0,
        baseline=("flat re-prefill of all turns, by count", flat - implied.given),
    )
    yield Line.cost(f"{name}: tokens replayed for a state", stats["replayed"], "tokens", 0)
    mounted = sum(implied.tokens(set(segment.mounts)) for segment in trace.segments)
    copying = {
        "fork": implied.forks * setting.shapes.state_bytes,
        "mount": mounted * setting.shapes.kv_bytes,
        "rewind": implied.rewinds * setting.shapes.state_bytes,
    }
    for primitive, by_copy in copying.items():
        yield Line.cost(
            f"{name}: bytes copied by {stats[primitive + 's']} {primitive}s",
            stats["bytes_copied"][primitive],
            "bytes",
            0,
            baseline=("states and mounted keys and values copied instead, by count", by_copy),
        )
    yield Line.cost(
        f"{name}: peak pages of {page_size} tokens",
        stats["peak_pages"],
        "pages",
        math.ceil(implied.peak / page_size),
        baseline=(
            "what each thread sees on pages of its own, by count",
            math.ceil(implied.separate / page_size),
        ),
    )


def rehearse(setting: Setting, mix: Mix) -> None:
    """Replay the episode with short lengths, so that no clock sees a kernel being compiled."""
    short = mix.shortened(REHEARSAL)
    trace = trace_of(short, setting.load().config.vocab_size)
    engine = make_engine(setting, sum(trace.lengths), len(trace.threads))
    with setting.busy(f"{mix.name}: rehearsal"):
        replay(engine, short, trace)
    engine.sleep()


def _speed(
    setting: Setting, name: str, mix: Mix, implied: Implied, round_s: Sequence[float]
) -> Iterator[Line]:
    """Yield tokens/s of the replay, and the time of the rounds that were run flat as well."""
    shapes, rates = setting.shapes, setting.rates
    rounds = range(mix.num_rounds)
    flat_s, done, skipped = 0.0, [], []
    for number in setting.sizes.flat_rounds or rounds:
        needed = setting.prefill_s(flat_tokens(implied, mix, [number]))
        if setting.fits(needed):
            with setting.busy(f"{name}: round {number} flat"):
                flat_s += flat_round_s(setting, implied, mix, number)
            done.append(number)
        else:
            skipped.append(number)
    chosen = "all rounds" if len(done) == len(rounds) else f"rounds {done} of {len(rounds)}"
    if skipped:
        chosen += f", {skipped} not run for the budget"
    tokens = implied.given + implied.sampled
    ideal = ideal_s(implied, mix, rounds, shapes, rates)
    rate = new_tokens(implied, mix, done) / flat_s if done else None
    yield Line.rate(
        f"{name}: given and drawn tokens",
        tokens / sum(round_s),
        "tokens/s",
        tokens / ideal,
        baseline=(f"flat re-prefill on the same engine, {chosen}, tokens/s", rate),
    )
    if done:
        yield Line.cost(
            f"{name}: {chosen}",
            sum(round_s[number] for number in done),
            "s",
            ideal_s(implied, mix, done, shapes, rates),
            baseline=("flat re-prefill of the same turns, s", flat_s),
        )
    else:
        yield Line.not_run(f"{name}: against flat re-prefill", chosen)
