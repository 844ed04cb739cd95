"""The command line of `scripts/bench.py`: which cases run, on what, and where the lines go."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib
import json
import platform
import subprocess
import traceback
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from . import CASES
from .setting import Line, Setting
from .sizes import SIZES
from .train_mix import SHAPES

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "triton", "flash-linear-attention")


def main(argv: Sequence[str] | None = None) -> int:
    """Run cases, print a line each, and give the exit status: 1 if one failed."""
    parser = argparse.ArgumentParser(prog="bench.py", description="Speed, one JSON line a figure.")
    parser.add_argument("case", nargs="*", help=f"of {', '.join(CASES)}; default: every case")
    parser.add_argument("--model", choices=list(SIZES), default="tiny", help="shapes and sizes")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for everything together")
    parser.add_argument("--keep", action="store_true", help="add the lines to data/bench/")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "data" / "bench", help="where --keep adds them"
    )
    parser.add_argument(
        "--profile", type=Path, metavar="FOLDER", help="write kernel times of decode and train"
    )
    parser.add_argument("--mixes", nargs="+", choices=list(SHAPES), help="of train; default: all")
    parser.add_argument(
        "--fused-layers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="of the trainer, in the case train",
    )
    parser.add_argument("--commit", help="of the lines; default: what git says")
    asked = parser.parse_args(argv)
    for name in asked.case:
        if name not in CASES:
            parser.error(f"case {name!r}: must be one of {', '.join(CASES)}")
    setting = Setting(
        model=asked.model,
        budget_s=asked.budget,
        profile=asked.profile,
        mixes=asked.mixes,
        fused_layers=asked.fused_layers,
    )
    where = circumstances(asked.commit)
    failed = False
    for name in asked.case or CASES:
        for line, is_failure in run_case(name, setting, asked=bool(asked.case)):
            failed |= is_failure
            text = json.dumps({"bench": name, **line.record(), **where})
            print(text, flush=True)
            if asked.keep and line.value is not None:
                asked.folder.mkdir(parents=True, exist_ok=True)
                with (asked.folder / f"{name}.jsonl").open("a", encoding="utf-8") as stream:
                    stream.write(text + "\n")
    return int(failed)


def run_case(name: str, setting: Setting, *, asked: bool) -> Iterator[tuple[Line, bool]]:
    """Yield a case's lines, each with whether it tells of a failure; others go on after one.

    Args:
        asked: the case was named, so that not having it is a failure.
    """
    try:
        module = importlib.import_module(f".{name}", __package__)
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}.{name}":
            raise
        yield Line.not_run(name, "this version has no such case"), asked
        return
    if not setting.fits(0):
        yield Line.not_run(name, setting.out_of_budget(0)), False
        return
    try:
        for line in module.run(setting):
            yield line, False
    except Exception as error:  # noqa: BLE001 the cases after it still count
        traceback.print_exc()
        yield Line.not_run(name, f"{type(error).__name__}: {error}"), True
    finally:
        if setting.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def circumstances(commit: str | None = None) -> dict[str, Any]:
    """Hardware, versions, date and commit of a line."""
    if commit is None:
        call = ["git", "rev-parse", "--short", "HEAD"]
        done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
        commit = done.stdout.strip() or None
    cuda = torch.cuda.is_available()
    hardware = torch.cuda.get_device_name() if cuda else f"CPU {platform.machine()}"
    return {
        "hardware": f"{hardware}, {torch.get_num_threads()} threads",
        "versions": installed(),
        "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit,
    }


def installed() -> dict[str, str]:
    """Versions of the packages that speed depends on, those that are there."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
