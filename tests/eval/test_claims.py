"""The table of claims: complete, checked row by row, the same in README and docs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from octopus_trl.errors import ConfigError
from octopus_trl.eval.claims import (
    BEGIN,
    END,
    document,
    load_claims,
    readme_block,
    with_block,
)
from octopus_trl.eval.reproduction import Reproduction, read_figure

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
    assert "2.5 (2 to 3), n = 4 (**small**: 1 CPU core, 2026-11-30, 0123abc)" in block
    assert "a \\| b" in block


@pytest.mark.parametrize(
    ("rows", "says"),
    [
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
