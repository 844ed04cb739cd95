"""Draws: their distribution, their filters, and that nothing but the row itself decides them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octopus_trl.maths.sampling import sample, uniform

PROBS = torch.tensor([0.1, 0.4, 0.05, 0.2, 0.25])
SETTINGS: dict[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def settings(rows: int, **given: float) -> dict[str, Any]:
    """Spread one setting over rows."""
    return {
        name: torch.full((rows,), value, dtype=torch.int64 if name == "top_k" else torch.float32)
        for name, value in {**SETTINGS, **given}.items()
    }


def grid(rows: int) -> Tensor:
    """Uniform numbers in the middle of equal cells: frequencies are exact to 1 / rows."""
    return (torch.arange(rows, dtype=torch.float64) + 0.5) / rows


def frequencies(**given: float) -> Tensor:
    rows = 4000
    tokens, _ = sample(PROBS.log().expand(rows, -1), **settings(rows, **given), uniform=grid(rows))
    return torch.bincount(tokens, minlength=len(PROBS)) / rows


def keep(*tokens: int) -> Tensor:
    kept = torch.zeros_like(PROBS)
    kept[list(tokens)] = PROBS[list(tokens)]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, PROBS),
        ({"temperature": 0.5}, PROBS.square() / PROBS.square().sum()),
        ({"temperature": 0.0}, keep(1)),
        ({"top_k": 2}, keep(1, 4)),
        ({"top_k": 9}, PROBS),
        ({"top_p": 0.6}, keep(1, 4)),
        ({"top_p": 0.66}, keep(1, 4, 3)),
        ({"top_p": 1e-9}, keep(1)),
        ({"min_p": 0.4}, keep(1, 4, 3)),
        ({"top_k": 3, "top_p": 0.5}, keep(1, 4)),
        ({"top_k": 1, "min_p": 0.9, "top_p": 0.1}, keep(1)),
    ],
    ids=str,
)
def test_tokens_come_with_the_probabilities_that_are_left(
    given: dict[str, float], expected: Tensor
) -> None:
    torch.testing.assert_close(frequencies(**given), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logps_ignore_the_filters(temperature: float) -> None:
    logits = torch.randn(50, 17)
    tokens, logps = sample(
        logits, **settings(50, temperature=temperature, top_p=0.5, top_k=5), uniform=grid(50)
    )
    expected = (logits / temperature).log_softmax(-1)
    assert torch.equal(logps, expected.gather(-1, tokens[:, None])[:, 0])


def test_greedy_draws_are_scored_at_temperature_one() -> None:
    logits = torch.randn(5, 17)
    tokens, logps = sample(logits, **settings(5, temperature=0.0), uniform=grid(5))
    assert torch.equal(tokens, logits.argmax(-1))
    assert torch.equal(logps, logits.log_softmax(-1).amax(-1))


def test_a_row_does_not_depend_on_the_batch_around_it() -> None:
    rows = 23
    logits = torch.randn(rows, 101)
    mixed: dict[str, Any] = {
        "temperature": torch.rand(rows) * (torch.rand(rows) > 0.2),
        "top_p": 1 - 0.5 * torch.rand(rows) * (torch.rand(rows) > 0.5),
        "top_k": torch.randint(0, 9, (rows,)),
        "min_p": 0.1 * torch.rand(rows) * (torch.rand(rows) > 0.5),
        "uniform": torch.rand(rows, dtype=torch.float64),
    }
    tokens, logps = sample(logits, **mixed)
    for row in range(rows):
        own = {name: value[row : row + 1] for name, value in mixed.items()}
        token, logp = sample(logits[row : row + 1], **own)
        assert torch.equal(token, tokens[row : row + 1])
        assert torch.equal(logp, logps[row : row + 1])


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(number: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -3.0, -torch.inf]])
    at = torch.tensor([number], dtype=torch.float64)
    token, logp = sample(logits, **settings(1), uniform=at)
    assert token.item() == (1 if number == 0 else 2)
    assert bool(logp.isfinite())


@given(st.integers(min_value=-(2**70), max_value=2**70), st.integers(min_value=0, max_value=2**40))
def test_uniform_is_a_pure_function_in_the_unit_interval(seed: int, index: int) -> None:
    number = uniform(seed, index)
    assert 0 <= number < 1
    assert number == uniform(seed, index)
    assert number * 2**53 == int(number * 2**53)


def test_uniform_numbers_are_spread_evenly_and_streams_differ() -> None:
    drawn = torch.tensor([uniform(7, index) for index in range(20000)], dtype=torch.float64)
    other = torch.tensor([uniform(8, index) for index in range(20000)], dtype=torch.float64)
    counts = torch.histc(drawn, bins=20, min=0, max=1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 43.8  # chi-square, 19 degrees, p = 0.001
    assert abs(float(torch.corrcoef(torch.stack([drawn, other]))[0, 1])) < 0.03
    assert abs(float(torch.corrcoef(torch.stack([drawn[1:], drawn[:-1]]))[0, 1])) < 0.03


def test_a_promise_of_no_filters_changes_nothing_and_true_ones_need_no_look() -> None:
    logits = torch.randn(50, 17)
    plain, sharp = settings(50, temperature=0.7), settings(50, temperature=0.7, top_k=5, top_p=0.9)
    for setting, filtered in ((plain, False), (plain, True), (sharp, True)):
        got = sample(logits, **setting, uniform=grid(50), filtered=filtered)
        want = sample(logits, **setting, uniform=grid(50))
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


def test_narrow_logits_are_taken_to_float32_first() -> None:
    logits = torch.randn(50, 17, dtype=torch.bfloat16)
    got = sample(logits, **settings(50, temperature=0.7), uniform=grid(50))
    want = sample(logits.float(), **settings(50, temperature=0.7), uniform=grid(50))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
