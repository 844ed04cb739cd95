"""Print what episodes did: branching, reading, tokens explored, accuracy by hops and length.

python scripts/stats.py runs/eval-late/traces.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from octopus_trl.errors import ConfigError
from octopus_trl.eval.trace_statistics import statistics_of
from octopus_trl.report.ending import ending
from octopus_trl.trace import Trace
from octopus_trl.trace_files import read_traces

# key -> (what it is, format); the docstrings of octopus_trl/eval/trace_statistics.py define each.
ROWS = {
    "n": ("episodes", "{:,}"),
    "fork_on_first_turn": ("fork on the first turn", "{:.1%}"),
    "reads": ("pages read an episode", "{:.2f}"),
    "reads_by_children": ("  by children", "{:.1%}"),
    "rewinds": ("rewinds an episode", "{:.2f}"),
    "rewinds_by_children": ("  by children", "{:.1%}"),
    "mounts": ("mounts an episode", "{:.2f}"),
    "mounts_ahead": ("  of threads that are ahead", "{:.1%}"),
    "owned": ("sampled tokens an episode", "{:,.0f}"),
    "active_prompt": ("active prompt a turn, tokens", "{:,.0f}"),
    "explored": ("explored tokens an episode", "{:,.0f}"),
    "surviving": ("  surviving rewinds", "{:,.0f}"),
    "critical_path": ("critical path, tokens", "{:,.0f}"),
    "parallelism": ("serial length over critical path", "{:.2f}"),
    "gold_recall": ("gold documents opened", "{:.1%}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, nargs="+", help="files, or folders of *.jsonl")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    asked = parser.parse_args()
    figures = statistics_of(trace for path in asked.traces for trace in traces_in(path))
    if asked.json:
        print(json.dumps(figures))
    else:
        Console(highlight=False).print(table_of(figures))


def traces_in(path: Path) -> Iterator[Trace]:
    """Read a file of traces, or every one of a folder.

    Raises:
        ConfigError: there is none.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"{path}: no traces there; give traces.jsonl or a run's traces folder")
    for file in files:
        yield from read_traces(file)


def table_of(figures: dict[str, Any]) -> Table:
    """Lay the figures out, a row each."""
    table = Table(title="episodes")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("95 % interval", justify="right")
    for key, (name, form) in ROWS.items():
        value, interval = figures[key], figures["intervals"].get(key)
        between = "" if interval is None else " to ".join(map(form.format, interval))
        table.add_row(name, "–" if value is None else form.format(value), between)
    for key, name in (("accuracy_by_hops", "{} hops"), ("accuracy_by_length", "from {:,} tokens")):
        for group, num, accuracy, (low, high) in figures[key]:
            label = f"right, {name.format(group)}, n = {num}"
            table.add_row(label, f"{accuracy:.1%}", f"{low:.1%} to {high:.1%}")
    return table


if __name__ == "__main__":
    with ending(disk="the figures are not whole"):
        main()
