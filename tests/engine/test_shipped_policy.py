"""The policy that ships draws what training scores, before any update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.shipped_policy import shipped_policy, step_zero_kl

KL_CPU = 1e-8  # DESIGN §8, float32


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["own forward", "fused"])
def test_step_zero_kl_of_the_shipped_policy_is_rounding_on_a_cpu(options: dict[str, Any]) -> None:
    policy = shipped_policy("cpu", torch.float32)
    figures = step_zero_kl(policy, 3, num_pages=800, num_states=64, **options)
    assert figures["unmounted"][2] > 50
    assert figures["mounted"][2] > 0, "no thread read another: the test has lost its point"
    for name, (kl, _, count) in figures.items():
        assert count == 0 or kl <= KL_CPU, name
