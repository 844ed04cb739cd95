"""Crossings of recorded episodes, seal probes, and rollout against training."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from octopus_trl.errors import ConfigError
from octopus_trl.eval.crossings import crossings_of
from octopus_trl.eval.mount_kl import mount_kl
from octopus_trl.eval.readings import READINGS, crossing_episode
from octopus_trl.eval.seal_join import World, WorldConfig
from octopus_trl.eval.seal_probes import seal_probes
from octopus_trl.trace import Segment, ThreadRecord, Trace
from tests.tiny import random_trace


def two_workers(turns: int = 3, *, same: bool = False) -> Trace:
    """A root forks two threads; each has tool text and a turn, again and again."""
    segments = [Segment(0, 0, None, "prompt", [1, 2]), Segment(1, 0, 0, "action", [3])]
    heads = {1: 1, 2: 1}
    for turn in range(turns):
        for thread in (1, 2):
            mark = 10 * (turn + 1) + (0 if same else thread)
            tool = Segment(len(segments), thread, heads[thread], "tool", [mark, mark])
            action = Segment(tool.id + 1, thread, tool.id, "action", [50 + mark] * 3)
            segments += [tool, action]
            heads[thread] = action.id
    threads = [
        ThreadRecord(0, None, head=1),
        *(ThreadRecord(t, 0, "t", head=heads[t]) for t in (1, 2)),
    ]
    return Trace("e", "p", threads=threads, segments=segments).place().check()


def test_a_crossing_puts_the_sibling_before_a_turn_that_was_drawn_without_it() -> None:
    seen = set()
    for seed in range(40):
        (crossing,) = crossings_of([two_workers()], seed=seed)
        seen.add(crossing.id)
        reader, sibling, turn = map(int, crossing.id.split("-")[1:])
        assert {reader, sibling} == {1, 2}
        assert crossing.prompt == (1, 2, 3)
        own = 10 * (turn + 1) + reader
        assert crossing.cue == (own, own)
        assert crossing.own_next == (50 + own,) * 3
        assert crossing.sibling_next == (50 + own - reader + sibling,) * 3
        # The sibling's chain ends with the tool text before its turn, the reader's before its own.
        assert crossing.sibling[-1] == own - reader + sibling
        assert crossing.own[-1] == 50 + own - 10
    assert len(seen) == 4  # two readers, two turns each


def test_the_mounted_episode_of_a_crossing_is_the_recorded_one_with_a_read_put_in() -> None:
    (crossing,) = crossings_of([two_workers(2)])
    recorded = two_workers(2)
    chain, positions = recorded.linearize(
        recorded.threads[int(crossing.id.split("-")[1])].head or 0
    )
    alone = crossing_episode(crossing, "none", crossing.own_next)
    assert alone.linearize(4) == (chain, positions)
    for name in READINGS:
        crossing_episode(crossing, name, crossing.own_next).check()


def test_threads_that_read_say_the_same_or_have_one_turn_make_no_crossing() -> None:
    assert crossings_of([two_workers(1)]) == []
    assert crossings_of([two_workers(same=True)]) == []
    read = two_workers()
    first = next(s for s in read.segments if s.thread == 2 and s.kind == "tool")
    first.mounts = [2]
    assert crossings_of([read.place()]) == []


@pytest.mark.parametrize("exchange", ["transcript", "summary"])
def test_a_thread_that_was_pasted_its_siblings_text_has_read(exchange: str) -> None:
    trace = two_workers(3)
    trace.exchange = exchange
    turns = [s.id for s in trace.segments if s.thread == 1 and s.kind == "action"]
    given = {"type": "turn", "thread": 1, "segment": turns[0], "calls": [["read_thread", "ok"]]}
    trace.events = [given]
    assert crossings_of([trace]) == []
    trace.events = [{**given, "segment": turns[1]}]
    assert {crossings_of([trace], seed=seed)[0].id[-1] for seed in range(20)} == {"1"}
    trace.events = [{**given, "calls": [["read_thread", "refused"]]}]
    assert {crossings_of([trace], seed=seed)[0].id[-1] for seed in range(20)} == {"1", "2"}
    trace.events = [{**given, "thread": 0, "segment": 1}]  # its children do not see that text
    assert crossings_of([trace])


def test_crossings_come_again_with_their_seed() -> None:
    traces = [two_workers(4) for _ in range(12)]
    assert crossings_of(traces, seed=3) == crossings_of(traces, seed=3)
    assert crossings_of(traces, seed=3) != crossings_of(traces, seed=4)


class Letters:
    """A tokenizer of letters."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(map(ord, text))


def test_a_seal_stands_on_the_siblings_page_and_nowhere_else() -> None:
    world = World(WorldConfig(num_adjectives=12, num_nouns=12))
    for sibling, own in ((1, 2), (2, 1)):
        for probe in seal_probes(world, Letters(), 6, seed=5, sibling_pages=sibling, own_pages=own):
            names = ("sibling", "own", "answer", "own_next", "sibling_next")
            text = {name: "".join(map(chr, getattr(probe, name))) for name in names}
            assert text["answer"].strip(" .") in text["sibling"]
            assert text["answer"].strip(" .") not in text["own"]
            assert text["own_next"].strip(" .") in text["own"]
            assert text["sibling_next"].strip(" .") in text["sibling"]
            assert probe.sibling_ahead is (sibling > own)
    with pytest.raises(ConfigError, match="each must be at least 1"):
        seal_probes(world, Letters(), 0)


def moved(traces: Sequence[Trace], by: float) -> list[list[list[float]]]:
    return [
        [
            [step + by for step in segment.logps or [0.0] * len(segment.tokens)]
            for segment in t.segments
        ]
        for t in traces
    ]


def test_the_kl_of_equal_scores_is_zero_and_of_moved_ones_the_formula() -> None:
    traces = [random_trace(seed, logps=True) for seed in random.sample(range(1000), 4)]
    same = mount_kl(traces, lambda part: moved(part, 0.0))
    assert same["kl"].value == same["kl_mounted"].value == 0.0
    step = 0.25
    off = mount_kl(traces, lambda part: moved(part, step))
    assert off["kl"].value == pytest.approx(math.expm1(step) - step)
    assert off["kl"].n == 4


def test_only_tokens_that_saw_a_mount_count_as_mounted() -> None:
    trace = random_trace(11, logps=True, mounts=False)
    figures = mount_kl([trace], lambda part: moved(part, 0.1))
    assert figures["kl_mounted"].value is None
    for segment in trace.segments:
        segment.logps = None
    with pytest.raises(ConfigError, match="no sampled token"):
        mount_kl([trace], lambda part: moved(part, 0.1))
