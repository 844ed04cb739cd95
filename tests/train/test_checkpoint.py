"""Checkpoints are whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from octopus_trl.errors import ConfigError
from octopus_trl.train.checkpoint import (
    MANIFEST,
    STAGING,
    clear_staging,
    last_checkpoint,
    load_rank_state,
    missing_part,
    publish,
    resolve,
    rotate,
    save_rank_state,
)


def write(run: Path, step: int, text: str = "weights") -> Path:
    staged = run / STAGING / f"checkpoint-{step}"
    staged.mkdir(parents=True)
    (staged / "model.bin").write_text(text)
    (staged / "deep").mkdir()
    (staged / "deep" / "state.bin").write_text("state")
    publish(staged, run / f"checkpoint-{step}", facts={"global_step": step, "world_size": 1})
    return run / f"checkpoint-{step}"


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step in (9, 10, 2):
        write(tmp_path, step)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert resolve(True, tmp_path) == str(tmp_path / "checkpoint-10")
    assert resolve("true", tmp_path) == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize("harm", ["cut", "gone", "no manifest", "half a manifest", "empty"])
def test_a_half_written_checkpoint_is_passed_over_and_refused_by_name(
    tmp_path: Path, harm: str
) -> None:
    write(tmp_path, 1)
    broken = write(tmp_path, 2)
    if harm == "cut":
        (broken / "model.bin").write_text("weig")
    elif harm == "gone":
        (broken / "deep" / "state.bin").unlink()
    elif harm == "no manifest":
        (broken / MANIFEST).unlink()
    elif harm == "half a manifest":
        (broken / MANIFEST).write_text('{"files": {')
    else:
        for path in sorted(broken.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-1"
    with pytest.raises(ConfigError, match="resume from .*checkpoint-1"):
        resolve(str(broken), tmp_path)


def test_nothing_to_resume_from_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no whole checkpoint under"):
        resolve(True, tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        resolve(str(tmp_path / "checkpoint-3"), tmp_path)


@pytest.mark.parametrize("value", [None, False, "false"])
def test_a_fresh_start_resumes_from_nothing(tmp_path: Path, value: object) -> None:
    write(tmp_path, 1)
    assert resolve(value, tmp_path) is None  # type: ignore[arg-type]


def test_a_checkpoint_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    write(tmp_path, 1, "old")
    folder = write(tmp_path, 1, "new weights")
    assert (folder / "model.bin").read_text() == "new weights"
    assert missing_part(folder) is None
    assert not list((tmp_path / STAGING).iterdir())


def test_what_an_interrupted_save_left_is_cleared_and_never_found(tmp_path: Path) -> None:
    half = tmp_path / STAGING / "checkpoint-5"
    half.mkdir(parents=True)
    (half / "model.bin").write_text("w")
    assert last_checkpoint(tmp_path) is None
    clear_staging(tmp_path)
    assert not half.exists()


def test_the_state_of_a_rank_that_was_not_there_is_refused(tmp_path: Path) -> None:
    save_rank_state(tmp_path, 0, {"step": 3})
    assert load_rank_state(tmp_path, 0) == {"step": 3}
    with pytest.raises(ConfigError, match="octopus_state_1.pt is missing"):
        load_rank_state(tmp_path, 1)


def test_rotation_keeps_the_newest_and_the_best_and_touches_nothing_that_is_not_whole(
    tmp_path: Path,
) -> None:
    folders = [write(tmp_path, step) for step in (1, 2, 3, 4, 10)]
    (folders[1] / MANIFEST).unlink()
    rotate(tmp_path, 2, newest=folders[-1], best=str(folders[0]))
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-10", "checkpoint-2"]
    rotate(tmp_path, None, newest=folders[-1], best=None)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-10", "checkpoint-2"]


def test_rotation_never_removes_what_was_just_written_below_an_older_run(tmp_path: Path) -> None:
    older, newest = write(tmp_path, 9), write(tmp_path, 4)
    rotate(tmp_path, 1, newest=newest, best=None)
    assert (older.exists(), newest.exists()) == (False, True)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("checkpoint-*"))
