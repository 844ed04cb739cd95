"""Trainer checkpoints that are whole or absent.

A checkpoint is written under `.writing/`, gets a manifest of its files last, and is then renamed
into place; so a folder `checkpoint-N` without a fitting manifest is what an interrupted copy or an
older tool left, and is never resumed from.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from octopus_trl.errors import ConfigError
from octopus_trl.files import write_whole

STAGING = ".writing"
OLDER, DOOMED = ".older", ".doomed"  # endings under the staging place: to replace, to remove
MANIFEST = "octopus.json"
SCHEMA = 1
_NAME = re.compile(r"checkpoint-(\d+)")


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """Find the newest whole checkpoint of a run; half-written ones are passed over."""
    found = _whole_ones(output_dir)
    return found[-1][1] if found else None


def missing_part(folder: str | Path) -> str | None:
    """Say what a checkpoint lacks, or None where it is whole."""
    path = Path(folder)
    if not path.is_dir():
        return "there is no such folder"
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"its {MANIFEST} is missing or unreadable"
    for name, size in sorted(files.items()):
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is missing or not {size} bytes long"
    return None


def resolve(resume: str | bool | None, output_dir: str | Path) -> str | None:
    """Turn `resume_from_checkpoint` into the folder of a whole checkpoint, None for a fresh start.

    Raises:
        ConfigError: none is whole, or the one that is named is not.
    """
    if isinstance(resume, str) and resume.strip().lower() in ("true", "false"):
        resume = resume.strip().lower() == "true"
    if resume is None or resume is False:
        return None
    if resume is True:
        last = last_checkpoint(output_dir)
        if last is None:
            raise ConfigError(
                f"resume_from_checkpoint=true: no whole checkpoint under {output_dir}; leave it "
                "out to start afresh, or give the folder of one"
            )
        return str(last)
    missing = missing_part(resume)
    if missing is not None:
        last = last_checkpoint(Path(resume).parent)
        hint = f"resume from {last}" if last else "leave it out to start afresh"
        raise ConfigError(f"resume_from_checkpoint={resume}: {missing}; {hint}")
    return resume


def publish(staged: Path, final: Path, *, facts: dict[str, Any]) -> None:
    """Close a staged checkpoint with its manifest and move it into place in one step.

    Its files are on the disk before it appears, so that a machine that loses power leaves no
    checkpoint of the right sizes with nothing in it.

    Args:
        facts: kept in the manifest beside the list of files.
    """
    files = {}
    for path in sorted(staged.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            _settle(path)
            files[str(path.relative_to(staged))] = path.stat().st_size
    manifest = {"schema": SCHEMA, **facts, "files": files}
    write_whole(staged / MANIFEST, json.dumps(manifest, indent=1))
    if final.exists():
        older = staged.with_name(f"{final.name}{OLDER}")
        shutil.rmtree(older, ignore_errors=True)
        final.rename(older)
        staged.rename(final)
        shutil.rmtree(older, ignore_errors=True)
    else:
        staged.rename(final)
    _settle(final.parent)


def rotate(output_dir: str | Path, keep: int | None, *, newest: Path, best: str | None) -> None:
    """Remove the oldest whole checkpoints until `keep` are left, counting `newest` and `best`.

    A folder goes to the staging place before its files go, so that an interrupted removal leaves
    nothing that looks like a checkpoint. Folders that are not whole are not ours to remove.

    Args:
        keep: at least 1 is kept; None keeps all.
        newest: just written; never removed, whatever numbers an earlier run has left.
        best: what `load_best_model_at_end` will load; never removed.
    """
    if keep is None or keep < 1:
        return
    safe = {newest.resolve(), *([Path(best).resolve()] if best else [])}
    whole = [folder for _, folder in _whole_ones(output_dir)]
    spare = [folder for folder in whole if folder.resolve() not in safe]
    surplus = len(whole) - max(keep, len(safe))
    for folder in spare[: max(surplus, 0)]:
        doomed = Path(output_dir) / STAGING / f"{folder.name}{DOOMED}"
        doomed.parent.mkdir(exist_ok=True)
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def clear_staging(output_dir: str | Path) -> None:
    """Remove what an interrupted save left behind; put back what it was about to replace."""
    staging = Path(output_dir) / STAGING
    for older in staging.glob(f"*{OLDER}"):
        place = Path(output_dir) / older.name.removesuffix(OLDER)
        if not place.exists() and missing_part(older) is None:
            older.rename(place)
    shutil.rmtree(staging, ignore_errors=True)


def read_facts(folder: str | Path) -> dict[str, Any]:
    """Read the facts that `publish` kept."""
    manifest: dict[str, Any] = json.loads((Path(folder) / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def save_rank_state(folder: str | Path, rank: int, state: dict[str, Any]) -> None:
    """Write what one rank must know to go on; plain containers and tensors only."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(state, Path(folder) / f"octopus_state_{rank}.pt")


def load_rank_state(folder: str | Path, rank: int) -> dict[str, Any]:
    """Read what `save_rank_state` wrote.

    Raises:
        ConfigError: there is none for this rank.
    """
    path = Path(folder) / f"octopus_state_{rank}.pt"
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing: the checkpoint was written by another number of processes; "
            "launch as many as its octopus.json says"
        )
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _whole_ones(output_dir: str | Path) -> list[tuple[int, Path]]:
    """List the whole checkpoints of a run with their steps, ascending."""
    found = []
    for folder in Path(output_dir).glob("checkpoint-*"):
        match = _NAME.fullmatch(folder.name)
        if match and folder.is_dir() and missing_part(folder) is None:
            found.append((int(match[1]), folder))
    return sorted(found)


def _settle(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
