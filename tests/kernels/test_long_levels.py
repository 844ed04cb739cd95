"""What fla is given of a level that is longer than its own kernels for lengths are tuned for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octopus_trl.kernels import delta_rule


@pytest.mark.parametrize(("rows", "long"), [(4, False), (5, True)])
def test_lengths_are_divided_out_once(
    rows: int, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def rule(**values: Any) -> tuple[Tensor, Tensor]:
        given.update(values)
        return values["v"], values["initial_state"]

    monkeypatch.setattr(delta_rule, "_TUNED_ROWS", 4 * 2)
    monkeypatch.setattr(delta_rule, "_fla", lambda *_: rule)
    monkeypatch.setattr(delta_rule, "chunk_indices", lambda bounds: None)
    q, k, v = (torch.randn(rows, 2, 16) for _ in range(3))
    delta_rule.gated_delta_rule(
        q,
        k=k,
        v=v,
        g=torch.zeros(rows, 2),
        beta=torch.ones(rows, 2),
        initial_state=torch.zeros(1, 2, 16, 16),
        cu_seqlens=torch.tensor([0, rows]),
    )
    assert given["use_qk_l2norm_in_kernel"] is not long
    for name, x in (("q", q), ("k", k)):
        want = torch.nn.functional.normalize(x, dim=-1) if long else x
        torch.testing.assert_close(given[name][0], want, atol=1e-5, rtol=1e-5)
