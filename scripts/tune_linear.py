"""Measure how a decode step's matrices stream on this GPU, to fill the table of kernels/_stream.py.

    python scripts/tune_linear.py --rows 16 64            every shape of Qwen3.5-4B, best first
    python scripts/tune_linear.py --rows 16 --chain       a whole step of products, early or not

Each tiling is checked against the BLAS library's result, then replayed from a CUDA graph over
copies of the matrix that together exceed the cache. One JSON line a shape and number of rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_cases.clock import replay_s  # type: ignore[import-not-found]

from octopus_trl.kernels import _stream, gates, norms
from octopus_trl.kernels._stream import Tiling

# Outputs and inputs of the fused projections: GDN in, GDN out and o_proj, attention in, gate and
# up, down, output layer.
SHAPES = {
    "delta in": (12352, 2560),
    "out": (2560, 4096),
    "attention in": (10240, 2560),
    "gate up": (18432, 2560),
    "down": (2560, 9216),
    "head": (248320, 2560),
}
BYTES = 6e8  # of the copies of one matrix together
SHARED_BYTES = 227 * 1024  # of one multiprocessor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[16])
    parser.add_argument("--shape", nargs="*", choices=list(SHAPES), default=None)
    parser.add_argument("--chain", action="store_true", help="time a whole step of products")
    asked = parser.parse_args()
    for rows in asked.rows:
        if asked.chain:
            chain(rows)
        else:
            for name in asked.shape or SHAPES:
                sweep(name, rows)


def candidates(rows: int, num_outputs: int, dim: int) -> list[Tiling]:
    """List tilings of which all programs are resident at once and enough bytes are in flight."""
    found = []
    for outputs, depth, parts, stages in itertools.product(
        (32, 64, 128), (64, 128, 256), (1, 2, 4, 8), (3, 4, 5, 6)
    ):
        warps = 8 if outputs * max(16, rows) >= 128 * 64 else 4
        programs = -(-num_outputs // outputs) * parts
        tile, block = outputs * depth * 2, max(16, rows) * depth * 2
        resident = min(16 // (warps // 4), SHARED_BYTES // (stages * (tile + block) + 1024))
        flight = min(programs, 132 * resident) * (stages - 1) * tile
        steps = -(-dim // depth)
        one_wave = programs <= 132 * resident or num_outputs > 100_000
        if (
            one_wave
            and 5e6 <= flight <= 2.6e7
            and programs >= 90
            and (parts == 1 or num_outputs < 100_000)
            and steps % parts == 0
            and steps // parts >= 2
        ):
            found.append(Tiling(outputs, depth, parts, warps, stages))
    # Few enough to measure: an even choice over the sorted list.
    return found if len(found) <= 16 else found[:: -(-len(found) // 16)]


def sweep(name: str, rows: int) -> None:
    """Measure every candidate for one matrix and print them, best first."""
    num_outputs, dim = SHAPES[name]
    size = num_outputs * dim * 2
    copies = max(2, int(BYTES / size))
    weights = [
        torch.randn(num_outputs, dim, device="cuda", dtype=torch.bfloat16) / dim**0.5
        for _ in range(copies)
    ]
    x = torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16)
    blas = replay_s(lambda: [F.linear(x, w) for w in weights]) / copies
    want = x.double() @ weights[0].double().T
    cuts = candidates(rows, num_outputs, dim)
    begin = time.perf_counter()
    compile_all(x, weights[0], cuts)
    results = []
    for cut in cuts:
        got = _stream.multiply(x, weights[0], cut).double()
        error = float((got - want).norm() / want.norm())
        if error > 1e-2:
            sys.exit(f"{name}, {rows} rows, {cut}: relative error {error}")
        seconds = replay_s(partial(multiply_all, x, weights, cut))
        results.append((seconds / copies, cut))
    results.sort()
    print(
        json.dumps(
            {
                "shape": name,
                "rows": rows,
                "MB": round(size / 1e6, 1),
                "blas": [round(blas * 1e6, 2), round(size / blas / 1e12, 2)],
                "ours": [
                    [round(s * 1e6, 2), round(size / s / 1e12, 2), list(cut)]
                    for s, cut in results[:6]
                ],
                "worst": round(results[-1][0] * 1e6, 2) if results else None,
                "tried": len(results),
                "wall_s": round(time.perf_counter() - begin, 1),
            }
        ),
        flush=True,
    )


def multiply_all(x: Tensor, weights: Sequence[Tensor], cut: Tiling) -> list[Tensor]:
    """Multiply by every copy, one after another."""
    return [_stream.multiply(x, weight, cut) for weight in weights]


def compile_all(x: Tensor, weight: Tensor, cuts: Sequence[Tiling]) -> None:
    """Compile on several threads; the kernels are launched later."""

    def build(cut: Tiling) -> None:
        y = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
        grid, arguments, settings = _stream.launch(x, weight, y, cut)
        _stream._skinny_linear.warmup(*arguments, grid=grid, **settings)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        list(pool.map(build, cuts))


def chain(rows: int) -> None:
    """Time norms, products and SwiGLU of all 32 layers and the head: BLAS, ours, ours early."""
    made = {
        name: [
            torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[1] ** 0.5
            for _ in range({"delta in": 24, "attention in": 8, "head": 1}.get(name, 32))
        ]
        for name, shape in SHAPES.items()
    }
    norm = torch.zeros(2560, device="cuda", dtype=torch.bfloat16)
    start = torch.randn(rows, 2560, device="cuda", dtype=torch.bfloat16)
    total = sum(w.numel() * w.itemsize for group in made.values() for w in group)

    def step(product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        x, stream = start, None
        delta, attention = iter(made["delta in"]), iter(made["attention in"])
        for layer in range(32):
            y, stream = norms.rms_norm(
                x, weight=norm, eps=1e-6, zero_centered=True, residual=stream
            )
            mixed = product(y, next(attention if layer % 4 == 3 else delta))
            mixed = product(mixed[:, :4096], made["out"][layer])
            y, stream = norms.rms_norm(
                mixed, weight=norm, eps=1e-6, zero_centered=True, residual=stream
            )
            x = product(gates.swiglu(product(y, made["gate up"][layer])), made["down"][layer])
        y, _ = norms.rms_norm(x, weight=norm, eps=1e-6, zero_centered=True, residual=stream)
        return product(y, made["head"][0])

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return _stream.multiply(x, weight, _stream.tiling(rows, *weight.shape))

    results: dict[str, Any] = {"chain": "32 layers and head", "rows": rows, "GB": total / 1e9}
    wanted = start
    for name, product, setting in (
        ("blas", F.linear, "0"),
        ("blas, early norms", F.linear, "1"),
        ("ours", ours, "0"),
        ("ours, early", ours, "1"),
    ):
        os.environ["OCTOPUS_EARLY_LAUNCH"] = setting
        out = step(product)
        if name == "ours":
            wanted = out
        if name == "ours, early":
            same = all(torch.equal(step(product), wanted) for _ in range(20))
            results["early gives the same bits"] = same
        seconds = replay_s(partial(step, product))
        results[name] = {"ms": round(seconds * 1e3, 3), "TB/s": round(total / seconds / 1e12, 2)}
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
