"""Measure settings of the decode step's kernels on this GPU, to choose those in their modules.

    python scripts/tune_kernels.py linear --rows 16 64    tilings of every matrix of Qwen3.5-4B
    python scripts/tune_kernels.py chain --rows 16        a whole step of products, early or not
    python scripts/tune_kernels.py delta --rows 16 128    tilings of the gated delta step

Products are checked against float64 first. Work is replayed from a CUDA graph over data that
exceeds the cache. One JSON line a case and number of rows, best first; `linear` ends with the lines
for `octopus_trl/kernels/_stream_tuning.py`.
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

from octopus_trl.kernels import _stream, delta_pool, gates, norms
from octopus_trl.kernels._stream import Tiling
from octopus_trl.kernels.linear import skinny_linear

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
GAIN = 0.98  # of the time of BLAS: what a line in the table must save


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["linear", "chain", "delta"])
    parser.add_argument("--rows", type=int, nargs="+", default=[16])
    parser.add_argument("--shape", nargs="*", choices=list(SHAPES), default=None)
    asked = parser.parse_args()
    chosen: dict[str, dict[int, Tiling | None]] = {}
    for rows in sorted(asked.rows):
        if asked.what == "chain":
            chain(rows)
        elif asked.what == "delta":
            delta(rows)
        else:
            for name in asked.shape or SHAPES:
                chosen.setdefault(name, {})[rows] = sweep(name, rows)
    for name, lines in chosen.items():
        num_outputs, dim = SHAPES[name]
        print(f"    ({dim}, {num_outputs}): {lines},  # {name}", flush=True)


def candidates(rows: int, num_outputs: int, dim: int) -> list[Tiling]:
    """List tilings of which all programs are resident at once and enough bytes are in flight.

    Few parts come first (what is split must be added up), then the most in flight.
    """
    found = []
    for outputs, depth, parts, stages in itertools.product(
        (32, 64, 128), (64, 128, 256), (1, 2, 4, 8), (2, 3, 4, 6, 8)
    ):
        warps = 8 if outputs * max(16, rows) >= 128 * 64 else 4
        programs = -(-num_outputs // outputs) * parts
        tile, block = outputs * depth * 2, max(16, rows) * depth * 2
        resident = min(16 // (warps // 4), SHARED_BYTES // (stages * (tile + block) + 1024))
        flight = min(programs, 132 * resident) * (stages - 1) * tile
        steps = -(-dim // depth)
        if (
            (programs <= 132 * resident or num_outputs > 100_000)
            and 4e6 <= flight <= 2.6e7
            and programs >= 70
            and (parts == 1 or num_outputs < 100_000)
            and steps % parts == 0
            and steps // parts >= 2
        ):
            found.append((parts, -flight, Tiling(outputs, depth, parts, warps, stages)))
    found.sort()
    # Few enough to measure: an even choice over the sorted list.
    return [cut for *_, cut in (found if len(found) <= 24 else found[:: -(-len(found) // 24)])]


def sweep(name: str, rows: int) -> Tiling | None:
    """Measure every candidate for one matrix and print them, best first.

    Returns:
        The best; None where BLAS is as fast.
    """
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
    return results[0][1] if results and results[0][0] < GAIN * blas else None


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
    """Time norms, products and SwiGLU of all 32 layers and the head, with products by BLAS, by the
    table, all ours, all ours launched early.
    """
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

    def chosen(x: Tensor, weight: Tensor) -> Tensor:
        return skinny_linear(x, weight=weight)

    results: dict[str, Any] = {"chain": "32 layers and head", "rows": rows, "GB": total / 1e9}
    os.environ["OCTOPUS_EARLY_LAUNCH"] = "0"
    wanted = step(ours)
    for name, product, setting in (
        ("blas", F.linear, "0"),
        ("blas, early norms", F.linear, "1"),
        ("table", chosen, "0"),
        ("table, early", chosen, "1"),
        ("ours", ours, "0"),
        ("ours, early", ours, "1"),
    ):
        os.environ["OCTOPUS_EARLY_LAUNCH"] = setting
        if setting == "1" and product is ours:
            same = all(torch.equal(step(product), wanted) for _ in range(5))
            results[f"{name}: same bits"] = same
        seconds = replay_s(partial(step, product))
        results[name] = {"ms": round(seconds * 1e3, 3), "TB/s": round(total / seconds / 1e12, 2)}
    print(json.dumps(results), flush=True)


def delta(rows: int) -> None:
    """Measure the gated delta step with several tilings."""
    heads, dim, channels = 32, 128, 8192
    wide = heads * dim
    slots = max(3, int(BYTES / (rows * 2 * wide * dim * 4))) * rows
    states = torch.zeros(slots + 1, heads, dim, dim, device="cuda")
    tails = torch.zeros(slots + 1, channels, 3, device="cuda", dtype=torch.bfloat16)
    sets = (torch.randperm(slots, device="cuda").int() + 1).split(rows)
    product = torch.randn(rows, channels + wide + 2 * heads, device="cuda", dtype=torch.bfloat16)
    mixed, z, b, a = product.split([channels, wide, heads, heads], dim=-1)
    layer: dict[str, Any] = {
        "conv_weight": torch.randn(channels, 4, device="cuda", dtype=torch.bfloat16),
        "conv_bias": None,
        "A_log": torch.zeros(heads, device="cuda", dtype=torch.bfloat16),
        "dt_bias": torch.zeros(heads, device="cuda", dtype=torch.bfloat16),
        "norm_weight": torch.ones(dim, device="cuda", dtype=torch.bfloat16),
        "num_key_heads": 16,
        "tails": tails,
        "states": states,
    }
    nbytes = rows * 2 * wide * dim * 4 + product.nbytes

    def work() -> None:
        for at in sets:
            delta_pool.gated_delta_pool_step(mixed, a=a, b=b, z=z, **layer, read=at, write=at)

    results = []
    for tiling in ((32, 4, 3), (32, 4, 5), (64, 4, 2), (64, 4, 3), (64, 8, 2), (128, 4, 2)):
        delta_pool.TILING = delta_pool.Tiling(*tiling)
        seconds = replay_s(work) / len(sets)
        results.append((round(seconds * 1e6, 2), round(nbytes / seconds / 1e12, 2), tiling))
    results.sort()
    print(
        json.dumps(
            {
                "delta": "us, TB/s, tiling",
                "rows": rows,
                "best first": results,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
