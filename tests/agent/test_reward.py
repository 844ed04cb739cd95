"""Exact match as SQuAD defines it, in the shape that TRL calls."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from octopus_trl.agent.reward import exact_match, normalise_answer
from octopus_trl.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("The  West-Gate!", "westgate"),
        ("an apple a day", "apple day"),
        ("  ", ""),
        ("Theatre", "theatre"),
        ("SSP6KT, 4QX\n", "ssp6kt 4qx"),
    ],
)
def test_answers_are_normalised_as_squad_does(text: str, want: str) -> None:
    assert normalise_answer(text) == want


@pytest.mark.parametrize(
    ("completion", "gold", "want"),
    [
        ("the West gate.", "West Gate", 1.0),
        ("West Gate and more", "West Gate", 0.0),
        ("b", ["a", "b"], 1.0),
        (None, "x", 0.0),
        ("", "x", 0.0),
        ("", "The", 0.0),
        ("the", "The", 1.0),
        ("?!", "!!", 0.0),
        ([{"role": "assistant", "content": "x"}], "x", 1.0),
        ([], "x", 0.0),
        ("x", None, None),
        ("x", [], None),
    ],
)
def test_a_reward_is_one_zero_or_nothing(completion: Any, gold: Any, want: float | None) -> None:
    assert exact_match([completion], answer=[gold]) == [want]
    assert exact_match([completion], answers=[gold], prompts=["q"], traces=[None]) == [want]


def test_data_without_answers_is_refused_with_a_fix() -> None:
    with pytest.raises(ConfigError, match="answers"):
        exact_match(["x"], prompts=["q"])
    with pytest.raises(ConfigError, match="one each"):
        exact_match(["x", "y"], answer=["x"])


def test_the_signature_is_one_that_trl_can_call() -> None:
    parameters = inspect.signature(exact_match).parameters
    assert parameters["completions"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    assert exact_match.__name__ == "exact_match"
