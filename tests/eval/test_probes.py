"""Probes: what each reading of a sibling puts where, and what no reading can know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from octopus_trl.errors import ConfigError
from octopus_trl.eval.probes import Probe, read_probes, station_probes
from octopus_trl.eval.readings import question_episode


def encode(text: str) -> Sequence[int]:
    return [ord(symbol) % 127 for symbol in text]


def text_of(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def probe() -> Probe:
    return Probe("p", (1, 2), (3, 4, 5), (6,), (7, 8), (9, 10))


def test_a_mount_is_an_edge_and_a_transcript_is_text() -> None:
    mount, pasted, nothing = (
        question_episode(probe(), read) for read in ("mount", "transcript", "none")
    )
    for trace in (mount, pasted, nothing):
        trace.check(vocab_size=11)
        assert trace.segments[-1].tokens == [9, 10]
    assert mount.segments[3].mounts == [1]
    assert mount.linearize(4) == ([1, 2, 6, 7, 8, 9, 10], [0, 1, 2, 5, 6, 7, 8])
    assert pasted.linearize(4)[0] == [1, 2, 6, 3, 4, 5, 7, 8, 9, 10]
    assert nothing.linearize(4) == ([1, 2, 6, 7, 8, 9, 10], list(range(7)))
    assert not any(segment.mounts for trace in (pasted, nothing) for segment in trace.segments)


@pytest.mark.parametrize("rule", ["mount", "unshifted", "rerotate", "reencode"])
def test_an_episode_is_placed_by_the_rule_asked_for(rule: str) -> None:
    trace = question_episode(probe(), rule).check()
    assert trace.position == ("jump" if rule == "mount" else rule)
    assert trace.segments[3].start == {"mount": 5, "reencode": 6}.get(rule, 3)


def test_only_the_sibling_holds_the_answer() -> None:
    for drawn in station_probes(encode, 40, seed=3):
        answer = text_of(drawn.answer).strip(" .")
        assert len(answer) == 7
        assert text_of(drawn.sibling).count(answer) == 1
        rest = drawn.prompt + drawn.own + drawn.question + drawn.own_next
        assert answer not in text_of(rest)


def test_probes_come_again_with_their_seed_and_only_with_it() -> None:
    first, again, other = (station_probes(encode, 5, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert len({each.answer for each in [*first, *other]}) == 10


def test_the_number_of_facts_decides_who_is_ahead() -> None:
    ahead = station_probes(encode, 5, sibling_facts=6, own_facts=2)
    behind = station_probes(encode, 5, sibling_facts=2, own_facts=6)
    assert all(each.sibling_ahead for each in ahead)
    assert not any(each.sibling_ahead for each in behind)


def test_a_begin_token_stands_before_the_prompt_only() -> None:
    (drawn,) = station_probes(encode, 1, begin=[126])
    assert drawn.prompt[0] == 126
    assert 126 not in drawn.prompt[1:] + drawn.sibling + drawn.own + drawn.question


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num": 0}, "at least 1"),
        ({"num": 1, "sibling_facts": 0}, "each must be at least 1"),
        ({"num": 1, "own_facts": 30}, "together at most"),
    ],
)
def test_counts_outside_their_range_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        station_probes(encode, **settings)


def test_an_empty_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="answer is empty"):
        Probe("p", (1,), (2,), (3,), (4,), ())


def test_a_users_probes_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [
        {"text": "the lamp is red", "question": "the lamp is", "answer": "red"},
        {"text": "a", "question": "b", "answer": " c", "prompt": "p", "own": "o"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second = read_probes(path, encode)
    assert text_of(first.answer) == " red"
    assert text_of(second.prompt + second.own + second.answer) == "po c"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "holds no probe"),
        ("{", "mine.jsonl:1: is no JSON object"),
        ('{"text": "a", "question": "b"}', "needs the fields text, question, answer"),
        ('{"text": "a", "question": "b", "answer": 3}', "answer must be text"),
        ('{"text": "a", "question": "b", "answer": "c", "hint": "d"}', "no other"),
        ('{"text": "", "question": "b", "answer": "c"}', "sibling is empty"),
    ],
)
def test_a_broken_file_of_probes_is_one_error(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=reason):
        list(read_probes(path, encode))


def test_a_file_of_probes_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.jsonl: cannot be read"):
        list(read_probes(tmp_path / "none.jsonl", encode))
