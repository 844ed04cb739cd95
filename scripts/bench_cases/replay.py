"""Replays of an episode mix: on shared pages, and flat; and what either must count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octopus_trl import Cursor, Engine, SamplingParams, Trace

from .clock import timed
from .limits import Rates, Shapes
from .mix import Mix
from .setting import Setting, WrongResult


@dataclass(slots=True)
class Implied:
    """What a trace alone says that an engine must count (DESIGN §4).

    Attributes:
        seen: for each segment, ids that its tokens see before the first of it.
        visible: over all given segments, tokens in `seen`.
        chains: the same without what was mounted.
        peak: most tokens that threads reached at the end of a round.
        separate: tokens that all threads reached at the end, each counted for itself.
    """

    trace: Trace
    seen: list[set[int]]
    given: int
    sampled: int
    visible: int
    chains: int
    forks: int
    mounts: int
    rewinds: int
    peak: int
    separate: int

    @property
    def hit_rate(self) -> float:
        """Share of the tokens that turns began after which were not prefilled for them.

        A turn begins after its chain and what it is given; mounted text counts on neither side, as
        it does for an engine that knows no mounts.
        """
        return self.chains / (self.chains + self.given)

    def tokens(self, segments: set[int]) -> int:
        """Tokens of some segments."""
        return sum(len(self.trace.segments[index].tokens) for index in segments)


def implied_by(trace: Trace, mix: Mix) -> Implied:
    """Count what a replay of a mix must do."""
    seen: list[set[int]] = []
    for segment in trace.segments:
        parent = segment.parent
        before = set() if parent is None else seen[parent] | {parent}
        seen.append(before | set(segment.mounts))
    given = [segment for segment in trace.segments if segment.kind != "action"]
    implied = Implied(
        trace=trace,
        seen=seen,
        given=sum(len(segment.tokens) for segment in given),
        sampled=trace.num_owned,
        visible=0,
        chains=0,
        forks=sum(thread.parent is not None for thread in trace.threads),
        mounts=sum(len(turn.reads) for turn in mix.turns),
        rewinds=sum(turn.keep is not None for turn in mix.turns),
        peak=0,
        separate=0,
    )
    implied.visible = sum(implied.tokens(seen[segment.id]) for segment in given)
    implied.chains = sum(len(trace.linearize(segment.id)[0]) for segment in given) - implied.given
    reached: dict[int, set[int]] = {}
    for number in range(mix.num_rounds):
        for turn, (_, drawn) in zip(mix.of_round(number), mix.segments(number), strict=True):
            reached[turn.thread] = seen[drawn] | {drawn}
        implied.peak = max(implied.peak, implied.tokens(set().union(*reached.values())))
    implied.separate = sum(implied.tokens(segments) for segments in reached.values())
    return implied


def ideal_s(
    implied: Implied, mix: Mix, rounds: Sequence[int], shapes: Shapes, rates: Rates
) -> float:
    """Least seconds of some rounds: FLOPs of what is given, bytes of each decode step.

    A step reads weights once, each token's keys and values once however many threads see it, and
    reads and writes the state of every thread that still draws.
    """
    total = 0.0
    segments = implied.trace.segments
    for number in rounds:
        places = mix.segments(number)
        for given, _ in places:
            length = len(segments[given].tokens)
            flops = shapes.prefill_flops(length, implied.tokens(implied.seen[given]))
            total += flops / rates.flops
        places.sort(key=lambda place: len(segments[place[1]].tokens))
        done = 0
        for index, (_, drawn) in enumerate(places):
            steps = len(segments[drawn].tokens) - done
            done += steps
            live = [implied.seen[other] for _, other in places[index:]]
            threads = len(live)
            kv_bytes = implied.tokens(set().union(*live)) * shapes.kv_bytes
            flops = sum(map(implied.tokens, live)) * shapes.seen_flops
            rest = shapes.weight_bytes + 2 * threads * shapes.state_bytes
            attention_s = max(kv_bytes / rates.bytes_s, flops / rates.attention_flops)
            total += steps * (rest / rates.bytes_s + attention_s)
    return total


def make_engine(setting: Setting, tokens: int, threads: int) -> Engine:
    """Make an engine with room for so many tokens, and for a state at the end of every chunk."""
    sizes = setting.sizes
    return Engine(
        setting.load(),
        page_size=sizes.page_size,
        num_pages=math.ceil(1.05 * tokens / sizes.page_size) + 64 * threads,
        num_states=8 * threads + tokens // sizes.prefill_chunk,
        prefill_chunk=sizes.prefill_chunk,
    )


def replay(engine: Engine, mix: Mix, trace: Trace) -> list[float]:
    """Replay an episode and give the seconds of each round.

    Tool texts are the trace's; turns draw as many tokens as it says, whatever they are.

    Raises:
        WrongResult: a thread ends at another length or position than the trace says (paper Eq. 2).
    """
    cursors: dict[int, Cursor] = {}
    seconds = []
    for number in range(mix.num_rounds):
        turns, places = mix.of_round(number), mix.segments(number)
        with timed() as took:
            for turn in turns:
                if turn.fork is not None:
                    cursors[turn.thread] = engine.fork(cursors[turn.fork])
            for turn, (given, _) in zip(turns, places, strict=True):
                parent = trace.segments[given].parent
                if turn.keep is not None and parent is not None:
                    length = len(trace.linearize(parent)[0])
                    engine.rewind(cursors[turn.thread], length)
            for turn in turns:
                for source in turn.reads:
                    engine.mount(cursors[turn.thread], cursors[source])
            lengths = []
            for turn, (given, drawn) in zip(turns, places, strict=True):
                tokens = trace.segments[given].tokens
                if turn.thread not in cursors:
                    cursors[turn.thread], tokens = engine.open(tokens), []
                length = len(trace.segments[drawn].tokens)
                params = SamplingParams(max_tokens=length, seed=drawn)
                engine.submit(cursors[turn.thread], tokens, params, until=())
                lengths.append(length)
            finish(engine, lengths)
        seconds.append(took.value)
        for turn, (_, drawn) in zip(turns, places, strict=True):
            cursor, end = cursors[turn.thread], trace.segments[drawn].end
            length = len(trace.linearize(drawn)[0])
            if (cursor.num_tokens, cursor.position) != (length, end):
                raise WrongResult(
                    f"thread {turn.thread} after round {number}: {cursor!r} of {cursor.num_tokens} "
                    f"tokens, the trace says {length} and position {end}"
                )
    return seconds


def flat_round_s(setting: Setting, implied: Implied, mix: Mix, number: int) -> float:
    """Seconds of one round where every turn's whole context is prefilled as its own prompt.

    The context is what the turn sees, mounted text first, then its chain; the first token differs
    between turns, so that the engine finds nothing to share.
    """
    trace = implied.trace
    prompts, lengths = [], []
    for index, (given, drawn) in enumerate(mix.segments(number)):
        chain = trace.linearize(given)[0]
        own = set()
        parent: int | None = given
        while parent is not None:
            own.add(parent)
            parent = trace.segments[parent].parent
        mounted = sorted(implied.seen[given] - own)
        read = [token for segment in mounted for token in trace.segments[segment].tokens]
        prompts.append([index, *read, *chain])
        lengths.append(len(trace.segments[drawn].tokens))
    total = sum(map(len, prompts)) + sum(lengths)
    engine = make_engine(setting, total, len(prompts))
    with timed() as seconds:
        for prompt, length in zip(prompts, lengths, strict=True):
            params = SamplingParams(max_tokens=length, seed=length)
            engine.submit(engine.open(prompt), [], params, until=())
        finish(engine, lengths)
    stats = engine.stats()
    engine.sleep()
    if stats["reused"] > len(prompts):
        raise WrongResult(f"flat turns shared {stats['reused']} tokens")
    return seconds.value


def flat_tokens(implied: Implied, mix: Mix, rounds: Sequence[int]) -> int:
    """Count the tokens that flat turns of some rounds prefill."""
    given = [place[0] for number in rounds for place in mix.segments(number)]
    return sum(implied.tokens(implied.seen[index] | {index}) for index in given)


def new_tokens(implied: Implied, mix: Mix, rounds: Sequence[int]) -> int:
    """Count the tokens given and drawn in some rounds."""
    return implied.tokens({index for n in rounds for place in mix.segments(n) for index in place})


def finish(engine: Engine, lengths: Sequence[int]) -> None:
    """Step until every queued turn has ended.

    Raises:
        WrongResult: a turn failed, or drew another number of tokens than it was to.
    """
    drawn: list[int] = []
    while engine.has_work:
        for ended in engine.step():
            if ended.reason != "length":
                raise WrongResult(f"a turn ended by {ended.reason}: {ended.error}")
            drawn.append(len(ended.tokens))
    if sorted(drawn) != sorted(lengths):
        raise WrongResult(f"turns drew {sorted(drawn)} tokens, not {sorted(lengths)}")


def check_counters(stats: Mapping[str, Any], implied: Implied) -> None:
    """Compare an engine's counters with what the trace implies.

    Raises:
        WrongResult: one differs; all that do are named.
    """
    expected = {
        "prefilled": implied.given,
        "re_prefilled": 0,
        "decoded": implied.sampled,
        "forks": implied.forks,
        "mounts": implied.mounts,
        "rewinds": implied.rewinds,
        "opens": 1,
    }
    wrong = [
        f"{name} is {stats[name]}, the trace says {value}"
        for name, value in expected.items()
        if stats[name] != value
    ]
    if abs(stats["hit_rate"] - implied.hit_rate) > 1e-9:
        wrong.append(f"hit_rate is {stats['hit_rate']}, the trace says {implied.hit_rate}")
    if wrong:
        raise WrongResult("; ".join(wrong))
