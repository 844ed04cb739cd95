"""Measure settings of the decode step's kernels on this GPU, to choose those in their modules.

    python scripts/tune_kernels.py linear --rows 16 64    tilings of every matrix of Qwen3.5-4B
    python scripts/tune_kernels.py linear --rows 16 --shape "gate up" --early --gated
                                                          launched early, SwiGLU in the product
    python scripts/tune_kernels.py chain --rows 8 16      a whole step of products, early or not
    python scripts/tune_kernels.py delta --rows 16 128    tilings of the gated delta step

Products are checked against float64 first, early launches and gates for equal bits. Work is
replayed from a CUDA graph over data that exceeds the cache. One JSON line a case and number of
rows; `linear` and `delta` give the best first; `linear` ends with the lines for
`octopus_trl/kernels/_stream_tuning.py`, `chain` decides those of `_pass_tuning.py` there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
    parser.add_argument(
        "--early", action="store_true", help="linear: launch early, a norm before each product"
    )
    parser.add_argument("--gated", action="store_true", help="linear: SwiGLU in the product")
    asked = parser.parse_args()
    if asked.gated and asked.shape != ["gate up"]:
        parser.error("--gated is for --shape 'gate up' alone")
    chosen: dict[str, dict[int, Tiling | None]] = {}
    for rows in sorted(asked.rows):
        if asked.what == "chain":
            chain(rows)
        elif asked.what == "delta":
            delta(rows)
        else:
            for name in asked.shape or SHAPES:
                case = Case(name, rows, asked.early, asked.gated)
                chosen.setdefault(name, {})[rows] = sweep(case)
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


class Case(NamedTuple):
    """What `sweep` measures."""

    name: str
    rows: int
    early: bool
    gated: bool

    def product(self, x: Tensor, weight: Tensor, cut: Tiling | None) -> Tensor:
        """Multiply by ours, or without a tiling by BLAS; after a norm where launches are early."""
        if self.early:
            norm = weight[0]
            x, _ = norms.rms_norm(x, weight=norm, eps=1e-6, zero_centered=True, residual=None)
        if cut is not None:
            return _stream.multiply(x, weight, cut, gated=self.gated)
        y = F.linear(x, weight)
        return gates.swiglu(y) if self.gated else y

    def all(self, x: Tensor, weights: Sequence[Tensor], cut: Tiling | None) -> list[Tensor]:
        """Multiply by every copy, one after another."""
        return [self.product(x, weight, cut) for weight in weights]


def sweep(case: Case) -> Tiling | None:
    """Measure every candidate for one matrix and print them, best first.

    Returns:
        The best; None where BLAS is as fast.
    """
    num_outputs, dim = SHAPES[case.name]
    size = num_outputs * dim * 2
    copies = max(2, int(BYTES / size))
    weights = [
        torch.randn(num_outputs, dim, device="cuda", dtype=torch.bfloat16) / dim**0.5
        for _ in range(copies)
    ]
    x = torch.randn(case.rows, dim, device="cuda", dtype=torch.bfloat16)
    set_early(case.early)
    blas = replay_s(partial(case.all, x, weights, None)) / copies
    cuts = [
        cut for cut in candidates(case.rows, num_outputs, dim) if cut.parts == 1 or not case.gated
    ]
    begin = time.perf_counter()
    results = timed(case, x, weights, cuts)
    print(
        json.dumps(
            {
                "shape": case.name,
                "rows": case.rows,
                "early, norm before each": case.early,
                "gated": case.gated,
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


def timed(
    case: Case, x: Tensor, weights: Sequence[Tensor], cuts: Sequence[Tiling]
) -> list[tuple[float, Tiling]]:
    """Check tilings and give the seconds of a product with each, best first."""
    compile_all(x, weights[0], cuts, gated=case.gated)
    exact = x.double() @ weights[0].double().T
    results = []
    for cut in cuts:
        set_early(False)
        plain = _stream.multiply(x, weights[0], cut)
        error = float((plain.double() - exact).norm() / exact.norm())
        if error > 1e-2:
            sys.exit(f"{case.name}, {case.rows} rows, {cut}: relative error {error}")
        set_early(case.early)
        want = gates.swiglu(plain) if case.gated else plain
        torch.cuda.synchronize()
        got = _stream.multiply(x, weights[0], cut, gated=case.gated)
        if not torch.equal(got, want):
            sys.exit(f"{case.name}, {case.rows} rows, {cut}: other bits, early or gated")
        seconds = replay_s(partial(case.all, x, weights, cut))
        results.append((seconds / len(weights), cut))
    return sorted(results)


def set_early(on: bool) -> None:
    """Make all launches early, or none."""
    os.environ["OCTOPUS_EARLY_LAUNCH"] = str(int(on))


def compile_all(x: Tensor, weight: Tensor, cuts: Sequence[Tiling], *, gated: bool) -> None:
    """Compile on several threads; the kernels are launched later."""

    def build(cut: Tiling) -> None:
        y = torch.empty(len(x), len(weight) // (1 + gated), dtype=x.dtype, device=x.device)
        grid, arguments, settings = _stream.launch(x, weight, y, cut)
        _stream._skinny_linear.warmup(*arguments, grid=grid, **settings)

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        list(pool.map(build, cuts))


class Way(NamedTuple):
    """How a chain's products are done.

    Attributes:
        by: "blas", "table", or "ours".
    """

    by: str
    early: bool = False
    gated: bool = False

    def product(self, x: Tensor, weight: Tensor, *, gated: bool = False) -> Tensor:
        """Multiply; gated, with SwiGLU after it or in it."""
        if self.by == "ours":
            cut = _stream.tiling(len(x), *weight.shape)
            if gated and self.gated:
                return _stream.multiply(x, weight, cut, gated=True)
            y = _stream.multiply(x, weight, cut)
        else:
            y = F.linear(x, weight) if self.by == "blas" else skinny_linear(x, weight=weight)
        return gates.swiglu(y) if gated else y


WAYS = (
    Way("blas"),
    Way("table"),
    Way("table", early=True),
    Way("ours"),
    Way("ours", early=True),
    Way("ours", early=True, gated=True),
)


def chain(rows: int) -> None:
    """Time norms, products and SwiGLU of all 32 layers and the head in every way of `WAYS`."""
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

    def step(way: Way) -> Tensor:
        x, stream = start, None
        delta, attention = iter(made["delta in"]), iter(made["attention in"])
        for layer in range(32):
            y, stream = norms.rms_norm(
                x, weight=norm, eps=1e-6, zero_centered=True, residual=stream
            )
            mixed = way.product(y, next(attention if layer % 4 == 3 else delta))
            mixed = way.product(mixed[:, :4096], made["out"][layer])
            y, stream = norms.rms_norm(
                mixed, weight=norm, eps=1e-6, zero_centered=True, residual=stream
            )
            wide = way.product(y, made["gate up"][layer], gated=True)
            x = way.product(wide, made["down"][layer])
        y, _ = norms.rms_norm(x, weight=norm, eps=1e-6, zero_centered=True, residual=stream)
        return way.product(y, made["head"][0])

    for way in WAYS:
        result: dict[str, Any] = {"chain": "32 layers and head", "rows": rows, **way._asdict()}
        if way.by == "ours" and way.early:
            set_early(False)
            wanted = step(way._replace(gated=False))
            torch.cuda.synchronize()
            set_early(True)
            result["same bits"] = all(torch.equal(step(way), wanted) for _ in range(5))
        set_early(way.early)
        seconds = replay_s(partial(step, way))
        result |= {
            "ms": round(seconds * 1e3, 3),
            "GB": round(total / 1e9, 2),
            "TB/s": round(total / seconds / 1e12, 2),
        }
        print(json.dumps(result), flush=True)


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
