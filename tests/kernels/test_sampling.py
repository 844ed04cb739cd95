"""Drawing tokens in Triton against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octopus_trl.maths import sampling as maths

pytest.importorskip("triton", reason="needs Triton: pip install 'triton>=3.6,<3.8'")
from octopus_trl.kernels import sampling

OFF: dict[str, float] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


def settings(temperature: list[float], device: torch.device) -> dict[str, Any]:
    """Spread settings without filters over rows of these temperatures."""
    rows = len(temperature)
    made: dict[str, Any] = {"temperature": torch.tensor(temperature, device=device)}
    for name, value in OFF.items():
        dtype = torch.int64 if name == "top_k" else torch.float64
        made[name] = torch.full((rows,), value, dtype=dtype, device=device)
    made["uniform"] = torch.rand(rows, dtype=torch.float64).to(device)
    return made


def check(logits: Tensor, given: dict[str, Any], filtered: bool | None = False) -> None:
    """Tokens equal the reference's, unless the number lies within rounding of a boundary."""
    tokens, logps = sampling.sample(logits, **given, filtered=filtered)
    own = {name: value.cpu() for name, value in given.items()}
    values = logits.cpu().float()
    want, _ = maths.sample(values, **own, filtered=filtered)
    tokens, logps = tokens.cpu(), logps.cpu()
    scale = torch.where(own["temperature"] == 0, 1, own["temperature"]).double()
    exact = (values.double() / scale[:, None]).log_softmax(-1)
    torch.testing.assert_close(
        logps.double(), exact.gather(-1, tokens[:, None])[:, 0], atol=3e-6, rtol=1e-6
    )
    # Rounding decides where a number, or the end of what top-p keeps, lies within it of a boundary.
    assert int((tokens != want).sum()) <= len(tokens) // 60
    for row in (tokens != want).nonzero()[:, 0].tolist():
        low, high = sorted((int(tokens[row]), int(want[row])))
        between = exact[row, low + 1 : high].exp()
        assert filtered or float(between.sum()) < 1e-6, "another token without a boundary near"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_draws_equal_the_reference(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "BLOCK", 16)
    temperature = [1.0, 0.7, 0.0, 1.3, 0.2, 1.0]
    logits = 3 * torch.randn(len(temperature), 75, device=device)
    check(logits.to(dtype)[:, 3:68], settings(temperature, device))


def test_ends_of_the_unit_interval_draw_possible_tokens(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "BLOCK", 4)
    logits = torch.full((2, 14), -torch.inf, device=device)
    logits[:, 5], logits[:, 9] = 0.0, -3.0
    given = settings([1.0, 1.0], device)
    given["uniform"] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64, device=device)
    tokens, logps = sampling.sample(logits, **given, filtered=False)
    assert tokens.tolist() == [5, 9]
    assert bool(logps.isfinite().all())


def test_of_equal_logits_the_lowest_id_is_the_best(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "BLOCK", 4)
    logits = torch.zeros(1, 10, device=device)
    logits[0, [3, 6, 7]] = 2.0
    tokens, _ = sampling.sample(logits, **settings([0.0], device), filtered=False)
    assert tokens.tolist() == [3]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
def test_rows_that_are_not_finite_give_a_token_and_nan(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "BLOCK", 4)
    logits = torch.randn(3, 10, device=device)
    logits[0, 7], logits[1, 2] = torch.nan, torch.inf
    logits[2] = -torch.inf
    tokens, logps = sampling.sample(logits, **settings([1.0, 0.7, 1.0], device), filtered=False)
    assert bool(((tokens >= 0) & (tokens < 10)).all())
    assert bool(logps.isnan().all())


FILTERS: list[dict[str, float]] = [
    {"top_k": 4},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"top_k": 9, "top_p": 0.7},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.05},
    {"top_p": 1e-9},
    {"top_k": 1000},
    {},
]


def filtered_settings(filters: list[dict[str, float]], device: torch.device) -> dict[str, Any]:
    """Give each row filters of its own."""
    given = settings([(0.9, 1.0, 0.0)[row % 3] for row in range(len(filters))], device)
    for row, each in enumerate(filters):
        for name, value in each.items():
            given[name][row] = value
    return given


@pytest.mark.parametrize("ties", [False, True])
def test_filtered_draws_equal_the_reference(
    ties: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "BLOCK", 16)
    filters = FILTERS[3:5] if ties else FILTERS[:3]
    logits = 2 * torch.randn(len(filters), 27, device=device)
    if ties:
        logits = logits.round()  # many tokens share each of a few values
    logits[:, 5] = -0.0
    logits[:, 11] = 0.0
    check(logits, filtered_settings(filters, device), filtered=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ties", [False, True])
def test_filtered_draws_over_a_real_vocabulary_equal_the_reference(
    ties: bool, dtype: torch.dtype
) -> None:
    device = torch.device("cuda")
    filters = FILTERS * 8
    logits = 4 * torch.randn(len(filters), 248_320, device=device)
    if ties:
        logits = logits.round()
    check(logits.to(dtype), filtered_settings(filters, device), filtered=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 63, 64, 65])
def test_draws_over_a_real_vocabulary_equal_the_reference(rows: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    temperature = [(1.0, 0.7, 0.0, 1.5)[row % 4] for row in range(rows)]
    logits = 4 * torch.randn(rows, 248_320, device=device)
    check(logits.to(dtype), settings(temperature, device))


@pytest.mark.gpu
def test_a_captured_draw_replays_on_new_inputs() -> None:
    device = torch.device("cuda")
    logits = torch.randn(8, 248_320, device=device, dtype=torch.bfloat16)
    given = settings([1.0] * 8, device)
    sampling.sample(logits, **given, filtered=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, logps = sampling.sample(logits, **given, filtered=False)
    for _ in range(3):
        logits.copy_(4 * torch.randn_like(logits))
        given["uniform"].copy_(torch.rand(8, dtype=torch.float64))
        graph.replay()
        want, want_logps = sampling.sample(logits, **given, filtered=False)
        assert torch.equal(tokens, want)
        assert torch.equal(logps, want_logps)
