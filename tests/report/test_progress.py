"""How far a script is: lines without a terminal, as rare as they say; bars on one."""

from __future__ import annotations

import random

import pytest
from rich.progress import TaskProgressColumn

from octopus_trl.report.progress import TELL_EVERY_S, StageBars


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = random.uniform(0, 1e6)
        monkeypatch.setattr("octopus_trl.report.progress.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return Clock(monkeypatch)


def test_without_a_terminal_lines_are_as_rare_as_told(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with StageBars() as bars:
        bars.tell("merge", 0, 3_000)
        for done in range(1, 3_001):
            clock.now += 0.125
            bars.tell("merge", done, 3_000)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == int(3_000 * 0.125 / TELL_EVERY_S)
    assert lines[0] == "merge 120/3,000, 360 s left"
    assert lines[-1] == "merge 3,000/3,000, 0 s left"


def test_a_job_shorter_than_that_says_nothing_unless_ends_are_told(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    for tell_ends in (False, True):
        with StageBars(tell_ends=tell_ends) as bars:
            for done in range(3):
                bars.tell("episodes", done, 2, "[red] :x: " + "a" * 200)
                clock.now += 1
        want = f"episodes 2/2, [red] :x: {'a' * 200}, 0 s left\n" if tell_ends else ""
        assert capsys.readouterr() == ("", want)


def test_what_was_done_before_takes_no_time_of_what_is_left(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with StageBars() as bars:
        bars.tell("episodes", 90, 100, "none right")
        clock.now += 20
        bars.tell("episodes", 92, 100, "1.1% right")
    assert capsys.readouterr().err == "episodes 92/100, 1.1% right, 80 s left\n"


def test_a_stage_that_has_just_begun_promises_no_time(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with StageBars() as bars:
        bars.tell("check", 0, 9)
        clock.now += 20
        bars.tell("merge", 64, 1_000)
        clock.now += 20
        bars.tell("merge", 164, 1_000)
    assert capsys.readouterr().err == "merge 64/1,000\nmerge 164/1,000, 167 s left\n"


def test_on_a_terminal_each_stage_is_a_bar_and_no_line_is_printed(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    for amount, shown in ((None, "4/8"), (TaskProgressColumn(), "50%")):
        with StageBars(amount, tell_ends=True) as bars:
            bars.tell("check", 3, 3)
            for done in (1, 4):
                clock.now += 20
                bars.tell("episodes", done, 8, f"{done} right")
            bars.refresh()
            assert [task.description for task in bars.tasks] == ["check", "episodes, 4 right"]
            assert [(task.completed, task.total) for task in bars.tasks] == [(3, 3), (4, 8)]
        out, err = capsys.readouterr()
        assert out == ""
        assert shown in err
        assert "s left" not in err
