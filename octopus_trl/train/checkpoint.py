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

STAGING = ".writing"
MANIFEST = "octopus.json"
SCHEMA = 1
_NAME = re.compile(r"checkpoint-(\d+)")


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """Find the newest whole checkpoint of a run; half-written ones are passed over."""
    found = []
    for folder in Path(output_dir).glob("checkpoint-*"):
        match = _NAME.fullmatch(folder.name)
        if match and folder.is_dir() and missing_part(folder) is None:
            found.append((int(match[1]), folder))
    return max(found)[1] if found else None


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

    Args:
        facts: kept in the manifest beside the list of files.
    """
    files = {
        str(path.relative_to(staged)): path.stat().st_size
        for path in sorted(staged.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    manifest = {"schema": SCHEMA, **facts, "files": files}
    with (staged / MANIFEST).open("w", encoding="utf-8") as stream:
        json.dump(manifest, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    if final.exists():
        older = staged.with_name(f"{final.name}.older")
        shutil.rmtree(older, ignore_errors=True)
        final.rename(older)
        staged.rename(final)
        shutil.rmtree(older, ignore_errors=True)
    else:
        staged.rename(final)


def clear_staging(output_dir: str | Path) -> None:
    """Remove what an interrupted save left behind."""
    shutil.rmtree(Path(output_dir) / STAGING, ignore_errors=True)


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
