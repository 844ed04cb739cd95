"""Every kernel of a decode step or an update compiles for a Hopper GPU, on a machine that has none;
and where launches are early, what stands before a kernel's wait.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# Runs in a process of its own: kernels that the interpreter has taken over cannot be compiled.
PROGRAM = """
import json, torch
from tests.kernels.hopper import compiled_for_hopper
from octopus_trl.kernels import (
    _stream, _triton, delta_pool, gates, linear, lora, norms, rotary, sampling
)

_triton._is_early = lambda device, setting, rows: {early}
rows, dim, inner, vocab = {rows}, 2560, 9216, 248320

def zeros(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype)

def index(rows):
    return zeros(rows, dtype=torch.int32)

with compiled_for_hopper() as built:
    x = zeros(rows, dim)
    norms.rms_norm(x, weight=zeros(dim), eps=1e-6, zero_centered=True, residual=zeros(rows, dim))
    norms.gated_rms_norm(zeros(rows, 32, 128), z=zeros(rows, 4096), weight=zeros(128), eps=1e-6)
    gates.swiglu(zeros(rows, 2 * inner))
    linear.skinny_linear(zeros(rows, inner), weight=zeros(dim, inner))
    up = zeros(2 * inner, dim)
    cut = _stream.tiling(rows, 2 * inner, dim)
    _stream.multiply(x, up, cut)
    _stream.multiply(x, up, cut, gated=True)
    h = lora.lora_shrink(x, a=zeros(192, dim))
    starts = zeros(10240, dtype=torch.int32)
    lora.lora_expand(zeros(rows, 10240), h=h, b=zeros(10240, 64), starts=starts)
    q, gate = rotary.rotate_and_write(
        zeros(rows, 10240),
        q_weight=zeros(256), k_weight=zeros(256), eps=1e-6, zero_centered=True, gated=True,
        cos=zeros(99, 32), sin=zeros(99, 32), positions=index(rows), slots=index(rows),
        keys=zeros(4, 16, 4, 256), values=zeros(4, 16, 4, 256),
    )
    gates.sigmoid_gate(q, gate=gate)
    delta_pool.gated_delta_pool_step(
        zeros(rows, 8192),
        a=zeros(rows, 32), b=zeros(rows, 32), z=zeros(rows, 4096),
        conv_weight=zeros(8192, 4), conv_bias=None, A_log=zeros(32), dt_bias=zeros(32),
        norm_weight=zeros(128), num_key_heads=16, read=index(rows), write=index(rows),
        tails=zeros(2, 8192, 3), states=zeros(2, 32, 128, 128, dtype=torch.float32),
    )
    delta_pool.delta_gates(
        zeros(rows, 12352)[:, 12320:], b=zeros(rows, 12352)[:, 12288:12320],
        A_log=zeros(32), dt_bias=zeros(32),
    )
    ones = torch.ones(rows)
    sampling.sample(
        zeros(rows, vocab),
        temperature=ones, top_p=ones, top_k=index(rows), min_p=ones,
        uniform=ones.double(), filtered=True,
    )
print(json.dumps([
    [kernel.name, kernel.registers, kernel.stack_bytes, kernel.before_wait] for kernel in built
]))
"""

UPDATE = """
import json, torch
from tests.kernels.hopper import compiled_for_hopper
from octopus_trl.kernels import packed_layers

def zeros(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True)

with compiled_for_hopper() as built:
    for trains in (False, True):
        for dim, centered in ((2560, True), (256, True), (128, False)):
            weight = zeros(dim).requires_grad_(trains)
            norm = {"weight": weight, "eps": 1e-6, "zero_centered": centered}
            packed_layers.packed_rms_norm(zeros(70, dim), **norm).sum().backward()
        norm = {"weight": zeros(128).requires_grad_(trains), "eps": 1e-6}
        packed_layers.packed_gated_norm(zeros(70, 128), z=zeros(70, 128), **norm).sum().backward()
    packed_layers.packed_unit(zeros(70, 16, 128), eps=1e-6).sum().backward()
    packed_layers.packed_swiglu(zeros(70, 9216), up=zeros(70, 9216)).sum().backward()
print(json.dumps([[kernel.name, kernel.registers, kernel.stack_bytes] for kernel in built]))
"""


def compiled(program: str) -> list[Any]:
    """Run a program that prints what it compiled."""
    pytest.importorskip("triton", reason="needs Triton: pip install 'triton>=3.6,<3.8'")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_kernel_of_an_update_compiles_for_hopper_without_spilling() -> None:
    built = compiled(UPDATE)
    assert len({name for name, *_ in built}) == 6
    assert [name for name, _, stack in built if stack] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("rows", [16, 64])
def test_every_kernel_compiles_for_hopper_without_spilling(rows: int, early: bool) -> None:
    program = PROGRAM.replace("{rows}", str(rows)).replace("{early}", str(early))
    built = compiled(program)
    assert len({name for name, *_ in built}) == 15
    assert [name for name, _, stack, _ in built if stack] == []
    if early:
        check_waits(built)


def check_waits(built: list[tuple[str, int, int, list[str]]]) -> None:
    """Nothing is written before a wait; what is read is state slots of the rows."""
    assert {op for *_, before in built for op in before} == {"ld"}
    assert {name for name, *_, before in built if before} == {"_delta_pool_step"}
