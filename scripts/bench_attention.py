"""Decode attention by itself on one GPU, without making a model: figures, or a sweep of its sizes.

    python scripts/bench_attention.py                     8, 16 and 64 threads; a JSON line each
    python scripts/bench_attention.py --sweep             every candidate at 16 and 64 threads
    python scripts/bench_attention.py --sweep chunk       the chosen sizes over lengths of a chunk
    python scripts/bench_attention.py --sweep overlap     the launch of the merge, and its sizes

Each result is checked against float64 before it is timed. A sweep compiles its candidates in
parallel processes first; what does not fit the device is said and left out. The winner goes into
`octopus_trl/kernels/_decode_tuning.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # octopus_trl of this checkout, whatever is installed

import torch  # noqa: E402
from bench_cases.attention import CALLS, Case, Shape  # type: ignore[import-not-found]  # noqa: E402
from bench_cases.clock import median_s  # type: ignore[import-not-found]  # noqa: E402
from bench_cases.command import circumstances  # type: ignore[import-not-found]  # noqa: E402
from bench_cases.limits import H200  # type: ignore[import-not-found]  # noqa: E402
from torch import Tensor  # noqa: E402

from octopus_trl.kernels._decode_items import attend  # noqa: E402
from octopus_trl.kernels._decode_tuning import Tuning  # noqa: E402

SHARED, OWN = 32_768, 4_096
SIZES = (
    *("small", "small_block", "small_stages"),
    *("large", "large_block", "large_stages"),
    *("warps", "programs"),
)
CANDIDATES = {
    256: [
        (16, 64, 3, 128, 32, 4, 8, 1),
        (16, 64, 3, 128, 32, 3, 8, 1),
        (16, 64, 3, 128, 64, 2, 8, 1),
        (16, 64, 4, 128, 32, 4, 8, 1),
        (16, 32, 6, 128, 32, 4, 8, 1),
        (32, 64, 3, 128, 32, 4, 8, 1),
        (16, 64, 3, 64, 32, 4, 4, 1),
        (16, 64, 3, 64, 64, 2, 4, 1),
        (16, 32, 4, 64, 32, 2, 4, 2),
        (16, 32, 3, 64, 32, 2, 4, 2),
    ],
    128: [
        (16, 64, 4, 128, 64, 3, 8, 1),
        (16, 128, 3, 128, 128, 2, 8, 1),
        (16, 64, 3, 64, 64, 2, 4, 2),
        (16, 128, 2, 64, 64, 3, 4, 2),
        (16, 64, 3, 128, 64, 2, 8, 1),
    ],
    64: [
        (16, 64, 4, 128, 64, 4, 8, 1),
        (16, 128, 3, 128, 128, 3, 8, 1),
        (16, 128, 3, 64, 128, 2, 4, 2),
        (16, 64, 4, 64, 64, 3, 4, 3),
    ],
}


def main() -> int:
    """Print figures; the exit status is 1 if a result was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--sweep", nargs="?", const="sizes", choices=["sizes", "chunk", "overlap"])
    parser.add_argument("--threads", type=int, nargs="+")
    parser.add_argument("--head-dim", type=int, default=256, choices=list(CANDIDATES))
    parser.add_argument("--shared", type=int, default=SHARED)
    parser.add_argument("--own", type=int, default=OWN)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_attention.py needs a CUDA device", file=sys.stderr)
        return 2
    heads = 16 if asked.head_dim == 256 else 32
    shapes = [
        Shape(threads, asked.shared, asked.own, heads, heads // 4, asked.head_dim)
        for threads in asked.threads or ([16, 64] if asked.sweep else [8, 16, 64])
    ]
    if asked.compile:
        _compile(Tuning(**json.loads(asked.compile)), shapes[0])
        return 0
    if asked.sweep:
        return _sweep(asked.sweep, shapes)
    for shape in shapes:
        case = Case(shape, torch.device("cuda"))
        case.check(case.ours)
        seconds = median_s(case.timer(case.ours), repeats=9) / CALLS
        record = case.line(seconds, H200).record()
        print(json.dumps({"bench": "attention", **record, **circumstances()}), flush=True)
        del case
        torch.cuda.empty_cache()
    return 0


class _Raw(argparse.RawDescriptionHelpFormatter):
    pass


def _sweep(kind: str, shapes: Sequence[Shape]) -> int:
    chosen = list(_candidates(kind, shapes[0].head_dim))
    begin = time.perf_counter()
    _compile_all({tuning for tuning, _ in chosen}, shapes[0])
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    wrong = 0
    for shape in shapes:
        limit = shape.limit_s(H200)
        print(f"\n{shape.threads} threads, limit {1e6 * limit:.1f} us at 4.8 TB/s and 600 TFLOP/s")
        inputs: Case | None = None
        found: list[tuple[float, str]] = []
        for tuning, chunk in chosen:
            try:
                inputs = _case(shape, tuning, chunk, inputs)
                text, seconds = _measure(inputs, tuning)
            except Exception as error:  # noqa: BLE001 the other candidates still count
                wrong += 1
                print(f"  {_name(tuning, chunk)}: {type(error).__name__}: {str(error)[:200]}")
                continue
            name = f"{_name(tuning, chunk)} | {text}"
            found.append((seconds, name))
            print(f"  {1e6 * seconds:7.1f} us {limit / seconds:6.1%}  {name}", flush=True)
        if found:
            seconds, name = min(found)
            print(f"best at {shape.threads}: {1e6 * seconds:.1f} us {limit / seconds:.1%} {name}")
        del inputs
        torch.cuda.empty_cache()
    return int(wrong > 0)


def _candidates(kind: str, head_dim: int) -> Iterator[tuple[Tuning, int | None]]:
    table = Tuning.of(head_dim)
    if kind == "sizes":
        for sizes in CANDIDATES[head_dim]:
            named: dict[str, Any] = dict(zip(SIZES, sizes, strict=True))
            yield Tuning(**named), None
    elif kind == "chunk":
        for chunk in (None, 512, 768, 1024, 1536, 2048, 4096):
            yield table, chunk
    else:
        for overlap in (False, True):
            yield replace(table, overlap=overlap), None
        for block, warps in ((8, 4), (16, 2), (16, 8), (32, 4), (32, 8)):
            yield replace(table, merge_block=block, merge_warps=warps), None


def _case(shape: Shape, tuning: Tuning, chunk: int | None, before: Case | None) -> Case:
    """Plan for a tuning; inputs are made once a shape."""
    group = shape.num_heads // shape.num_kv_heads
    return Case(
        shape,
        torch.device("cuda"),
        chunk=chunk,
        readers_per_tile=tuning.readers_per_tile(group),
        few_readers=max(1, tuning.small // group),
        programs=tuning.programs * torch.cuda.get_device_properties(0).multi_processor_count,
        inputs=None if before is None else (before.q, before.keys, before.values),
    )


def _measure(case: Case, tuning: Tuning) -> tuple[str, float]:
    def call() -> Tensor:
        return attend(case.q, case.keys, case.values, case.work, case.scale, tuning)

    case.check(call)
    seconds = median_s(case.timer(call), repeats=9) / CALLS
    one = case.lists.lists[0]
    partials = int(one.layout.views(one.packed)["bounds"][-1])
    return f"{one.num_items} items {partials} partials", seconds


def _name(tuning: Tuning, chunk: int | None) -> str:
    text = ", ".join(f"{key} {value}" for key, value in asdict(tuning).items())
    return f"{text}, chunk {chunk or 'balanced'}"


def _compile_all(tunings: set[Tuning], shape: Shape) -> None:
    """Fill Triton's cache from one process a candidate."""
    running = [
        subprocess.Popen(
            [
                *(sys.executable, __file__, "--compile", json.dumps(asdict(tuning))),
                *("--head-dim", str(shape.head_dim), "--threads", "1"),
                *("--shared", "256", "--own", "64"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for tuning in tunings
    ]
    for process in running:
        process.wait()


def _compile(tuning: Tuning, shape: Shape) -> None:
    case = _case(shape, tuning, None, None)
    attend(case.q, case.keys, case.values, case.work, case.scale, tuning)
    torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
