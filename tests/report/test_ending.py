"""How scripts end: one line and a code for what a user can put right, a traceback for the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from octopus_trl.errors import ConfigError, ServiceDown
from octopus_trl.report.ending import ending

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


def test_every_script_ends_so_or_says_why_not() -> None:
    without = {path.stem for path in SCRIPTS.glob("*.py") if "with ending(" not in path.read_text()}
    assert without == OWN_ENDING
