"""The published validation ids of OpenResearcher: drawn by their rule, ids and hashes alone."""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from octopus_trl.eval.benchmarks.browsecomp_plus import CANARY_VARIABLE, encode
from octopus_trl.eval.benchmarks.open_researcher import load_open_researcher

ROOT = Path(__file__).parents[2]
LONG = "which of the two bridges over the river was built by the elder brother in winter"


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Sixty questions of the published schema, messages left out as a projection leaves them."""
    rows = [{"qid": at, "question": f"SECRET {at}?", "answer": f"gold {at}"} for at in range(60)]
    rows[7]["question"] = f"Tell me: {LONG}?"
    rows[9]["question"] = "The same?"
    return table(tmp_path / "open.jsonl", rows)


def split(monkeypatch: pytest.MonkeyPatch, *words: object) -> Any:
    monkeypatch.setattr(sys, "argv", ["split_open_researcher.py", *map(str, words)])
    try:
        runpy.run_path(str(ROOT / "scripts/split_open_researcher.py"), run_name="__main__")
    except SystemExit as end:
        return end.code
    return 0


def test_the_file_holds_the_ids_of_the_rule_and_no_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: Path
) -> None:
    out = tmp_path / "deep" / "validation.json"
    plus = [
        {"query_id": "1", "query": encode(f"{LONG} and where?", "c"), "answer": encode("x", "c")},
        {"query_id": "2", "query": encode("the same", "c"), "answer": encode("x", "c")},
    ]
    other = table(tmp_path / "plus.jsonl", plus)
    monkeypatch.setenv(CANARY_VARIABLE, "c")
    words = ("--source", source, "--count", 20, "--output", out, "--against", "browsecomp-plus")
    more = ("--against-source", other, "--loader-options", "expected=null")
    assert split(monkeypatch, *words, *more) == 0
    record = json.loads(out.read_text())
    salt = "octopus_trl open-researcher validation 1:"
    wanted = sorted(
        map(str, range(60)), key=lambda q: hashlib.sha256(f"{salt}{q}".encode()).digest()
    )
    assert record["qids"] == wanted[:20]
    assert record["num_questions"] == 60
    held_out = load_open_researcher(source, part="validation", num_validation=20)
    assert {row["id"] for row in held_out.questions} == set(record["qids"])
    overlap = record["overlap"]
    assert sorted(overlap["shared_words"]["train"] + overlap["shared_words"]["validation"]) == [
        "7",
        "9",
    ]
    assert sorted(overlap["same_question"]["train"] + overlap["same_question"]["validation"]) == [
        "9"
    ]
    assert not any(word in out.read_text() for word in ("SECRET", "gold ", "bridges"))


def test_what_cannot_be_split_is_one_error_and_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    source: Path,
) -> None:
    out = tmp_path / "validation.json"
    assert split(monkeypatch, "--source", source, "--output", out) == 2
    assert "60 questions, 500 are to be held out" in capsys.readouterr().err
    twice = table(tmp_path / "twice.jsonl", [{"qid": 1, "question": "a", "answer": "b"}] * 2)
    assert split(monkeypatch, "--source", twice, "--count", 1, "--output", out) == 2
    assert "id '1' is in rows 0 and 1" in capsys.readouterr().err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert split(monkeypatch, "--source", "no/such-set", "--output", out) == 2
    assert "hf download --repo-type dataset" in capsys.readouterr().err
    assert not out.exists()
