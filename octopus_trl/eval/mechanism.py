"""What a read does to its reader, by likelihood: pure functions of scored probes.

Every figure is an `Estimate`: a value, its 95 % interval and how many examples stand behind it. A
share of examples has Wilson's interval; a mean or a ratio over examples has the percentile
bootstrap over examples, so that tokens of one probe are never taken for independent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octopus_trl.errors import ConfigError
from octopus_trl.eval.intervals import Estimate, mean, ratio, share, share_by_example
from octopus_trl.eval.probes import Probe
from octopus_trl.eval.readings import (
    FULL_TEXT,
    NONE,
    Crossing,
    check_readings,
    crossing_episode,
    question_episode,
)
from octopus_trl.trace import Trace

Said = tuple[Sequence[float], Sequence[int]]
Scorer = Callable[[Sequence[Trace]], Sequence[Said]]
"""Scores the last segment of each trace: log-probabilities and the most likely tokens."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer of one probe under one reading.

    Attributes:
        nll: negative log-likelihood of the whole answer, nats.
        choices: most likely token at each place of the answer, given the answer before it.
        exact: whether these are the answer, so that greedy decoding writes it out.
        ahead: whether the sibling's end is past the reader's next position.
    """

    nll: float
    choices: tuple[int, ...]
    exact: bool
    ahead: bool


@dataclass(frozen=True, slots=True)
class Crossed:
    """What a reader would say next under one reading.

    Attributes:
        own: NLL of the reader's own continuation, nats a token.
        own_total, sibling_total: NLL of the reader's and of the sibling's continuation, nats; the
            latter None where the probe has none.
    """

    own: float
    own_total: float
    sibling_total: float | None


@dataclass(slots=True)
class Scored:
    """All probes of a measurement under each reading, in one order."""

    answered: dict[str, list[Answered]] = field(default_factory=dict)
    crossed: dict[str, list[Crossed]] = field(default_factory=dict)


def score_probes(
    probes: Sequence[Probe],
    readings: Sequence[str],
    score: Scorer,
    *,
    into: Scored | None = None,
) -> Scored:
    """Score every probe under every reading; a probe's episodes go to the scorer together.

    Args:
        into: earlier probes of the same measurement, which these are added to.
    Raises:
        ConfigError: a reading is unknown, or "none" or "transcript" is missing.
    """
    check_readings(readings)
    scored = Scored() if into is None else into
    for probe in probes:
        if probe.answer:
            asked = [(name, question_episode(probe, name)) for name in readings]
            for name, (logps, choices) in _each(asked, score):
                exact = tuple(choices) == probe.answer
                one = Answered(-sum(logps), tuple(choices), exact, probe.sibling_ahead)
                scored.answered.setdefault(name, []).append(one)
        if not probe.own_next:
            continue
        said = {"own": probe.own_next}
        if isinstance(probe, Crossing) and probe.sibling_next:
            said["sibling"] = probe.sibling_next
        crossing = [
            ((name, who), crossing_episode(probe, name, text))
            for name in readings
            for who, text in said.items()
        ]
        totals = {key: -sum(logps) for key, (logps, _) in _each(crossing, score)}
        for name in readings:
            own = totals[name, "own"]
            one_crossed = Crossed(own / len(probe.own_next), own, totals.get((name, "sibling")))
            scored.crossed.setdefault(name, []).append(one_crossed)
    return scored


def _each(keyed: Sequence[tuple[Any, Trace]], score: Scorer) -> list[tuple[Any, Said]]:
    said = score([trace for _, trace in keyed])
    return [(key, one) for (key, _), one in zip(keyed, said, strict=True)]


def figures_of(scored: Scored, reading: str) -> dict[str, Estimate]:
    """Give every figure of one reading that its probes allow."""
    figures: dict[str, Estimate] = {}
    if reading in scored.answered:
        answers = scored.answered[reading]
        none, full = scored.answered[NONE], scored.answered[FULL_TEXT]
        figures["answer_nll"] = mean([one.nll for one in answers])
        figures["retained_information"] = retained_information(none, answers, full)
        figures["recall"] = identifier_recall(answers)
        for side, ahead in (("ahead", True), ("behind", False)):
            if part := [one for one in answers if one.ahead is ahead]:
                figures[f"recall_{side}"] = identifier_recall(part)
        figures["argmax_agreement"] = argmax_agreement(answers, full)
    if reading in scored.crossed:
        crossed, alone = scored.crossed[reading], scored.crossed[NONE]
        figures["drift"] = policy_drift(crossed, alone)
        if any(one.sibling_total is not None for one in crossed):
            figures["hijack_choice"] = hijack_choice(crossed)
    return figures


def policy_drift(read: Sequence[Crossed], alone: Sequence[Crossed]) -> Estimate:
    """Give ΔNLL of the reader's own continuation, nats a token: read minus no exchange.

    Mean over probes of ``NLL(own continuation | read) − NLL(own continuation | none)``, each a mean
    over the continuation's tokens. 0 where reading leaves the policy's way as it was; bootstrap
    over probes. Paper: drift, +0.196 to +0.007; its continuations are not described, ours are
    recorded turns of the reader, or the text that the probe says it would write.
    """
    _same(read, alone)
    return mean([one.own - base.own for one, base in zip(read, alone, strict=True)])


def hijack_choice(read: Sequence[Crossed]) -> Estimate:
    """Give the share of probes where the sibling's next words are likelier than the reader's own.

    Both continuations are scored behind the same text; the more probable one (total, not a token)
    is what the reader would pursue. Wilson over probes. Ours: the likelihood side of cross-branch
    hijacking, which runs on any causal LM; `hijacking.hijack_share` looks at turns that were drawn.
    """
    pairs = [(one.own_total, one.sibling_total) for one in read if one.sibling_total is not None]
    return share([other < own for own, other in pairs])


def retained_information(
    none: Sequence[Answered], read: Sequence[Answered], full: Sequence[Answered]
) -> Estimate:
    """Give the share of the answer's NLL reduction by the full text that a read keeps.

    ``Σ (NLL_none − NLL_read) / Σ (NLL_none − NLL_full)`` over probes; 1 for the full text, 0 for no
    exchange, above 1 where the read says more than the text, below 0 where it misleads. Bootstrap
    over probes of the ratio of sums. Paper: information, 92.2 %.
    """
    _same(none, read, full)
    kept = [a.nll - b.nll for a, b in zip(none, read, strict=True)]
    given = [a.nll - b.nll for a, b in zip(none, full, strict=True)]
    return ratio(kept, given)


def identifier_recall(answers: Sequence[Answered]) -> Estimate:
    """Give the share of probes whose identifier greedy decoding would write out exactly.

    Every token of the answer is the most likely one given the answer's tokens before it, which is
    when greedy decoding writes it. Wilson over probes. Paper: recall-transcript 0.760, recall-mount
    0.612 (behind) and 0.613 (ahead), recall-unshifted 0.521 and 0.449.
    """
    return share([one.exact for one in answers])


def argmax_agreement(read: Sequence[Answered], full: Sequence[Answered]) -> Estimate:
    """Give the share of answer tokens whose most likely token is the one under the full text.

    Both behind the same answer prefix; interval over probes (`intervals.share_by_example`). Paper:
    argmax-dense 96.9 %, argmax-mamba2 98.5 %.
    """
    _same(read, full)
    equal = [
        sum(a == b for a, b in zip(one.choices, other.choices, strict=True))
        for one, other in zip(read, full, strict=True)
    ]
    return share_by_example(equal, [len(one.choices) for one in read])


def _same(*lists: Sequence[Any]) -> None:
    if len({len(each) for each in lists}) != 1:
        raise ConfigError(
            f"readings hold {[len(each) for each in lists]} probes: score all of them on the same"
        )


def as_json(figures: Mapping[str, Estimate]) -> dict[str, Any]:
    """Give figures as one JSON object."""
    return {name: figure.as_json() for name, figure in figures.items()}
