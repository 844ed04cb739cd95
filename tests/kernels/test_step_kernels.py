"""Norms, gates and rotation in Triton against their references.

The same bodies run interpreted on a CPU (small sizes) and compiled on a GPU; the sizes of a real
layer are marked gpu.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octopus_trl.maths import gates as gates_maths
from octopus_trl.maths import norms as norms_maths
from octopus_trl.maths import rotary as rotary_maths

pytest.importorskip("triton", reason="needs Triton: pip install 'triton>=3.6,<3.8'")
from octopus_trl.kernels import gates, norms, rotary

# The interpreter rounds bfloat16 toward zero, so narrow floats are float16 there.
DTYPES = [torch.float32, torch.float16]
GPU_DTYPES = [torch.float32, torch.bfloat16]
LIMIT = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of terms


def close(got: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Compare with a float64 result, relative to its own size."""
    torch.testing.assert_close(got.cpu().double(), exact, atol=LIMIT[dtype], rtol=LIMIT[dtype])


def exact(given: dict[str, Any]) -> dict[str, Any]:
    """Copy inputs to a CPU in float64."""
    return {
        name: value.cpu().double()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value.cpu()
        if isinstance(value, Tensor)
        else value
        for name, value in given.items()
    }


def columns(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw a column slice of a wider product, whose other columns are poisoned."""
    whole = torch.full((rows, width + 48), float("nan"), dtype=dtype, device=device)
    whole[:, 16 : 16 + width] = torch.randn(rows, width, device=device).to(dtype)
    return whole[:, 16 : 16 + width]


def check_rms_norm(
    rows: int, dim: int, dtype: torch.dtype, device: torch.device, centered: bool, residual: bool
) -> None:
    given: dict[str, Any] = {
        "x": columns(rows, dim, dtype, device),
        "weight": torch.randn(dim, device=device).to(dtype),
        "eps": 1e-6,
        "zero_centered": centered,
        "residual": columns(rows, dim, dtype, device) if residual else None,
    }
    y, h = norms.rms_norm(**given)
    want_y, want_h = norms_maths.rms_norm(**exact(given))
    close(h, want_h, dtype)
    close(y, want_y, dtype)
    if residual:
        assert torch.equal(h, given["residual"] + given["x"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("centered", "residual"), [(True, True), (True, False), (False, True)])
def test_rms_norm_equals_the_reference(
    dtype: torch.dtype, centered: bool, residual: bool, device: torch.device
) -> None:
    check_rms_norm(3, 65, dtype, device, centered, residual)


def check_gated_norm(
    rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    given: dict[str, Any] = {
        "o": torch.randn(rows, heads, dim, device=device).to(dtype),
        "z": columns(rows, heads * dim, dtype, device),
        "weight": torch.randn(dim, device=device).to(dtype),
        "eps": 1e-6,
    }
    close(norms.gated_rms_norm(**given), norms_maths.gated_rms_norm(**exact(given)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rms_norm_equals_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    check_gated_norm(2, 3, 12, dtype, device)


def check_gates(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = columns(rows, 2 * dim, dtype, device)
    close(gates.swiglu(gate_up), gates_maths.swiglu(gate_up.cpu().double()), dtype)
    x = torch.randn(rows, 3, dim, device=device).to(dtype)
    gate = columns(rows, 6 * dim, dtype, device).unflatten(1, (3, 2 * dim))[..., dim:]
    want = gates_maths.sigmoid_gate(x.cpu().double(), gate=gate.cpu().double())
    close(gates.sigmoid_gate(x, gate=gate), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_equal_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    check_gates(2, 63, dtype, device)


def check_rotation(
    rows: int,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    gated: bool,
) -> None:
    heads, kv_heads, dim, rotated = sizes
    pages, page = 4, rows
    frequencies = 10_000.0 ** -torch.arange(0, 1, 2 / rotated)
    cos, sin = rotary_maths.rotary_tables(301, inv_freq=frequencies, scaling=1.0, dtype=dtype)
    slots = torch.randperm(pages * page)[:rows].int()
    slots[rows // 2] = -1
    pool = torch.full((pages, page, kv_heads, dim), float("nan"), dtype=dtype, device=device)
    given: dict[str, Any] = {
        "qkv": columns(rows, (heads * (1 + gated) + 2 * kv_heads) * dim, dtype, device),
        "q_weight": torch.randn(dim, device=device).to(dtype),
        "k_weight": torch.randn(dim, device=device).to(dtype),
        "eps": 1e-6,
        "zero_centered": gated,
        "gated": gated,
        "cos": cos.to(device),
        "sin": sin.to(device),
        "positions": torch.randint(0, 301, (rows,), dtype=torch.int32).to(device),
        "keys": pool,
        "values": pool.clone(),
        "slots": slots.to(device),
    }
    wide = exact(given)
    q, gate = rotary.rotate_and_write(**given)
    want_q, want_gate = rotary_maths.rotate_and_write(**wide)
    close(q, want_q, dtype)
    assert (gate is None) == (want_gate is None) == (not gated)
    if gate is not None and want_gate is not None:
        assert torch.equal(gate.cpu().double(), want_gate)
    for name in ("keys", "values"):
        got, want = given[name].cpu().double(), wide[name]
        assert torch.equal(got.isnan(), want.isnan())
        close(got.nan_to_num(), want.nan_to_num(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_rotation_equals_the_reference_and_writes_only_its_slots(
    dtype: torch.dtype, gated: bool, device: torch.device
) -> None:
    check_rotation(3, (2, 1, 20, 12 if gated else 20), dtype, device, gated)


@pytest.mark.parametrize("op", ["norm", "gated norm", "gates", "rotation"])
def test_no_rows_give_no_rows(op: str, device: torch.device) -> None:
    checks: dict[str, Any] = {
        "norm": lambda: check_rms_norm(0, 8, torch.float32, device, True, False),
        "gated norm": lambda: check_gated_norm(0, 2, 4, torch.float32, device),
        "gates": lambda: check_gates(0, 8, torch.float32, device),
        "rotation": lambda: rotary.rotate_and_write(
            torch.zeros(0, 32, device=device),
            q_weight=torch.zeros(8, device=device),
            k_weight=torch.zeros(8, device=device),
            eps=1e-6,
            zero_centered=True,
            gated=False,
            cos=torch.zeros(1, 2, device=device),
            sin=torch.zeros(1, 2, device=device),
            positions=torch.zeros(0, dtype=torch.int32, device=device),
            keys=torch.zeros(1, 1, 1, 8, device=device),
            values=torch.zeros(1, 1, 1, 8, device=device),
            slots=torch.zeros(0, dtype=torch.int32, device=device),
        ),
    }
    checks[op]()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("rows", [1, 63, 64, 65])
def test_sizes_of_a_real_layer_equal_float64(rows: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    check_rms_norm(rows, 2560, dtype, device, True, True)
    check_rms_norm(rows, 4096, dtype, device, False, True)
    check_gated_norm(rows, 32, 128, dtype, device)
    check_gates(rows, 9216, dtype, device)
    check_gates(rows, 256, dtype, device)
    check_rotation(rows, (16, 4, 256, 64), dtype, device, True)
    check_rotation(rows, (32, 8, 128, 128), dtype, device, False)


@pytest.mark.gpu
@pytest.mark.parametrize("centered", [False, True])
def test_bfloat16_rows_come_out_with_the_bits_of_the_modules(centered: bool) -> None:
    """Rounding happens where the modules round, so few elements may differ, by one step."""
    x, residual = (torch.randn(64, 2560, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(2560, device="cuda", dtype=torch.bfloat16)
    named: dict[str, Any] = {"weight": weight, "eps": 1e-6, "zero_centered": centered}
    y, h = norms.rms_norm(x, **named, residual=residual)
    want_y, want_h = norms_maths.rms_norm(x, **named, residual=residual)
    assert torch.equal(h, want_h)
    assert float((y != want_y).float().mean()) < 1e-3
    gate_up = torch.randn(64, 2 * 9216, device="cuda", dtype=torch.bfloat16)
    assert float((gates.swiglu(gate_up) != gates_maths.swiglu(gate_up)).float().mean()) < 1e-2
