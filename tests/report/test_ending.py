"""How scripts end: one line and a code for what a user can put right, a traceback for the rest."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octopus_trl.errors import ConfigError, ServiceDown
from octopus_trl.report.ending import ending, importing
from octopus_trl.trace_files import write_traces
from tests.tiny import random_trace

SCRIPTS = Path(__file__).parents[2] / "scripts"
# train has codes of its own for its ranks (docs/training.md); the others are instruments.
OWN_ENDING = {"train", "bench", "bench_attention", "profile_step", "tune_kernels"}
FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("--n 0: must be at least 1"), 2, "error: --n 0: must be at least 1\n"),
        (ServiceDown("no answer"), 2, "error: no answer\n"),
        (FULL, 1, f"error: {FULL}; half is kept\n"),
        (KeyboardInterrupt(), 130, "stopped; all is kept\n"),
    ],
)
def test_a_known_reason_is_one_line_and_a_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, ending(disk="half is kept", stopped="all is kept"):
        raise error
    assert ended.value.code == code
    assert capsys.readouterr() == ("", line)


def test_nothing_is_said_of_an_interrupt_that_leaves_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended, ending():
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error", [KeyError("x"), ValueError("x"), SystemExit(7), FULL])
def test_any_other_end_is_left_as_it_is(error: BaseException) -> None:
    with pytest.raises(type(error)) as ended, ending():
        raise error
    assert ended.value is error


UNREAD = """
import sys
from octopus_trl.report.ending import ending
with ending(disk="half is kept"):
    sys.stdout.write("half a line")
    {then}
"""


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    ("then", "code", "line"),
    [
        ("pass", 141, b""),
        ("sys.exit(0)", 141, b""),
        ("from rich.console import Console; Console().print('table')", 141, b""),
        ("sys.stdout.flush(); raise OSError(28, 'full')", 141, b""),
        ("raise OSError(28, 'full')", 1, b"error: [Errno 28] full; half is kept\n"),
    ],
)
def test_output_that_nobody_reads_any_more_ends_a_script_without_a_word(
    buffered: bool, then: str, code: int, line: bytes
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", UNREAD.format(then=then)],
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"},
    )
    os.close(writer)
    # Without a buffer the first write fails already.
    assert (done.returncode, done.stderr) == ((code, line) if buffered else (141, b""))


def test_a_pipe_that_is_not_the_output_is_a_disk_that_refused(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended, ending(disk="half is kept"):
        raise BrokenPipeError(32, "Broken pipe")
    assert ended.value.code == 1
    assert capfd.readouterr() == ("", "error: [Errno 32] Broken pipe; half is kept\n")


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("select_mount_layers", ["--model", "none"]),
        ("mechanism", ["probes", "--model", "none"]),
    ],
)
def test_a_folder_for_results_is_refused_before_a_model_is_loaded(
    script: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
    assert ended.value.code == 2
    assert capfd.readouterr().err == f"error: --out {tmp_path}: is a folder; name a file\n"


def test_a_full_disk_under_a_table_is_one_line(tmp_path: Path) -> None:
    write_traces(tmp_path / "traces.jsonl", [random_trace(0)])
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / "stats.py"), str(tmp_path / "traces.jsonl")],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert b"No space left on device; the figures are not whole" in done.stderr


def test_every_script_ends_so_or_says_why_not() -> None:
    without = {path.stem for path in SCRIPTS.glob("*.py") if "with ending(" not in path.read_text()}
    assert without == OWN_ENDING


HEAVY = sorted(path.stem for path in SCRIPTS.glob("*.py") if "importing():" in path.read_text())
# A library that is interrupted in the middle of its own import, and would abort on an exception.
SLOW_LIBRARY = """
import os, signal
os.kill(os.getpid(), signal.SIGINT)
print("went on")
"""


@pytest.mark.parametrize("script", HEAVY)
def test_an_interrupt_while_libraries_are_imported_is_one_line(script: str, tmp_path: Path) -> None:
    for library in ("numpy", "rich", "torch", "transformers", "peft"):
        (tmp_path / f"{library}.py").write_text(SLOW_LIBRARY)
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / f"{script}.py")],
        capture_output=True,
        check=False,
        cwd=SCRIPTS.parent,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"interrupted\n")


def test_scripts_that_import_for_seconds_hold_interrupts_back_meanwhile() -> None:
    heavy = {
        path.stem
        for path in SCRIPTS.glob("*.py")
        if any(f"\n{word} transformers" in path.read_text() for word in ("from", "import"))
    }
    assert not heavy, "import transformers under `with importing()`"
    assert {"train", "sft", "evaluate", "ask", "demo"} <= set(HEAVY)


def test_an_interrupt_after_imports_is_an_exception_again() -> None:
    held = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with importing():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, held)
