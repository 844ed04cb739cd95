"""The table of claims: complete, checked row by row, the same in README and docs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from octopus_trl.errors import ConfigError
from octopus_trl.eval.claims import (
    BEGIN,
    END,
    Claim,
    document,
    load_claims,
    readme_block,
    with_block,
)
from octopus_trl.eval.reproduction import Reproduction, read_figure, shown

ROOT = Path(__file__).parents[2]
CLAIMS = ROOT / "data" / "claims.yaml"
# The rows of shared/notes/paper.md.
PAPER = """
bcp-octopus or-octopus or-unbounded bcp-flat-32k bcp-flat-143k flat-143k-stall bcp-summary
tools-without-rl fork-disabled kv-hit-rate re-prefill wire-bytes wire-time hijack-transcript
hijack-splice hijack-mount drift extra-kv information recall-transcript recall-mount
recall-unshifted sibling-ahead argmax-dense argmax-mamba2 trunk-bias packing-mean packing-peak
packing-step no-oom kl-live kl-dropped throughput peak-kv phase-step fork-turn-1 offload-reads
offload-rewinds mounts-per-episode active-prompt explored critical-path gold-recall hardest-hops
cursors tree-size larger-agents
"""


def row(**changes: Any) -> dict[str, Any]:
    return {
        "id": "one-claim",
        "table": "training",
        "claim": "a | b",
        "paper": "1 %",
        "source": "report",
        "recipe": None,
        "command": "make test",
        "hardware": "1 CPU core",
        "hours": 0.5,
        "measured": {
            "value": 2.5,
            "interval": [2, 3],
            "n": 4,
            "scale": "small",
            "date": "2026-11-30",
            "hardware": "1 CPU core",
            "commit": "0123abc",
        },
        **changes,
    }


def measured(**changes: Any) -> dict[str, Any]:
    return row(measured={**row()["measured"], **changes})


def leave(folder: Path, *rows: Any) -> Path:
    path = folder / "claims.yaml"
    path.write_text(yaml.safe_dump(list(rows)))
    return path


def test_every_row_of_the_paper_is_there() -> None:
    assert set(PAPER.split()) <= {claim.id for claim in load_claims(CLAIMS)}


def test_the_readme_and_the_page_are_what_the_claims_make() -> None:
    claims = load_claims(CLAIMS)
    fix = "run: python scripts/reproduce.py --write"
    readme = (ROOT / "README.md").read_text()
    assert with_block(readme, readme_block(claims)) == readme, fix
    assert (ROOT / "docs" / "claims.md").read_text() == document(claims), fix


@pytest.mark.parametrize("claim", load_claims(CLAIMS), ids=lambda claim: claim.id)
def test_a_value_is_what_its_record_holds(claim: Claim) -> None:
    if claim.record is not None:
        assert claim.measured is not None
        assert str(claim.measured.value) == shown(claim.record.read, claim.record.show, ROOT)
    elif claim.measured is not None:
        assert claim.command is not None
        assert "pytest" in claim.command, "a figure that no test asserts needs a record"


def test_a_value_that_its_record_does_not_hold_is_seen(tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text('{"accuracy": 0.255}')
    record = {"read": [["kept.json", "accuracy"]], "show": "{:.1%}"}
    (claim,) = load_claims(leave(tmp_path, row(record=record)))
    assert claim.record is not None
    assert claim.measured is not None
    assert shown(claim.record.read, claim.record.show, tmp_path) == "25.5%" != claim.measured.value


def test_recipes_of_claims_exist_and_their_commands_name_files_that_do() -> None:
    for claim in load_claims(CLAIMS):
        commands = [claim.command, *(claim.small.commands if claim.small else ())]
        words = [word for command in commands if command for word in command.split()]
        files = [word for word in words if word.startswith(("scripts/", "recipes/", "tests/"))]
        for file in [*files, *([claim.recipe] if claim.recipe else [])]:
            assert (ROOT / file).is_file(), (claim.id, file)


def test_a_figure_at_small_scale_says_so_in_its_row(tmp_path: Path) -> None:
    (claim,) = load_claims(leave(tmp_path, row()))
    block = readme_block([claim])
    assert "2.5 (2 to 3), n = 4, **small**" in block
    assert "2.5 (2 to 3), n = 4 (**small**: 1 CPU core, 2026-11-30, 0123abc)" in document([claim])
    assert "a \\| b" in block


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            [row(measured=None, not_run="x", record={"read": [["a", "b"]], "show": "{}"})],
            "measured is not",
        ),
        ([row(record={"read": [["a"]], "show": "{}"})], "each must be"),
        ([row(not_run="why")], "either measured or not_run"),
        ([row(measured=None)], "either measured or not_run"),
        ([row(), row()], "comes twice"),
        ([row(colour="red")], "unknown fields"),
        ([{"id": "x"}], "missing"),
        ([row(id="Not So")], "lower-case"),
        ([row(table="other")], "table is 'other'"),
        ([row(hours=-1)], "hours is -1"),
        ([measured(n=0)], "n is 0"),
        ([measured(scale="tiny")], "scale is 'tiny'"),
        ([measured(interval=[3, 2])], "interval"),
        ([measured(interval=[3, 4])], "around the value"),
        ([measured(date="yesterday")], "date"),
        ([measured(commit="main")], "commit"),
        ([measured(value="")], "value"),
        ([row(small={"commands": [], "read": [["a", "b"]], "show": "{}"})], "commands"),
        (["text"], "must be a mapping"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused_by_name(
    tmp_path: Path, rows: list[Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        load_claims(leave(tmp_path, *rows))


@pytest.mark.parametrize("text", ["", f"{END} {BEGIN}", f"{BEGIN}{END}{BEGIN}{END}", BEGIN])
def test_a_text_without_its_marks_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="once each"):
        with_block(text, "x")


def test_figures_are_read_from_json_and_from_lines_between_other_output(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(json.dumps({"x": [{"k": 1.0}, {"k": 3.0}, {}], "y": {"z": 5}}))
    (tmp_path / "b").write_text('hello\n{"case": "one", "value": 1}\n{"case": "two", "value": 2}\n')
    assert read_figure(tmp_path / "a", ["y", "z"]) == 5
    assert read_figure(tmp_path / "a", ["x", {"mean": "k"}]) == 2.0
    assert read_figure(tmp_path / "b", [{"where": {"case": "two"}}, "value"]) == 2
    for steps in (["y", "w"], ["x", 7], [{"where": {"case": "three"}}], ["x", {"mean": "none"}]):
        with pytest.raises(ConfigError, match="nothing at"):
            read_figure(tmp_path / "a", steps)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_figure(tmp_path / "none", ["x"])


def test_commands_run_once_for_all_claims_and_a_failure_is_told_once_each(tmp_path: Path) -> None:
    script = tmp_path / "count.py"
    script.write_text(
        "from pathlib import Path\n"
        "with Path('count').open('a') as stream:\n"
        "    stream.write('1')\n"
        "print('words before')\n"
        "print('{\"x\": 7}')\n"
    )
    small = {"commands": [f"python {script}"], "read": [["stdout", 0, "x"]], "show": "<{:.1f}>"}
    broken = {**small, "commands": ['python -c "raise SystemExit(3)"']}
    rows = [row(id=f"c{at}", small=small if at < 2 else broken) for at in range(4)]
    path = leave(tmp_path, *rows)
    runs = Reproduction(tmp_path, tmp_path / "runs")
    claims = load_claims(path)
    for claim in claims[:2]:
        assert claim.small is not None
        assert runs.figure(claim.small) == "<7.0>"
    assert (tmp_path / "count").read_text() == "1"
    for claim in claims[2:]:
        assert claim.small is not None
        with pytest.raises(ConfigError, match="ended with 3"):
            runs.figure(claim.small)


def counting(folder: Path) -> dict[str, Any]:
    """A stand-in that leaves a mark each time it runs, and fails where a file `broken` is."""
    script = folder / "count.py"
    script.write_text(
        "import pathlib, sys\n"
        "here = pathlib.Path(__file__).parent\n"
        "with open(here / 'count', 'a') as stream: stream.write('1')\n"
        "sys.exit('broken') if (here / 'broken').exists() else print('{\"x\": 7}')\n"
    )
    return {"commands": [f"python {script}"], "read": [["stdout", "x"]], "show": "{}"}


def reproducing(claims: Path, out: Path) -> list[str]:
    """Give the command that takes every claim of a file."""
    asked = ["--all", "--claims", str(claims), "--output", str(out)]
    return [sys.executable, "scripts/reproduce.py", *asked]


def test_what_ended_well_is_not_run_again_and_what_did_not_is(tmp_path: Path) -> None:
    (claim,) = load_claims(leave(tmp_path, row(small=counting(tmp_path))))
    assert claim.small is not None
    (tmp_path / "broken").touch()
    with pytest.raises(ConfigError, match="ended with 1: broken"):
        Reproduction(tmp_path, tmp_path / "runs").figure(claim.small)
    (tmp_path / "broken").unlink()
    for _ in range(3):
        assert Reproduction(tmp_path, tmp_path / "runs").figure(claim.small) == "7"
    assert (tmp_path / "count").read_text() == "11"


def test_a_program_that_is_not_there_is_a_failure_of_that_claim(tmp_path: Path) -> None:
    small = {"commands": ["no-such-program --x"], "read": [["stdout", "x"]], "show": "{}"}
    (claim,) = load_claims(leave(tmp_path, row(small=small)))
    assert claim.small is not None
    with pytest.raises(ConfigError, match="no-such-program"):
        Reproduction(tmp_path, tmp_path / "runs").figure(claim.small)


def test_one_claim_that_fails_stops_no_other_and_the_exit_code_says_so(tmp_path: Path) -> None:
    good = counting(tmp_path)
    bad = {**good, "commands": ['python -c "raise SystemExit(3)"']}
    lost = {**good, "read": [["stdout", "y"]]}
    rows = [row(id=f"c{at}", small=small) for at, small in enumerate((bad, lost, good))]
    path, out = leave(tmp_path, *rows), tmp_path / "out"
    command = reproducing(path, out)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    kept = [json.loads(line) for line in (out / "claims.jsonl").read_text().splitlines()]
    assert [line["state"] for line in kept] == ["failed", "failed", "small"]
    assert kept[2]["ours"] == "7"
    assert "2/2 lists of commands" in done.stderr


def test_a_stopped_run_ends_what_it_started_and_goes_on(tmp_path: Path) -> None:
    small = counting(tmp_path)
    small["commands"] = [f"python {tmp_path}/wait.py {tmp_path}"]
    (tmp_path / "wait.py").write_text(
        "import os, pathlib, sys, time\n"
        "place = pathlib.Path(sys.argv[1])\n"
        "(place / 'pid').write_text(str(os.getpid()))\n"
        "while not (place / 'go').exists(): time.sleep(0.01)\n"
        "print('{\"x\": 7}')\n"
    )
    path, out = leave(tmp_path, row(small=small)), tmp_path / "out"
    command = reproducing(path, out)
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    said = process.communicate()[1]
    assert process.returncode == 130, said
    assert f"--output {out}" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    (tmp_path / "go").touch()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--claim", "nope"], 2, "not in data/claims.yaml"),
        (["--claim", "hijack-mount"], 0, "no small stand-in"),
        (["--table", "accuracy", "--scale", "full"], 0, "8 x H200"),
    ],
)
def test_the_command_says_what_it_cannot_run(
    tmp_path: Path, words: list[str], code: int, says: str
) -> None:
    command = [sys.executable, "scripts/reproduce.py", *words, "--output", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr
    assert not (tmp_path / "out").exists()
