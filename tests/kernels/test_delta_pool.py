"""The fused decode step of a gated delta layer in Triton against its reference in float64.

The same bodies run interpreted on a CPU (small sizes) and compiled on a GPU; the sizes of a real
layer are marked gpu.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from octopus_trl.maths import delta_pool as maths

pytest.importorskip("triton", reason="needs Triton: pip install 'triton>=3.6,<3.8'")
from octopus_trl.kernels import delta_pool

POISON = float("nan")


class Sizes(NamedTuple):
    """Heads and dims of a layer."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    width: int = 4

    @property
    def channels(self) -> int:
        """Columns of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


def inputs(
    sizes: Sizes,
    read: list[int],
    write: list[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    bias: bool = False,
    gated: bool = True,
) -> dict[str, Any]:
    """Draw a step; slots that no live row reads are poisoned, and so are rows of padding."""
    rows, slots, heads = len(read), max([*read, *write]) + 2, sizes.heads
    wide = heads * sizes.value_dim
    # One product gives all four, as in the engine; its columns beyond are poisoned.
    product = torch.randn(rows, sizes.channels + wide + 2 * heads + 16, device=device)
    product[:, -16:] = POISON
    product[[row for row, slot in enumerate(write) if slot <= 0]] = POISON
    mixed, z, b, a, _ = product.to(dtype).split([sizes.channels, wide, heads, heads, 16], dim=-1)
    tails = torch.randn(slots, sizes.channels, sizes.width - 1, device=device).to(dtype)
    states = torch.randn(slots, heads, sizes.key_dim, sizes.value_dim, device=device)
    states /= sizes.key_dim**0.5
    tails[0], states[0] = 0, 0
    unread = [slot for slot in range(1, slots) if slot not in read]
    tails[unread], states[unread] = POISON, POISON

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    return {
        "mixed": mixed,
        "a": a,
        "b": b,
        "conv_weight": drawn(sizes.channels, sizes.width),
        "conv_bias": drawn(sizes.channels) if bias else None,
        "A_log": drawn(heads),
        "dt_bias": drawn(heads) - 4,  # slow decay: what a state holds is seen
        "tails": tails,
        "states": states,
        "read": torch.tensor(read, dtype=torch.int32, device=device),
        "write": torch.tensor(write, dtype=torch.int32, device=device),
        "num_key_heads": sizes.key_heads,
        "z": z if gated else None,
        "norm_weight": drawn(sizes.value_dim) if gated else None,
        "norm_eps": 1e-6,
    }


def check(given: dict[str, Any], limit: float) -> None:
    """Compare outputs and the whole of both pools with the reference in float64."""
    exact: dict[str, Any] = {
        name: value.cpu().double()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value.cpu()
        if isinstance(value, Tensor)
        else value
        for name, value in given.items()
    }
    tails = given["tails"].cpu().clone()
    out = delta_pool.gated_delta_pool_step(**given)
    want = maths.gated_delta_pool_step(**exact)
    torch.testing.assert_close(out.cpu().double(), want, atol=limit, rtol=limit)
    padding = given["write"].cpu() <= 0
    assert torch.equal(out.cpu()[padding], torch.zeros_like(out.cpu()[padding]))
    states = given["states"].cpu().double()
    torch.testing.assert_close(states, exact["states"], atol=limit, rtol=limit, equal_nan=True)
    moved = given["tails"].cpu()
    assert torch.equal(moved.isnan(), exact["tails"].isnan())
    assert torch.equal(moved.nan_to_num().double(), exact["tails"].nan_to_num())
    assert moved.dtype == tails.dtype


@pytest.mark.parametrize("columns", [8, 16])
def test_a_step_in_place_and_to_other_slots_equals_float64(
    columns: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_pool, "TILING", delta_pool.Tiling(columns, 1, 2))
    sizes = Sizes(key_heads=2, heads=4, key_dim=8, value_dim=12)
    given = inputs(sizes, [1, 2, 9], [1, 4, 0], dtype=torch.float32, device=device)
    check(given, 3e-6)


def test_three_value_heads_a_key_head_with_a_bias_and_without_a_gate(device: torch.device) -> None:
    sizes = Sizes(key_heads=1, heads=3, key_dim=5, value_dim=8, width=3)
    given = inputs(
        sizes, [0, 1], [2, 1], dtype=torch.float16, device=device, bias=True, gated=False
    )
    check(given, 4e-3)


def test_no_rows_give_no_rows(device: torch.device) -> None:
    sizes = Sizes(key_heads=1, heads=1, key_dim=4, value_dim=4)
    given = inputs(sizes, [1], [1], dtype=torch.float32, device=device)
    none = {name: given[name][:0] for name in ("mixed", "a", "b", "z", "read", "write")}
    assert delta_pool.gated_delta_pool_step(**{**given, **none}).shape == (0, 4)


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65])
@pytest.mark.parametrize("heads", [3, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_gates_equal_float64_to_the_precision_of_float32(
    rows: int, heads: int, dtype: torch.dtype, device: torch.device
) -> None:
    wide = torch.full((rows, 2 * heads + 16), POISON, device=device)
    wide[:, : 2 * heads] = 12 * torch.randn(rows, 2 * heads, device=device)
    b, a, _ = wide.to(dtype).split([heads, heads, 16], dim=-1)
    A_log, dt_bias = (torch.randn(heads, device=device).to(dtype) for _ in range(2))
    g, beta = delta_pool.delta_gates(a, b=b, A_log=A_log, dt_bias=dt_bias)
    exact, exact_beta = maths.delta_gates(
        a.cpu().double(), b=b.cpu().double(), A_log=A_log.cpu().double(),
        dt_bias=dt_bias.cpu().double(),
    )  # fmt: skip
    assert g.dtype == beta.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(g.cpu().double(), exact, rtol=3e-6, atol=1e-12)
    assert torch.equal(beta, beta.to(dtype).to(beta.dtype)), "rounded as the layer rounds it"
    limit = 1e-3 if dtype == torch.float16 else 1e-6
    torch.testing.assert_close(beta.cpu().double(), exact_beta, rtol=limit, atol=1e-6)


QWEN = Sizes(key_heads=16, heads=32, key_dim=128, value_dim=128)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("rows", [1, 8, 63, 64, 65])
@pytest.mark.parametrize("tiling", [(32, 4, 3), (32, 4, 4), (64, 8, 3), (64, 4, 2), (128, 8, 1)])
def test_a_real_layer_equals_float64_with_every_tiling(
    tiling: tuple[int, int, int],
    rows: int,
    dtype: torch.dtype,
    limit: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delta_pool, "TILING", delta_pool.Tiling(*tiling))
    draw = torch.randperm(2 * rows + 2) + 1
    read = draw[:rows].tolist()
    # Most rows go on in place, some move to a slot of their own, some are padding.
    write = [
        int(draw[rows + row]) if row % 5 == 3 else 0 if row % 7 == 6 else slot
        for row, slot in enumerate(read)
    ]
    check(inputs(QWEN, read, write, dtype=dtype, device=torch.device("cuda")), limit)


@pytest.mark.gpu
def test_steps_in_place_are_the_same_each_time() -> None:
    """A program that read what another wrote would show as a difference between repeats."""
    rows = 256
    slots = list(range(1, rows + 1))
    given = inputs(QWEN, slots, slots, dtype=torch.bfloat16, device=torch.device("cuda"))
    results = []
    for _ in range(20):
        own = {**given, "tails": given["tails"].clone(), "states": given["states"].clone()}
        outs = [delta_pool.gated_delta_pool_step(**own) for _ in range(3)]
        results.append([*outs, own["tails"].nan_to_num(), own["states"].nan_to_num()])
    for repeat in results[1:]:
        for got, first in zip(repeat, results[0], strict=True):
            assert torch.equal(got, first)


@pytest.mark.gpu
def test_pools_beyond_the_reach_of_32_bits() -> None:
    sizes = Sizes(key_heads=16, heads=32, key_dim=128, value_dim=128)
    last = 4200  # times 524,288 floats a slot: more than 2^31
    given = inputs(sizes, [1, 2], [1, last], dtype=torch.bfloat16, device=torch.device("cuda"))
    out = delta_pool.gated_delta_pool_step(**given)
    small = inputs(sizes, [1, 2], [1, 3], dtype=torch.bfloat16, device=torch.device("cuda"))
    for name, value in given.items():
        if name in ("tails", "states"):
            small[name][:3] = value[:3]
        elif isinstance(value, Tensor) and name not in ("read", "write"):
            small[name] = value
    small["states"][1], small["tails"][1] = POISON, POISON  # it was stepped in place
    near = delta_pool.gated_delta_pool_step(**small)
    assert torch.equal(out[1], near[1])
    assert torch.equal(given["states"][last], small["states"][3])
