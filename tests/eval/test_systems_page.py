"""docs/systems.md is what its command writes from the records, figure by figure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octopus_trl.errors import ConfigError
from octopus_trl.eval.systems_page import FILE, load_lines, page

ROOT = Path(__file__).parents[2]


def line(reading: str, seed: int = 0, **figures: tuple[float, float, float]) -> dict[str, Any]:
    shown = {
        name: {"value": value, "interval_95": [low, high], "n": 9}
        for name, (value, low, high) in figures.items()
    }
    return {
        "kind": "probes",
        "model": "m",
        "mount_layers": [0, 1, 2, 5],
        "probes": "station",
        "seed": seed,
        "n": 9,
        "reading": reading,
        "figures": shown,
        "command": "python scripts/mechanism.py probes",
        "hardware": "CPU",
        "date": "2026-12-01",
        "commit": "abc1234",
    }


def episodes(name: str, accuracy: float) -> dict[str, Any]:
    bounds = (accuracy, 0.1, 0.9)
    one = line("none", accuracy=bounds, mounts=bounds, hijack=bounds)
    del one["reading"], one["probes"], one["mount_layers"]
    return {**one, "kind": "episodes", "name": name}


def test_the_page_in_the_repository_is_what_the_command_writes() -> None:
    written = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
    assert written == page(load_lines(ROOT / "data" / "records")), (
        "run: python scripts/mechanism.py table --write"
    )


def test_every_figure_stands_with_interval_n_command_and_the_papers_own() -> None:
    text = page([line("mount", drift=(0.5, 0.25, 0.75)), line("transcript", drift=(0.1, 0.0, 0.2))])
    assert "+0.500 (+0.250 to +0.750); paper +0.007" in text
    assert "layers 0–2, 5 mount" in text
    assert "n = 9: `python scripts/mechanism.py probes` (CPU, 2026-12-01, abc1234)" in text


@pytest.mark.parametrize(
    ("mount", "verdict"),
    [((0.1, 0.0, 0.2), "**holds**"), ((0.9, 0.8, 1.0), "**reversed**"), ((0.4, 0.1, 0.6), "open")],
)
def test_an_order_of_the_paper_is_judged_by_disjoint_intervals(
    mount: tuple[float, float, float], verdict: str
) -> None:
    text = page([line("mount", drift=mount), line("transcript", drift=(0.5, 0.3, 0.7))])
    (row,) = [row for row in text.splitlines() if "moves the reader less" in row]
    assert row.endswith(f"| {verdict} |")


def test_settings_stand_in_the_pages_order_whatever_the_files() -> None:
    text = page([episodes("no-fork", 0.5), episodes("mount-jump", 0.25)])
    assert text.index("| `mount-jump` |") < text.index("| `no-fork` |")
    assert "25.0% (10.0% to 90.0%)" in text


def test_a_measurement_made_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    lines = [line("mount", drift=(float(n), 0.0, 9.0)) for n in (1, 2)]
    lines.append(line("mount", seed=1, drift=(3.0, 0.0, 9.0)))
    (tmp_path / FILE).write_text("".join(json.dumps(each) + "\n" for each in lines))
    kept = load_lines(tmp_path)
    assert [each["figures"]["drift"]["value"] for each in kept] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{", "1: is no line"), ('{"kind": "guess"}', "kind 'guess'"), ("", "no mechanism.jsonl")],
)
def test_broken_and_missing_records_are_one_error(
    tmp_path: Path, content: str, reason: str
) -> None:
    (tmp_path / (FILE if content else "other.jsonl")).write_text(content)
    with pytest.raises(ConfigError, match=reason):
        load_lines(tmp_path)
