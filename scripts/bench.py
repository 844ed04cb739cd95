"""Measure ours against the alternative on the same work; one JSON line a case (DESIGN §8).

    python scripts/bench.py                      every case, printed
    python scripts/bench.py packed --keep        one case, added to data/bench/packed.jsonl

Each case checks its result before it measures. Runs on whatever device is there; figures of a CPU
say nothing of a GPU, so the line names the hardware.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from octopus_trl import Engine, Trace, prepare_model, score_traces
from octopus_trl.trace import Segment, ThreadRecord

ROOT = Path(__file__).parents[1]
REPEATS = 3
TRUNK, LENGTH = 256, 64  # tokens
PRIMITIVE_REPEATS = 200
PRIMITIVE_LIMIT_S = 1e-4  # DESIGN §8: p50 of fork, mount and rewind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("case", nargs="*", choices=[*CASES, []], help="default: every case")
    parser.add_argument("--keep", action="store_true", help="add the lines to data/bench/")
    asked = parser.parse_args()
    for name in asked.case or CASES:
        for line in CASES[name]():
            record = {"bench": name, **line, **circumstances()}
            text = json.dumps(record)
            print(text, flush=True)
            if asked.keep:
                path = ROOT / "data" / "bench" / f"{name}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8") as stream:
                    stream.write(text + "\n")


def bench_packed() -> Iterator[dict[str, Any]]:
    """Forward and backward of an episode in one packed row, against its branches as rows."""
    model = small_model()
    for branches in (3, 8):
        tree = fan(trunk=TRUNK, branches=branches, length=LENGTH, mounts=False)
        chains = leaf_chains(tree)
        with torch.no_grad():
            packed = score_traces(model, [tree])[0]
            apart = score_traces(model, chains)
        for leaf, chain in enumerate(apart, start=1):
            error = float((packed[leaf] - chain[1]).abs().max())
            if error > 1e-4:
                sys.exit(f"packed and separate log-probabilities differ by {error}")
        episode = fan(trunk=TRUNK, branches=branches, length=LENGTH, mounts=True)
        rows = leaf_chains(episode)
        ours = median_seconds(partial(backward, model, [episode]))
        theirs = median_seconds(partial(backward, model, rows))
        ratio = sum(sum(row.lengths) for row in rows) / sum(episode.lengths)
        yield {
            "case": f"{branches} branches of {LENGTH} on {TRUNK} tokens, each mounts its neighbour",
            "value": theirs / ours,
            "unit": "times faster",
            "limit": ratio,
            "share": theirs / ours / ratio,
            "baseline": {"name": "branches as separate rows, s", "value": theirs},
        }


def bench_primitives() -> Iterator[dict[str, Any]]:
    """Fork, mount and rewind at two context lengths; the baseline copies keys, values and state."""
    model = small_model()
    spec = model.octopus_spec
    for context in (1024, 8192):
        engine = Engine(model, page_size=16, num_pages=2 * context // 16 + 64, num_states=64)
        rng = np.random.default_rng(0)
        root = engine.open(rng.integers(0, spec.vocab_size, context).tolist())
        sibling = engine.extend(engine.fork(root), [1, 2, 3])
        engine.extend(sibling, rng.integers(0, spec.vocab_size, 64).tolist())
        kv = torch.zeros(len(spec.attention_layers), 2, context, spec.num_kv_heads, spec.head_dim)
        state = torch.zeros(len(spec.recurrent_layers), *spec.state_shape)
        copied = median_seconds(partial(copy, kv, state), repeats=20)

        def fork(engine: Engine = engine, root: Any = root) -> None:
            engine.close(engine.fork(root))

        def mount(engine: Engine = engine, root: Any = root, sibling: Any = sibling) -> None:
            reader = engine.fork(root)
            engine.mount(reader, sibling)
            engine.close(reader)

        def rewind(engine: Engine = engine, sibling: Any = sibling) -> None:
            reader = engine.fork(sibling)
            engine.rewind(reader, reader.num_tokens)
            engine.close(reader)

        for name, call in (("fork", fork), ("fork+mount", mount), ("fork+rewind", rewind)):
            before = engine.stats()["bytes_copied"]
            seconds = median_seconds(call, repeats=PRIMITIVE_REPEATS)
            if engine.stats()["bytes_copied"] != before:
                sys.exit(f"{name} copied bytes")
            yield {
                "case": f"{name} at {context} tokens",
                "value": seconds * 1e3,
                "unit": "ms, p50",
                "limit": PRIMITIVE_LIMIT_S * 1e3,
                "share": PRIMITIVE_LIMIT_S / seconds,
                "baseline": {"name": "copy of keys, values and states, ms", "value": copied * 1e3},
            }


CASES: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "packed": bench_packed,
    "primitives": bench_primitives,
}


def small_model() -> Any:
    """The shipped policy's shape with random weights, on the device there is."""
    settings = json.loads((ROOT / "recipes/tiny-hybrid/model.json").read_text())
    settings.pop("model_type")
    torch.manual_seed(0)
    model = prepare_model(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings)))
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def fan(*, trunk: int, branches: int, length: int, mounts: bool) -> Trace:
    """A trunk and its branches, each an action behind one tool token that mounts the branch
    before.
    """
    rng = np.random.default_rng(0)
    segments = [Segment(0, 0, None, "prompt", rng.integers(0, 1000, trunk).tolist())]
    threads = [ThreadRecord(0, None, head=0)]
    for branch in range(1, branches + 1):
        tokens = rng.integers(0, 1000, length).tolist()
        edge = [branch - 1] if mounts and branch > 1 else []
        segments.append(Segment(branch, branch, 0, "tool", tokens, edge))
        threads.append(ThreadRecord(branch, 0, head=branch))
    return Trace("fan", "fan", segments=segments, threads=threads).place()


def leaf_chains(trace: Trace) -> list[Trace]:
    """Each branch as its own row; what it mounted goes before it as text without loss."""
    rows = []
    for segment in trace.segments[1:]:
        read = [token for mount in segment.mounts for token in trace.segments[mount].tokens]
        prefix = trace.segments[0].tokens + read
        # A root of kind tool is not shared between traces, so the prefix is really computed again.
        parts = [Segment(0, 0, None, "tool", prefix), Segment(1, 0, 0, "tool", segment.tokens)]
        threads = [ThreadRecord(0, None, head=1)]
        rows.append(Trace(f"row {segment.id}", "fan", segments=parts, threads=threads).place())
    return rows


def copy(*tensors: torch.Tensor) -> None:
    """Copy tensors, as a fork without sharing would."""
    for tensor in tensors:
        tensor.clone()


def backward(model: Any, traces: list[Trace]) -> None:
    """Score the last segment of each branch and take the gradient."""
    scores = score_traces(model, traces)
    leaves = scores[0][1:] if len(traces) == 1 else [score[1] for score in scores]
    torch.cat(leaves).mean().backward()
    model.zero_grad(set_to_none=True)


def median_seconds(call: Callable[[], Any], *, repeats: int = REPEATS) -> float:
    """Median wall-clock time of a call, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        synchronise()
        begin = time.perf_counter()
        call()
        synchronise()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def synchronise() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def circumstances() -> dict[str, Any]:
    """Hardware, versions, date and commit of a line."""
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    cuda = torch.cuda.is_available()
    hardware = torch.cuda.get_device_name() if cuda else f"CPU {platform.machine()}"
    return {
        "hardware": f"{hardware}, {torch.get_num_threads()} threads",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d"),
        "commit": done.stdout.strip() or None,
    }


if __name__ == "__main__":
    main()
