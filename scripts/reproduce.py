"""Run what this machine can of the paper's claims and print ours beside the paper's.

    python scripts/reproduce.py --claim kl-live
    python scripts/reproduce.py --table storage --scale small
    python scripts/reproduce.py --all --scale small --output runs/claims   again: goes on
    python scripts/reproduce.py --write    README block and docs/claims.md from data/claims.yaml

`--scale small` runs the stand-ins that a CPU can do; `--scale full` prints the command, recipe and
hardware of the paper's own setting, which is started by hand. A claim that fails stops no other.
What a stopped run has finished is in its folder, and the same `--output` does not run it again.
Exit codes: 0 everything asked for ran or says why it does not; 1 a command failed; 2 a setting is
wrong; 130 it was stopped.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from octopus_trl.errors import ConfigError
from octopus_trl.eval.claims import (
    SCALES,
    TABLES,
    Claim,
    document,
    load_claims,
    readme_block,
    with_block,
)
from octopus_trl.eval.reproduction import Reproduction
from octopus_trl.files import write_whole
from octopus_trl.report.ending import ending

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--claim", nargs="+", help="ids of data/claims.yaml")
    what.add_argument("--table", choices=TABLES)
    what.add_argument("--all", action="store_true")
    what.add_argument("--write", action="store_true", help="README block and docs/claims.md")
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--claims", type=Path, default=ROOT / "data" / "claims.yaml")
    parser.add_argument("--output", type=Path, help="folder of the runs; runs/claims-DATE if not")
    asked = parser.parse_args()
    claims = load_claims(asked.claims)
    if asked.write:
        write(claims)
        return 0
    chosen = pick(claims, asked.claim, asked.table)
    stamp = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S")
    folder = (asked.output or ROOT / "runs" / f"claims-{stamp}").resolve()
    signal.signal(signal.SIGTERM, interrupt)
    try:
        rows = reproduce(chosen, asked.scale, folder)
    except KeyboardInterrupt:
        tell(f"stopped; go on with the same command and --output {folder}")
        return 130
    width = None if sys.stdout.isatty() else 160
    Console(highlight=False, width=width).print(table_of(chosen, rows))
    if any(row["commit"] for row in rows):
        print(f"runs and claims.jsonl in {folder}")
    return int(any(row["state"] == "failed" for row in rows))


def reproduce(chosen: Sequence[Claim], scale: str, folder: Path) -> list[dict[str, Any]]:
    """Take claims one by one, tell what is done and left, and keep the rows in `claims.jsonl`."""
    runs = Reproduction(ROOT, folder, tell)
    lists = {claim.small.commands for claim in chosen if claim.small and scale == "small"}
    rows: list[dict[str, Any]] = []
    begun, counted = time.monotonic(), 0
    for claim in chosen:
        ours, state = take(claim, scale, runs)
        ran = runs.finished.get(claim.small.commands) if claim.small else None
        rows.append(
            {
                "id": claim.id,
                "paper": claim.paper,
                "ours": ours,
                "state": state,
                "commit": ran and ran.commit,
                "date": ran and ran.date,
                "seconds": ran and round(ran.seconds, 1),
            }
        )
        tell(f"{claim.id}: {ours}")
        done = len(runs.finished) + len(runs.failed)
        if done > counted:
            counted, spent = done, time.monotonic() - begun
            left = spent / done * (len(lists) - done)
            tell(f"{done}/{len(lists)} lists of commands, {spent:.0f} s, about {left:.0f} s left")
            keep(rows, folder)
    if counted:
        keep(rows, folder)
    return rows


def keep(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write the rows so far, whole or not at all; a disk that refuses stops no run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "claims.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        tell(f"{folder}/claims.jsonl cannot be written ({error}); the rows are printed at the end")


def tell(line: str) -> None:
    """Say a line on stderr with the time of day."""
    now = datetime.datetime.now(tz=datetime.UTC).strftime("%H:%M:%S")
    print(f"{now} {line}", file=sys.stderr, flush=True)


def interrupt(*_: object) -> NoReturn:
    """End a run as Ctrl-C does, so that what it started ends with it."""
    raise KeyboardInterrupt


def pick(claims: Sequence[Claim], ids: Sequence[str] | None, table: str | None) -> list[Claim]:
    """Give the claims that were asked for, in the order of the file.

    Raises:
        ConfigError: an id is unknown.
    """
    known = [claim.id for claim in claims]
    if unknown := [name for name in ids or () if name not in known]:
        raise ConfigError(f"--claim {unknown}: not in data/claims.yaml, which has {known}")
    return [
        claim
        for claim in claims
        if (ids is None or claim.id in ids) and (table is None or claim.table == table)
    ]


def take(claim: Claim, scale: str, runs: Reproduction) -> tuple[str, str]:
    """Run a claim where that can be done here; gives the figure or the reason, and the state."""
    if scale == "full":
        text = f"{claim.command or 'no command'} on {claim.hardware}"
        return (f"{text}, recipe {claim.recipe}" if claim.recipe else text), "command"
    if claim.small is None:
        return f"no small stand-in: {claim.not_run or f'by hand {claim.command}'}", "not run"
    try:
        return runs.figure(claim.small), "small"
    except ConfigError as error:
        return str(error), "failed"


def table_of(claims: Sequence[Claim], rows: Sequence[dict[str, Any]]) -> Table:
    """Lay paper, record and this run side by side."""
    table = Table(title="claims")
    for name in ("claim", "paper", "on record", "this run", ""):
        table.add_column(name)
    for claim, row in zip(claims, rows, strict=True):
        kept = "–" if claim.measured is None else f"{claim.measured.value} ({claim.measured.scale})"
        label = f"{claim.id}: {claim.claim}"
        table.add_row(label, claim.paper or "–", kept, str(row["ours"]), str(row["state"]))
    return table


def write(claims: Sequence[Claim]) -> None:
    """Write the README's block and the page of all claims."""
    readme = ROOT / "README.md"
    text = with_block(readme.read_text(encoding="utf-8"), readme_block(claims))
    readme.write_text(text, encoding="utf-8")
    (ROOT / "docs" / "claims.md").write_text(document(claims), encoding="utf-8")


if __name__ == "__main__":
    with ending():
        sys.exit(main())
