"""Decode attention by itself on one GPU, without making a model: figures, or a sweep of its sizes.

    python scripts/bench_attention.py                      8, 16 and 64 threads; a JSON line each
    python scripts/bench_attention.py --sweep              16, 32 and 64 threads, about two minutes
    python scripts/bench_attention.py --sweep --threads 16 --head-dim 128

A sweep compiles its candidates in processes, all at once, checks each against float64 before
it is timed, then varies how the work is cut and merged for the sizes that won. What does not fit
the device is said and left out. Last it prints the lines to put into
`octopus_trl/kernels/_decode_tuning.py`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, fields, replace
from pathlib import Path

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
COMPILE_S = 90.0  # candidates that are not compiled by then are left out
# small, small_block, small_stages, large, large_block, large_stages, warps, programs.
SIZES = {
    256: [
        (16, 64, 3, 64, 32, 4, 4, 1),
        (16, 64, 3, 64, 32, 3, 4, 1),
        (16, 32, 3, 64, 32, 2, 4, 2),
        (16, 64, 2, 64, 32, 2, 4, 2),
        (16, 128, 2, 64, 32, 4, 4, 1),
        (16, 64, 3, 128, 32, 3, 8, 1),
        (16, 64, 3, 128, 64, 2, 8, 1),
        (16, 64, 3, 128, 32, 4, 8, 1),
    ],
    128: [
        (16, 64, 4, 128, 64, 3, 8, 1),
        (16, 128, 3, 128, 128, 2, 8, 1),
        (16, 64, 4, 64, 64, 4, 4, 1),
        (16, 64, 3, 64, 64, 2, 4, 2),
    ],
    64: [
        (16, 64, 4, 128, 64, 4, 8, 1),
        (16, 128, 3, 128, 128, 3, 8, 1),
        (16, 128, 3, 64, 128, 2, 4, 2),
        (16, 64, 4, 64, 64, 3, 4, 3),
    ],
}
SHARES = (1.0, 0.75, 0.34, 0.25)  # beside the table's
MERGES = ((32, 8), (64, 8))  # partials that the merge reads at once, its warps


def main() -> int:
    """Print figures; the exit status is 1 if a result was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--threads", type=int, nargs="+")
    parser.add_argument("--head-dim", type=int, default=256, choices=list(SIZES))
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--shared", type=int, default=SHARED)
    parser.add_argument("--own", type=int, default=OWN)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_attention.py needs a CUDA device", file=sys.stderr)
        return 2
    heads = (4 if asked.head_dim == 256 else 8) * asked.kv_heads
    shapes = [
        Shape(threads, asked.shared, asked.own, heads, asked.kv_heads, asked.head_dim)
        for threads in asked.threads or ([16, 32, 64] if asked.sweep else [8, 16, 64])
    ]
    if asked.sweep:
        return _sweep(shapes)
    for shape in shapes:
        case = Case(shape, torch.device("cuda"))
        case.check(case.ours)
        seconds = median_s(case.timer(case.ours), repeats=9) / CALLS
        record = case.line(seconds, H200).record()
        print(json.dumps({"bench": "attention", **record, **circumstances()}), flush=True)
        del case
        torch.cuda.empty_cache()
    return 0


def _sweep(shapes: Sequence[Shape]) -> int:
    sizes = [Tuning(*each) for each in SIZES[shapes[0].head_dim]]
    begin = time.perf_counter()
    ready = _compile_all(sizes, shapes[0])
    print(f"{len(ready)} compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    lines, wrong = [], 0
    for shape in shapes:
        limit = shape.limit_s(H200)
        print(f"\n{shape.threads} threads, limit {1e6 * limit:.1f} us at 4.8 TB/s and 600 TFLOP/s")
        found: dict[Tuning, float] = {}
        inputs = _case(shape, sizes[0], None)
        wrong += _measure_all(shape, sizes, inputs, ready, found)
        wrong += _measure_all(shape, list(_around(found)), inputs, ready, found)
        if found:
            best = min(found, key=found.__getitem__)
            lines.append(f"        {shape.threads}: {_line(best)},  # {1e6 * found[best]:.1f} us")
        del inputs
        torch.cuda.empty_cache()
    print(f"\n_TABLE[{shapes[0].head_dim}], rows at most:")
    print("\n".join(lines), flush=True)
    return int(wrong > 0)


def _measure_all(
    shape: Shape,
    tunings: Sequence[Tuning],
    inputs: Case,
    ready: set[Tuning],
    found: dict[Tuning, float],
) -> int:
    """Add seconds to `found`; gives how many were wrong."""
    wrong, limit = 0, shape.limit_s(H200)
    for tuning in tunings:
        if tuning in found or replace(tuning, share=0.5) not in ready:
            continue
        try:
            case = _case(shape, tuning, inputs)
            found[tuning], text = _measure(case, tuning)
        except Exception as error:  # noqa: BLE001 the other candidates still count
            wrong += 1
            print(f"  {_line(tuning)}: {type(error).__name__}: {str(error)[:200]}")
            continue
        seconds = found[tuning]
        print(f"  {1e6 * seconds:7.1f} us {limit / seconds:6.1%} {_line(tuning)} | {text}")
    return wrong


def _around(found: dict[Tuning, float]) -> Iterator[Tuning]:
    """Vary the cut, then the merge, of the two best sizes."""
    for best in sorted(found, key=found.__getitem__)[:2]:
        for share in SHARES:
            yield replace(best, share=share)
        for block, warps in MERGES:
            merge = replace(best, merge_block=block, merge_warps=warps)
            yield merge
            yield replace(merge, share=1.0)


def _case(shape: Shape, tuning: Tuning, inputs: Case | None) -> Case:
    """Plan for a tuning, with the inputs of another case."""
    given = None if inputs is None else (inputs.q, inputs.keys, inputs.values)
    return Case(shape, torch.device("cuda"), tuning=tuning, inputs=given)


def _measure(case: Case, tuning: Tuning) -> tuple[float, str]:
    def call() -> Tensor:
        return attend(case.q, case.keys, case.values, case.work, case.scale, tuning)

    case.check(call)
    seconds = median_s(case.timer(call), repeats=9) / CALLS
    one = case.lists.lists[0]
    partials = int(one.layout.views(one.packed)["bounds"][-1])
    return seconds, f"{one.num_items} items {partials} partials"


def _line(tuning: Tuning) -> str:
    """Write a tuning as it stands in the table: what differs from the defaults."""
    defaults = {field.name: field.default for field in fields(Tuning)}
    values = [
        f"{name}={value!r}" for name, value in asdict(tuning).items() if value != defaults[name]
    ]
    return f"Tuning({', '.join(values)})"


def _compile_all(sizes: Sequence[Tuning], shape: Shape) -> set[Tuning]:
    """Fill Triton's cache from many processes; gives the tunings that are there in time."""
    small = replace(shape, threads=1, shared=256, own=64)
    jobs = [
        [tuning, *(replace(tuning, merge_block=b, merge_warps=w) for b, w in MERGES)]
        for tuning in sizes
    ]
    ready: set[Tuning] = set()
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    pool = ProcessPoolExecutor(max_workers=os.cpu_count() or 1, mp_context=context)
    running = {pool.submit(_compile, job, small): job for job in jobs}
    try:
        for done in as_completed(running, timeout=COMPILE_S):
            if (reason := done.result()) is None:
                ready.update(running[done])
            else:
                print(f"  {_line(running[done][0])}: {reason}", flush=True)
    except TimeoutError:
        print(f"  {len(jobs)} jobs, some not compiled after {COMPILE_S:.0f} s", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)
    return ready


def _compile(tunings: Sequence[Tuning], shape: Shape) -> str | None:
    """Compile and run once; gives what went wrong."""
    try:
        for tuning in tunings:
            case = _case(shape, tuning, None)
            attend(case.q, case.keys, case.values, case.work, case.scale, tuning)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 the other candidates still count
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


if __name__ == "__main__":
    sys.exit(main())
