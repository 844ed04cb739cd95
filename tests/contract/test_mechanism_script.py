"""`scripts/mechanism.py` on recorded episodes: files in, figures out, faults in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from octopus_trl.errors import ConfigError
from octopus_trl.eval.seal_join_backend import load_world
from octopus_trl.eval.seal_join_experts import ExpertOptions
from octopus_trl.eval.seal_join_studio import ExpertStudio
from octopus_trl.trace_files import write_traces
from scripts import mechanism

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "data" / "policy" / "tiny-hybrid"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four episodes of an expert that never loses an answer, as an evaluation leaves them."""
    path = tmp_path_factory.mktemp("runs") / "expert"
    path.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    backend = load_world(ROOT / "data" / "seal_join", snippet_tokens=0)
    studio = ExpertStudio(backend, tokenizer, options=ExpertOptions(empty_search=0.0))
    rows = backend.world.questions("test", 4, arms=("late",), branches=(2,))
    write_traces(path / "traces.jsonl", [studio.trace(row) for row in rows])
    (path / "setting.json").write_text(json.dumps({"temperature": 1.0, "disable": []}))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/mechanism.py", *words])
    mechanism.main()


def test_an_experts_episodes_are_right_not_hijacked_and_free(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "lines.jsonl"
    run(monkeypatch, "traces", str(folder), "--model", str(POLICY), "--out", str(out))
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    figures = line["figures"]
    assert (line["kind"], line["name"], line["n"]) == ("episodes", "expert", 4)
    assert line["setting"] == {"temperature": 1.0}
    assert "--out" not in line["command"]
    assert figures["accuracy"]["value"] == 1.0
    assert figures["hijack"]["value"] == 0.0
    assert figures["hijack"]["interval_95"][1] > 0.1  # four episodes rule little out
    assert figures["mounts"]["value"] == 2.0
    assert figures["extra_kv_share"]["value"] == 0.0


def test_a_file_that_fails_costs_no_line_before_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "lines.jsonl"
    with pytest.raises(ConfigError, match="no traces there"):
        run(monkeypatch, "traces", str(folder), "nowhere.jsonl", "--out", str(out))
    assert [json.loads(text)["name"] for text in out.read_text().splitlines()] == ["expert"]


def test_crossings_of_recorded_episodes_are_scored_by_the_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "lines.jsonl"
    words = ["traces", str(folder / "traces.jsonl"), "--model", str(POLICY), "--limit", "1"]
    words += ["--crossings", "--readings", "none", "transcript", "mount", "--out", str(out)]
    run(monkeypatch, *words)
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    assert [line.get("reading") for line in lines] == [None, "none", "transcript", "mount"]
    assert lines[1]["figures"]["drift"]["value"] == 0.0
    assert lines[1]["figures"]["hijack_choice"]["value"] == 0.0
    assert lines[0]["n"] == lines[1]["n"] == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["traces", "nowhere.jsonl"], "no traces there"),
        (["traces", "nowhere.jsonl", "--kl"], "name a --model"),
        (["traces", "nowhere.jsonl", "--readings", "mount"], "must be among them"),
        (["probes", "--model", str(POLICY), "--probes", "seal", "-n", "1"], "must be at least 2"),
        (["table", "--records", "nowhere"], "no mechanism.jsonl"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    words: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(monkeypatch, *words)
