"""Runs of several processes, forked from one helper that a session starts when it needs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ANSWER = "answer: "  # begins a line of the helper that is one


@pytest.fixture(scope="session")
def run_scene() -> Iterator[Callable[..., None]]:
    """Give a function that runs a scene of `ranks_worker.py` into a folder, or fails the test."""
    helper: subprocess.Popen[str] | None = None

    def run(scene: str, folder: Path, *given: str) -> None:
        nonlocal helper
        if helper is None:
            helper = subprocess.Popen(
                [sys.executable, "-m", "tests.train.ranks_worker"],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert helper.stdin is not None
        assert helper.stdout is not None
        asked = {"scene": scene, "folder": str(folder), "given": given}
        helper.stdin.write(json.dumps(asked) + "\n")
        helper.stdin.flush()
        # Libraries print while the helper imports them.
        answers = (line.removeprefix(ANSWER) for line in helper.stdout if line.startswith(ANSWER))
        error = json.loads(next(answers, '"the helper ended"'))
        if error is not None:
            logs = sorted(folder.rglob("rank_*.log"))
            tails = [f"--- {log}\n{log.read_text(errors='replace')[-2500:]}" for log in logs]
            pytest.fail("\n".join([error, *tails]))

    yield run
    if helper is not None:
        helper.communicate()  # its input ends, and so does it
