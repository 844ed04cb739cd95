"""Launches that begin before their inputs exist: decided in one place, and the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octopus_trl.errors import ConfigError

pytest.importorskip("triton", reason="needs Triton: pip install 'triton>=3.6,<3.8'")
from octopus_trl.kernels import _pass_tuning, _stream, _triton, gates, lora, norms
from octopus_trl.kernels._pass_tuning import PassTuning
from octopus_trl.kernels._stream import Tiling
from octopus_trl.kernels._triton import early


@pytest.mark.parametrize("setting", [None, "0", "1"])
def test_the_rows_of_a_pass_decide_unless_the_environment_does(
    setting: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, "_is_hopper", lambda: True)
    lines = {4: PassTuning(False, True, True), 8: PassTuning(True, False, False)}
    monkeypatch.setattr(_pass_tuning, "_TABLE", lines)
    monkeypatch.delenv("OCTOPUS_EARLY_LAUNCH", raising=False)
    if setting is not None:
        monkeypatch.setenv("OCTOPUS_EARLY_LAUNCH", setting)
    for rows, line in ((1, False), (4, False), (5, True), (8, True), (9, False)):
        on = line if setting is None else setting == "1"
        want = {"EARLY": on, "launch_pdl": on}
        assert early(torch.device("cuda", 0), rows) == want
        assert not any(early(torch.device("cpu"), rows).values())


def test_devices_before_hopper_have_no_early_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "_is_hopper", lambda: False)
    monkeypatch.setenv("OCTOPUS_EARLY_LAUNCH", "1")
    assert not any(early(torch.device("cuda", 0), 1).values())


def test_an_unknown_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTOPUS_EARLY_LAUNCH", "yes")
    with pytest.raises(ConfigError, match="OCTOPUS_EARLY_LAUNCH is 'yes', must be"):
        early(torch.device("cpu"), 1)


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

    check_replays(step, start, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 32, 33])
def test_gates_in_the_product_and_parts_give_the_same_bits_launched_early(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of several parts share counters; torch's own kernels stand between."""
    dim, inner = 2560, 9216

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

    def cut(weight: Tensor) -> Tiling:
        return _stream.tiling(rows, *weight.shape)

    start, norm = drawn(rows, dim) * dim**0.5, drawn(dim)
    layers = [(drawn(dim, dim), drawn(2 * inner, dim), drawn(dim, inner)) for _ in range(6)]

    def step() -> Tensor:
        x, stream = start, None
        for out, up, down in layers:
            y, stream = norms.rms_norm(
                x, weight=norm, eps=1e-6, zero_centered=True, residual=stream
            )
            y = _stream.multiply(y, out, cut(out))
            wide = _stream.multiply(y + 1, up, cut(up), gated=True)  # torch's addition between
            x = _stream.multiply(wide, down, cut(down))
        return x

    check_replays(step, start, monkeypatch)


def check_replays(
    step: Callable[[], Tensor], start: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare replays of a captured step with early launches to the step without them."""
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
