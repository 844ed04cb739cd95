"""Likelihood metrics of probes: what each is 0, 1 and between, and what it is blind to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from octopus_trl.errors import ConfigError
from octopus_trl.eval.errands import errand_probes
from octopus_trl.eval.intervals import Estimate, ratio, share, share_by_example
from octopus_trl.eval.intervals import mean as mean_of
from octopus_trl.eval.mechanism import (
    Answered,
    Crossed,
    argmax_agreement,
    figures_of,
    hijack_choice,
    identifier_recall,
    policy_drift,
    retained_information,
    score_probes,
)
from octopus_trl.eval.probes import Probe
from octopus_trl.eval.readings import READINGS, Crossing, crossing_episode, question_episode
from octopus_trl.trace import Trace


def answered(
    nll: float, choices: Sequence[int] = (1, 2), right: Sequence[int] = (1, 2)
) -> Answered:
    return Answered(nll, tuple(choices), tuple(choices) == tuple(right), True)


def crossing() -> Crossing:
    return Crossing(
        "c", (1, 2), (3, 4, 5), (6, 7), (8,), (9,), own_next=(10, 11), cue=(12,), sibling_next=(13,)
    )


def test_a_read_between_nothing_and_the_full_text_keeps_its_share_of_the_information() -> None:
    none, full = [answered(10.0), answered(6.0)], [answered(2.0), answered(2.0)]
    half = [answered(6.0), answered(4.0)]
    assert retained_information(none, none, full).value == 0.0
    assert retained_information(none, full, full).value == 1.0
    assert retained_information(none, half, full).value == 0.5
    worse = [answered(12.0), answered(6.0)]
    assert (retained_information(none, worse, full).value or 0.0) < 0


def test_information_is_a_ratio_of_sums_and_not_a_mean_of_ratios() -> None:
    none, full = [answered(9.0), answered(1.0)], [answered(0.0), answered(0.0)]
    read = [answered(0.0), answered(1.0)]
    assert retained_information(none, read, full).value == pytest.approx(0.9)


def test_recall_needs_every_token_and_has_wilsons_interval() -> None:
    answers = [answered(1.0), answered(1.0, (1, 3)), answered(1.0), answered(1.0)]
    recall = identifier_recall(answers)
    assert (recall.value, recall.n) == (0.75, 4)
    assert recall.interval == share([True, False, True, True]).interval


def test_agreement_counts_tokens_and_ignores_what_is_right() -> None:
    full = [answered(1.0, (5, 5)), answered(1.0, (1, 2))]
    read = [answered(1.0, (5, 4)), answered(1.0, (1, 2))]
    assert argmax_agreement(read, full).value == 0.75
    assert argmax_agreement(full, full).value == 1.0


def test_drift_is_nats_a_token_over_no_exchange() -> None:
    alone = [Crossed(1.0, 2.0, None), Crossed(3.0, 6.0, None)]
    moved = [Crossed(1.5, 3.0, None), Crossed(3.1, 6.2, None)]
    assert policy_drift(moved, alone).value == pytest.approx(0.3)
    assert policy_drift(alone, alone).value == 0.0


def test_a_choice_is_hijacked_where_the_siblings_words_are_likelier() -> None:
    choices = [Crossed(1.0, 2.0, 3.0), Crossed(1.0, 2.0, 1.0), Crossed(1.0, 2.0, None)]
    assert hijack_choice(choices).value == 0.5
    assert hijack_choice(choices).n == 2


def test_readings_of_unequal_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="score all of them on the same"):
        argmax_agreement([answered(1.0)], [])


@pytest.mark.parametrize("name", list(READINGS))
def test_every_reading_is_a_legal_episode_that_says_the_same_words(name: str) -> None:
    probe = crossing()
    for trace, said in (
        (question_episode(probe, name), probe.answer),
        (crossing_episode(probe, name, probe.own_next), probe.own_next),
    ):
        assert tuple(trace.segments[-1].tokens) == said
        assert bool(trace.segments[3].mounts) == READINGS[name].mounts
        pasted = list(probe.sibling) if name == "transcript" else []
        assert trace.segments[3].tokens[: len(pasted)] == pasted
        rule = trace.position
        starts = [segment.start for segment in trace.segments]
        assert starts == [segment.start for segment in trace.place().segments], rule


def test_without_a_cue_the_read_takes_effect_before_the_last_own_token() -> None:
    probe = Probe("p", (1,), (2, 3), (4, 5, 6), (7,), (8,), own_next=(9,))
    trace = crossing_episode(probe, "mount", probe.own_next)
    assert [segment.tokens for segment in trace.segments[2:]] == [[4, 5], [6], [9]]
    assert trace.segments[3].mounts == [1]
    short = Probe("p", (1,), (2,), (4,), (7,), (8,), own_next=(9,))
    with pytest.raises(ConfigError, match="needs at least 2"):
        crossing_episode(short, "mount", short.own_next)


def told(traces: Sequence[Trace]) -> list[tuple[list[float], list[int]]]:
    """A reader that knows what it is told: pasted text counts whole, mounted text half."""
    said = []
    for trace in traces:
        given = trace.segments[3]
        known = 2 if len(given.tokens) > 3 else 1 if given.mounts else 0
        last = trace.segments[-1].tokens
        said.append(([-4.0 + 2.0 * known] * len(last), last if known else [0] * len(last)))
    return said


def test_figures_of_a_known_reader_are_known() -> None:
    probes = [crossing(), crossing()]
    scored = score_probes(probes, ["none", "mount", "transcript"], told)
    figures = figures_of(scored, "mount")
    assert figures["answer_nll"].value == 2.0
    assert figures["retained_information"].value == 0.5
    assert figures["recall"].value == figures["argmax_agreement"].value == 1.0
    assert figures["recall_ahead"].n == 2
    assert "recall_behind" not in figures
    assert figures["drift"].value == -2.0
    assert figures["hijack_choice"].value == 1.0  # its sibling's words are one token, not two
    assert figures_of(scored, "none")["recall"].value == 0.0


def test_more_probes_join_an_earlier_measurement() -> None:
    readings = ["none", "transcript"]
    scored = score_probes([crossing()], readings, told)
    score_probes([crossing()], readings, told, into=scored)
    assert figures_of(scored, "none")["recall"].n == 2


@pytest.mark.parametrize(
    ("names", "reason"),
    [(["none", "glance", "transcript"], "glance"), (["none", "mount"], "transcript must be")],
)
def test_readings_that_cannot_be_compared_are_refused(names: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        score_probes([crossing()], names, told)


def test_a_ratio_draws_an_examples_part_and_whole_together() -> None:
    parts, wholes = [1.0] * 30, [2.0] * 30
    assert ratio(parts, wholes) == Estimate(0.5, (0.5, 0.5), 30)
    draws = np.random.default_rng()
    some = draws.uniform(size=30).tolist()
    figure = ratio(some, wholes)
    assert figure.interval is not None
    assert figure.value is not None
    assert figure.interval[0] < figure.value < figure.interval[1]


def test_a_share_that_is_none_or_all_keeps_an_interval() -> None:
    none = share_by_example([0] * 50, [2] * 40 + [0] * 10)
    assert (none.value, none.n) == (0.0, 50)
    assert none.interval == share([False] * 40).interval
    everything = share_by_example([3, 3], [3, 3])
    assert everything.interval == share([True, True]).interval
    some = share_by_example([1, 0, 2], [2, 2, 2])
    assert some == ratio([1, 0, 2], [2, 2, 2])
    assert share_by_example([], []) == Estimate(None, None, 0)


def test_a_ratio_whose_whole_may_have_either_sign_has_no_interval() -> None:
    parts, wholes = [1.0, 2.0, 3.0, 4.0], [5.0, -4.0, 3.0, -3.5]
    assert ratio(parts, wholes) == Estimate(20.0, None, 4)
    below = ratio(parts, [-2.0, -3.0, -4.0, -5.0])
    assert below.interval is not None
    assert below.interval[0] < -10 / 14 < below.interval[1] < 0


def test_one_example_tells_nothing_of_the_spread() -> None:
    assert mean_of([3.0]) == Estimate(3.0, None, 1)
    assert ratio([1.0], [2.0]) == Estimate(0.5, None, 1)


def test_figures_over_nothing_have_no_value() -> None:
    assert ratio([], []) == Estimate(None, None, 0)
    assert ratio([0.0], [0.0]) == Estimate(None, None, 1)
    assert share([]) == mean_of([]) == Estimate(None, None, 0)
    with pytest.raises(ConfigError, match="one of each"):
        ratio([1.0], [])


def encode(text: str) -> list[int]:
    return [ord(symbol) % 127 for symbol in text]


def test_an_errands_answer_is_the_siblings_and_its_errand_is_not_the_readers() -> None:
    for probe in errand_probes(encode, 20, seed=1, sibling_searches=2, own_searches=5):
        texts = {name: "".join(map(chr, getattr(probe, name))) for name in ("sibling", "own")}
        own, sibling = ("".join(map(chr, each)) for each in (probe.own_next, probe.sibling_next))
        assert own in texts["own"]
        assert sibling in texts["sibling"]
        assert own not in texts["sibling"]
        assert sibling not in texts["own"]
        assert not probe.sibling_ahead
    assert errand_probes(encode, 3, seed=1) == errand_probes(encode, 3, seed=1)
    with pytest.raises(ConfigError, match="own_searches=0"):
        errand_probes(encode, 3, own_searches=0)


def test_a_crossing_without_a_question_asks_only_what_comes_next() -> None:
    probe = Crossing("c", (1,), (2,), (3,), (), (), own_next=(4,), cue=(5,), sibling_next=(6,))
    scored = score_probes([probe], ["none", "transcript"], told)
    assert not scored.answered
    assert set(figures_of(scored, "transcript")) == {"drift", "hijack_choice"}
    with pytest.raises(ConfigError, match="or neither"):
        Crossing("c", (1,), (2,), (3,), (9,), (), own_next=(4,))
    with pytest.raises(ConfigError, match="own_next is empty"):
        Crossing("c", (1,), (2,), (3,), (), ())
