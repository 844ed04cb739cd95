"""Time decode steps of an engine, and say where the time of one goes.

    python scripts/profile_step.py --model qwen3.5-4b --rows 16 --shared 32768 --own 4096 --profile

Prints one JSON line: milliseconds a step on the clock, of the host before it waits, of a captured
step alone, and tokens/s. `--profile` adds a table of the kernels of a few steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from bench_cases.models import build  # type: ignore[import-not-found]

from octopus_trl import Cursor, Engine, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="tiny or qwen3.5-4b, random weights")
    parser.add_argument("--rows", type=int, default=16, help="threads that decode")
    parser.add_argument("--shared", type=int, default=256, help="tokens that all of them see")
    parser.add_argument("--own", type=int, default=32, help="own tokens of each")
    parser.add_argument("--steps", type=int, default=50, help="timed steps")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters on all projections")
    parser.add_argument("--merge", action="store_true", help="adapters merged")
    parser.add_argument("--eager", action="store_true", help="operation by operation, no graph")
    parser.add_argument("--own-forward", action="store_true", help="the model's own forward")
    parser.add_argument("--exact", action="store_true", help="fixed width, independent rows")
    parser.add_argument("--profile", action="store_true", help="table of a few steps")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, text = build(asked.model, device)
    print(text, file=sys.stderr, flush=True)
    if asked.lora:
        model = adapted(model, asked.lora)
    engine = engine_of(model, asked)
    begin = time.perf_counter()
    cursors = threads(engine, asked)
    synchronize(device)
    prefill_s = time.perf_counter() - begin
    length = asked.steps + 40
    for seed, cursor in enumerate(cursors):
        engine.submit(cursor, [], SamplingParams(max_tokens=length, seed=seed), until=())
    for _ in range(10):
        engine.step()
    synchronize(device)
    waited, begin = engine.stats()["seconds"].get("wait", 0.0), time.perf_counter()
    for _ in range(asked.steps):
        engine.step()
    synchronize(device)
    total_s = time.perf_counter() - begin
    wait_s = engine.stats()["seconds"].get("wait", 0.0) - waited
    line: dict[str, Any] = {
        **vars(asked),
        "prefill_tok_s": round((asked.shared + asked.rows * asked.own) / prefill_s),
        "step_ms": round(1e3 * total_s / asked.steps, 3),
        "host_ms": round(1e3 * (total_s - wait_s) / asked.steps, 3),
        "device_ms": device_ms(engine, asked.steps),
        "tok_s": round(asked.rows * asked.steps / total_s, 1),
        "capture_s": round(engine.stats()["seconds"].get("capture", 0.0), 2),
    }
    print(json.dumps(line), flush=True)
    if asked.profile:
        profile(engine, device)


def adapted(model: Any, rank: int) -> Any:
    """Put adapters on every projection of the layers."""
    from peft import LoraConfig, get_peft_model

    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules() if "proj" in name}
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=sorted(names))
    return get_peft_model(model, config, autocast_adapter_dtype=False).eval()


def engine_of(model: Any, asked: argparse.Namespace) -> Engine:
    """Make an engine with room for all threads."""
    page_size = 16
    tokens = asked.shared + asked.rows * (asked.own + asked.steps + 64)
    engine = Engine(
        model,
        page_size=page_size,
        num_pages=tokens // page_size + 4 * asked.rows + 64,
        num_states=3 * asked.rows + 32,
        decode_width=asked.rows if asked.exact else None,
        fused=False if asked.own_forward else None,
        merge_adapters=asked.merge,
    )
    if asked.eager and engine._paths.passes is not None:
        engine._paths.passes.steps.capture = engine._paths.passes.prefill.capture = False
    return engine


def threads(engine: Engine, asked: argparse.Namespace) -> list[Cursor]:
    """Open the shared text and fork the threads, each with own tokens."""
    draws = torch.Generator().manual_seed(0)

    def text(length: int) -> list[int]:
        return torch.randint(engine.spec.vocab_size, (length,), generator=draws).tolist()

    root = engine.open(text(asked.shared))
    return [engine.extend(engine.fork(root), text(asked.own)) for _ in range(asked.rows)]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def device_ms(engine: Engine, repeats: int) -> float | None:
    """Time replays of the captured step that ran last, none where no graph was captured.

    The replays draw from stale buffers; the engine's turns are of no use after this.
    """
    passes = engine._paths.passes
    graphs = {} if passes is None else passes.steps._graphs
    steps = [graph for (kind, _, _), graph in graphs.items() if kind == "feed"]
    if not steps:
        return None
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    steps[-1].replay()
    begin.record()
    for _ in range(repeats):
        steps[-1].replay()
    end.record()
    torch.cuda.synchronize()
    return round(begin.elapsed_time(end) / repeats, 3)


def profile(engine: Engine, device: torch.device) -> None:
    """Print the kernels of three steps, most expensive first."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(3):
            engine.step()
        synchronize(device)
    by = "cuda_time_total" if device.type == "cuda" else "cpu_time_total"
    print(seen.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=90))


if __name__ == "__main__":
    main()
