"""Reports of runs: what is read, what is drawn, what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from octopus_trl.errors import ConfigError
from octopus_trl.report.curves import PANELS, TABLE, write_report
from octopus_trl.report.runs import STATE, read_run, smooth

METRICS = Path(__file__).parents[2] / "docs" / "metrics.md"  # a test of the trainer keeps it true


def leave_log(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE).write_text(json.dumps({"log_history": rows}))
    return folder


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "loss": 0.0,
            "reward": step / count,
            "rollout_kl/mean": 0.0 if step % 2 else 1,
        }
        for step in range(1, count + 1)
    ]


def test_a_run_is_read_in_step_order_without_evaluation_and_summary_rows(tmp_path: Path) -> None:
    logged: list[dict[str, Any]] = [
        *rows(3)[::-1],
        {"step": 3, "train_runtime": 1.0},
        {"step": 2, "eval_reward": 1.0},
    ]
    run = read_run(leave_log(tmp_path / "r", logged))
    assert run.name == "r"
    assert run.series("reward") == ([1, 2, 3], [1 / 3, 2 / 3, 1.0])


def test_the_latest_checkpoint_speaks_for_a_run_that_goes_on(tmp_path: Path) -> None:
    leave_log(tmp_path / "checkpoint-9", rows(9))
    leave_log(tmp_path / "checkpoint-10", rows(10))
    assert len(read_run(tmp_path).rows) == 10


def test_values_that_are_no_numbers_are_no_points(tmp_path: Path) -> None:
    logged: list[dict[str, Any]] = [
        {"step": 1, "reward": float("nan")},
        {"step": 2, "reward": 0.5},
        {"step": 3, "loss": 0},
    ]
    assert read_run(leave_log(tmp_path, logged)).series("reward") == ([2], [0.5])


def test_the_mean_moves_over_what_came_before() -> None:
    assert smooth([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 1.5, 2.5, 3.5]


def test_every_figure_that_is_drawn_is_one_that_the_trainer_logs() -> None:
    logged = {line.split("`")[1] for line in METRICS.read_text().splitlines() if line[:3] == "| `"}
    drawn = {key for _, lines in PANELS for key, _ in lines} | set(TABLE)
    assert drawn <= logged, drawn - logged


def test_png_and_page_hold_every_run(tmp_path: Path) -> None:
    runs = [read_run(leave_log(tmp_path / name, rows(7))) for name in ("one", "<two>")]
    png, page = write_report(runs, tmp_path / "out", window=3)
    head = png.read_bytes()[:24]
    width, height = struct.unpack(">II", head[16:24])
    assert head.startswith(b"\x89PNG")
    assert width > 1000
    assert height > 500
    text = page.read_text()
    assert "&lt;two&gt;" in text
    assert "<two>" not in text
    ends = "<td>0.2857</td><td>0.8571</td>"  # of 1/7, 2/7, 3/7 and of 5/7, 6/7, 7/7
    assert f"<tr><th>reward</th>{ends}{ends}</tr>" in text
    assert '<th colspan="2">one, 7 steps</th>' in text
    assert "<tr><th>grad_norm</th><td>–</td><td>–</td>" in text
    assert "http" not in text


@pytest.mark.parametrize("content", ['{"log_history": [{"lo', '{"log_history": 3}', "{}"])
def test_a_cut_log_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / STATE).write_text(content)
    with pytest.raises(ConfigError, match=STATE):
        read_run(tmp_path)


def test_folders_without_a_log_or_a_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="output_dir"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="logging_steps"):
        read_run(leave_log(tmp_path, []))
    with pytest.raises(ConfigError, match="at least one run"):
        write_report([], tmp_path)


def test_a_place_that_cannot_be_written_is_named_and_nothing_half_is_left(tmp_path: Path) -> None:
    run = read_run(leave_log(tmp_path / "r", rows(3)))
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match=r"curves\.png: cannot be written .* another path"):
        write_report([run], tmp_path / "file")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "r"]
