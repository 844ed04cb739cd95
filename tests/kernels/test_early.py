"""Launches that begin before their inputs exist: off by default, and the same bits when on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octopus_trl.errors import ConfigError

pytest.importorskip("triton", reason="needs Triton: pip install 'triton>=3.6,<3.8'")
from octopus_trl.kernels import _stream, gates, lora, norms
from octopus_trl.kernels._triton import early


def test_launches_are_not_early_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTOPUS_EARLY_LAUNCH", raising=False)
    assert not any(early(torch.device("cuda", 0)).values())
    monkeypatch.setenv("OCTOPUS_EARLY_LAUNCH", "1")
    assert not any(early(torch.device("cpu")).values())


def test_an_unknown_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTOPUS_EARLY_LAUNCH", "yes")
    with pytest.raises(ConfigError, match="OCTOPUS_EARLY_LAUNCH is 'yes', must be"):
        early(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_early_launches_in_a_graph_give_the_same_bits(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel writes what the next one reads, through buffers that the graph reuses."""
    dim, inner = 2560, 9216

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

    start, norm = drawn(rows, dim) * dim**0.5, drawn(dim)
    layers = [(drawn(2 * inner, dim), drawn(dim, inner)) for _ in range(6)]
    a, b = drawn(16, dim), drawn(2 * inner, 16)
    starts = torch.zeros(2 * inner, dtype=torch.int32, device="cuda")

    def step() -> Tensor:
        x, stream = start, None
        for up, down in layers:
            y, stream = norms.rms_norm(
                x, weight=norm, eps=1e-6, zero_centered=True, residual=stream
            )
            wide = _stream.multiply(y, up, _stream.tiling(rows, *up.shape))
            lora.lora_expand(wide, h=lora.lora_shrink(y, a=a), b=b, starts=starts)
            x = _stream.multiply(gates.swiglu(wide), down, _stream.tiling(rows, *down.shape))
        return x

    monkeypatch.setenv("OCTOPUS_EARLY_LAUNCH", "0")
    want = step()
    monkeypatch.setenv("OCTOPUS_EARLY_LAUNCH", "1")
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(50):
        start.copy_(start)
        graph.replay()
        assert torch.equal(out, want)
