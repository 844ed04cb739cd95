"""Token log-probabilities against full logits, in value, gradient and memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from octopus_trl.errors import ConfigError
from octopus_trl.maths.logps import token_logps

ROWS = torch.tensor([0, 3, 3, 12, 5])  # row 3 is a branch point: it predicts two tokens
TARGETS = torch.tensor([1, 2, 16, 0, 2])


def make_head(dtype: torch.dtype = torch.float64) -> nn.Linear:
    return nn.Linear(5, 17, bias=False, dtype=dtype)


@pytest.mark.parametrize("chunk", [1, 2, 5, 1024])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logps_are_those_of_full_logits(chunk: int, temperature: float) -> None:
    hidden, head = torch.randn(13, 5, dtype=torch.float64, requires_grad=True), make_head()
    logps = token_logps(
        hidden, head=head, rows=ROWS, targets=TARGETS, temperature=temperature, chunk=chunk
    )
    expected = (head(hidden) / temperature).log_softmax(-1)[ROWS, TARGETS]
    torch.testing.assert_close(logps, expected, atol=1e-13, rtol=0)
    inputs = [hidden, head.weight]
    weight = torch.randn_like(logps)
    grads = torch.autograd.grad((logps * weight).sum(), inputs)
    for grad, want in zip(grads, torch.autograd.grad((expected * weight).sum(), inputs)):
        torch.testing.assert_close(grad, want, atol=1e-13, rtol=0)


def test_logps_have_the_derivatives() -> None:
    hidden = torch.randn(13, 5, dtype=torch.float64, requires_grad=True)

    def score(hidden: Tensor, weight: Tensor) -> Tensor:
        return token_logps(
            hidden, head=lambda x: x @ weight.t(), rows=ROWS, targets=TARGETS, chunk=2
        )

    torch.autograd.gradcheck(score, [hidden, make_head().weight])


def test_logits_of_one_chunk_live_at_a_time() -> None:
    hidden, head = torch.randn(13, 5, requires_grad=True), make_head(torch.float32)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_logps(hidden, head=head, rows=ROWS, targets=TARGETS, chunk=2)
    assert max(saved, default=0) <= hidden.numel()


def test_a_dtype_below_float32_is_scored_in_float32() -> None:
    hidden, head = torch.randn(13, 5).bfloat16(), make_head(torch.bfloat16)
    logps = token_logps(hidden, head=head, rows=ROWS, targets=TARGETS)
    assert logps.dtype == torch.float32


def test_no_targets_stay_connected() -> None:
    hidden, head = torch.randn(13, 5, dtype=torch.float64, requires_grad=True), make_head()
    logps = token_logps(hidden, head=head, rows=ROWS[:0], targets=TARGETS[:0])
    assert logps.shape == (0,)
    for grad in torch.autograd.grad(logps.sum(), [hidden, head.weight]):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_rows_that_are_not_asked_for_are_never_read() -> None:
    hidden, head = torch.randn(13, 5), make_head(torch.float32)
    clean = token_logps(hidden, head=head, rows=ROWS, targets=TARGETS)
    hidden[[1, 2, 4, 6, 7, 8, 9, 10, 11]] = float("nan")
    assert torch.equal(token_logps(hidden, head=head, rows=ROWS, targets=TARGETS), clean)


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": -1.0}, {"chunk": 0}])
def test_settings_that_mean_nothing_are_refused(settings: dict) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        token_logps(torch.randn(13, 5), head=make_head(), rows=ROWS, targets=TARGETS, **settings)
