"""Speeds that were measured, for a plan: lines of `data/bench/`, or none.

A figure counts only on the card that it was measured on and for the shapes that it was measured
with; nothing is scaled from another card or model.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[2] / "data" / "bench"
_THREADS = re.compile(r"\b(\d+) threads\b")


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured rate in tokens/s, and where it comes from; value None where nothing was measured.

    Attributes:
        source: file, line, case, hardware and date; or what is missing.
    """

    value: float | None
    source: str


def decode_figure(card: str, threads: int, folder: Path = BENCH) -> Figure:
    """Give the decode rate of the most threads measured, up to `threads`, else of the fewest."""
    lines = _lines(folder, "decode", card, ("tok/s", "tokens/s"))
    counted = [
        (int(found[1]), number, line)
        for number, line in lines
        if (found := _THREADS.search(line["case"])) and "continuous batching" not in line["case"]
    ]
    if not counted:
        return _none("decode", card)
    fewest = min(entry[0] for entry in counted)
    usable = [entry for entry in counted if entry[0] <= max(threads, fewest)]
    _, number, line = max(usable, key=lambda entry: entry[:2])  # the newest of the widest
    return _figure("decode", number, line)


def prefill_figure(card: str, folder: Path = BENCH) -> Figure:
    """Give the newest prefill rate."""
    lines = _lines(folder, "prefill", card, ("tok/s", "tokens/s"))
    return _figure("prefill", *lines[-1]) if lines else _none("prefill", card)


def update_figure(card: str, folder: Path = BENCH) -> Figure:
    """Give the newest rate of an update, in unique packed tokens/s; the longest row's if it is
    there and was not timed at its first call, which compiles.
    """
    lines = _lines(folder, "train", card, ("unique tokens/s",))
    lines = [entry for entry in lines if not entry[1]["case"].endswith("first call")]
    rows = [entry for entry in lines if "in one row" in entry[1]["case"]]
    best = rows or lines
    return _figure("train", *best[-1]) if best else _none("train", card)


def _lines(
    folder: Path, name: str, card: str, units: tuple[str, ...]
) -> list[tuple[int, dict[str, Any]]]:
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        return []
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        line = json.loads(text)
        if line["value"] is not None and line["unit"] in units and card in line["hardware"]:
            found.append((number, line))
    return found


def _figure(name: str, number: int, line: dict[str, Any]) -> Figure:
    where = f"data/bench/{name}.jsonl line {number}"
    case = line["case"].partition(" (")[0]
    text = f"{line['value']:,.0f} {line['unit']}: {where}, {case}; {line['hardware']}"
    return Figure(float(line["value"]), f"{text}, {line['date']}")


def _none(name: str, card: str) -> Figure:
    return Figure(None, f"no figure: data/bench/{name}.jsonl has no such line measured on {card}")
