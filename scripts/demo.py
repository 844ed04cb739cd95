"""Run the first steps of the CPU recipe and show what happened: `make demo`.

It launches exactly what the README tells a user to launch, on the small policy that ships, and ends
with a table of the run, one episode drawn as a tree, and the path of all traces.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octopus_trl.report.ending import ending, importing

with importing():
    from rich.console import Console
    from rich.table import Table
    from rich.tree import Tree

    from octopus_trl.trace import Trace
    from octopus_trl.train.records import read_generations

ROOT = Path(__file__).parents[1]
RECIPE = "recipes/tiny-hybrid/grpo/config_cpu.yaml"
LAUNCH = "accelerate_configs/cpu.yaml"
# log key -> (what it is, format)
ROWS = {
    "reward": ("reward, mean over episodes", "{:.2f}"),
    "episode/forks": ("forks an episode", "{:.1f}"),
    "episode/mounts": ("mounts an episode", "{:.1f}"),
    "episode/rewinds": ("rewinds an episode", "{:.2f}"),
    "pages": ("pages shared an episode, copied by nobody", "{:.0f}"),
    "packing/dedup_ratio": ("tokens that one packed token stands for", "{:.2f}"),
    "engine/re_prefilled": ("prefix tokens prefilled again", "{:.0f}"),
    "engine/bytes_copied": ("bytes copied by fork, mount and rewind", "{:.0f}"),
    "rollout_kl/mean": ("KL between rollout and training", "{:.1e}"),
    "rollout_kl/mounted": ("  of tokens that read a mount", "{:.1e}"),
    "time/generate_s": ("seconds to generate", "{:.1f}"),
    "time/train_s": ("seconds to train", "{:.1f}"),
}


def main() -> int:
    """Launch the recipe, then draw what it left behind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps")
    options, extra = parser.parse_known_args()
    stamp = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S")
    folder = ROOT / "runs" / f"demo-{stamp}"
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--quiet"),
        *("--config_file", LAUNCH),
        *("scripts/train.py", "--config", RECIPE),
        *("--max_steps", str(options.steps), "--output_dir", str(folder), *extra),
    ]
    console = Console(highlight=False)
    console.print(
        f"accelerate launch --config_file {LAUNCH} scripts/train.py --config {RECIPE} "
        f"--max_steps {options.steps}",
        soft_wrap=True,
    )
    # Where cores are shared, OpenMP threads that spin for work take it from each other.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        return done.returncode
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    steps = [entry for entry in state["log_history"] if "reward" in entry]
    traces = read_generations(folder)
    console.print(table_of(steps, page_size()))
    console.print(tree_of(max(traces, key=lambda trace: (trace.reward or 0.0, liveliness(trace)))))
    console.print(f"{len(traces)} episodes in {folder / 'traces'}", soft_wrap=True)
    return 0


def page_size() -> int:
    """Read the page size that the run was launched with."""
    import yaml

    recipe = yaml.safe_load((ROOT / RECIPE).read_text(encoding="utf-8"))
    return int(recipe["page_size"])


def table_of(steps: list[Mapping[str, Any]], tokens_a_page: int) -> Table:
    """Lay the figures of each step side by side."""
    table = Table(title="GRPO over tree episodes")
    table.add_column("")
    for entry in steps:
        table.add_column(f"step {entry['step']}", justify="right")
    for key, (name, form) in ROWS.items():
        cells = []
        for entry in steps:
            value = entry.get(key)
            if key == "pages":
                value = entry["packing/shared_tokens"] / tokens_a_page
            cells.append("–" if value is None else form.format(value))
        table.add_row(name, *cells)
    return table


def liveliness(trace: Trace) -> int:
    """Count the mounts and rewinds of an episode."""
    return sum(event.get("type") in ("read", "rewind") for event in trace.events)


def tree_of(trace: Trace) -> Tree:
    """Draw the threads of an episode with the calls of each turn."""
    drawn: dict[int, Tree] = {}
    reward = "none" if trace.reward is None else f"{trace.reward:g}"
    top = Tree(f"episode {trace.episode_id}, reward {reward}: {trace.meta.get('question')}")
    for thread in trace.threads:
        above = top if thread.parent is None else drawn.get(thread.parent, top)
        task = f": {thread.task}" if thread.task else ""
        drawn[thread.id] = above.add(f"thread {thread.id} ({thread.status}){task}")
        for line in turns_of(trace, thread.id):
            drawn[thread.id].add(line)
    return top


def turns_of(trace: Trace, thread: int) -> list[str]:
    """Name the calls of each turn of a thread, with what a read mounted and a commit said."""
    lines: list[str] = []
    notes: list[str] = []
    for event in trace.events:
        if event.get("thread") != thread:
            continue
        kind = event.get("type")
        if kind == "read":
            notes.append(f"mounts {event['tokens']} tokens of thread {event['target']}")
        elif kind == "rewind":
            notes.append(f"back to turn {event['to']}")
        elif kind == "end" and event.get("result"):
            notes.append(f"result {event['result']}")
        elif kind == "turn":
            calls = ", ".join(
                name if outcome == "ok" else f"{name} ({outcome})"
                for name, outcome in event.get("calls", [])
            )
            lines.append("; ".join([calls or "no call", *notes]))
            notes = []
    if notes:
        lines.append("; ".join(notes))
    return lines


if __name__ == "__main__":
    with ending():
        sys.exit(main())
