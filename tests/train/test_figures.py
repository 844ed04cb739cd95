"""Which lines of the benchmark a plan reckons with."""

from __future__ import annotations

import json
from pathlib import Path

from octopus_trl.train.figures import update_figure


def test_a_row_that_compiled_while_it_was_timed_is_no_figure(tmp_path: Path) -> None:
    def line(case: str, value: float) -> str:
        hardware = "NVIDIA H200, 1 threads"
        record = {"case": case, "value": value, "unit": "unique tokens/s"}
        return json.dumps({**record, "hardware": hardware, "date": "2026-12-01"}) + "\n"

    path = tmp_path / "train.jsonl"
    path.write_text(line("update of a mix", 9.0) + line("9 tokens in one row, first call", 1.0))
    assert update_figure("H200", tmp_path).value == 9.0
    path.write_text(path.read_text() + line("9 tokens in one row", 7.0))
    assert update_figure("H200", tmp_path).value == 7.0
