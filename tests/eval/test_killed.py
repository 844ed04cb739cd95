"""`kill -9` of an evaluation: no episode is repeated or lost, and the records are the same."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octopus_trl.errors import ConfigError
from octopus_trl.eval.run import RecordingTools
from octopus_trl.trace_files import read_traces
from tests.eval.test_run import ROWS, Corpus, Runner, evaluation
from tests.tiny import tiny_hybrid
from tests.train.runs import tokenizer

ROOT = Path(__file__).parents[2]
QUESTIONS = 32
SETTINGS = (
    *("--window", "1024", "--max-turns", "3", "--max-new-tokens", "24", "--live", "2"),
    *("--seed", "3", "--browsecomp-runs"),
)


class Slow(Runner):
    """Keeps a log of what was asked, and takes its time."""

    def __init__(self, tools: RecordingTools, log: Path, pause_s: float) -> None:
        super().__init__(tools)
        self.log, self.pause_s = log, pause_s

    def run(self, rows: Any, *, seed: int, on_trace: Callable[..., None]) -> None:
        for row in rows:
            time.sleep(self.pause_s)
            super().run([row], seed=seed, on_trace=on_trace)
            with self.log.open("a") as stream:
                stream.write(row["id"] + "\n")


def evaluate(folder: Path, log: Path, pause_s: float) -> None:
    one = evaluation(folder)
    tools = RecordingTools(Corpus())
    one.run(Slow(tools, log, pause_s), tools, seed=0, tell=lambda *_: None)  # type: ignore[arg-type]
    one.finish(browsecomp={"model": "m", "max_output_tokens": 1})


def in_child(folder: Path, log: Path, kill_after_s: float) -> bool:
    """Evaluate in a process of its own and kill it; whether it was through before."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            evaluate(folder, log, 0.03)
            code = 0
        finally:
            os._exit(code)
    until = time.monotonic() + kill_after_s
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            return True
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def kept(folder: Path) -> dict[str, Any]:
    """Give everything that an evaluation leaves, but for the run's own folder name and what a kill
    in the middle of a write leaves under a name of its own (`octopus_trl.files`).
    """
    runs = {p.name: json.loads(p.read_text()) for p in (folder / "runs").glob("[!.]*")}
    for run in runs.values():
        run["metadata"].pop("output_dir")
    return {
        "records": (folder / "records.jsonl").read_text(),
        "summary": json.loads((folder / "summary.json").read_text()),
        "runs": runs,
        "others": sorted(p.name for p in folder.glob("[!.]*")),
    }


def test_killed_again_and_again_it_ends_with_the_records_of_a_run_that_was_not(
    tmp_path: Path,
) -> None:
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    whole.mkdir()
    evaluate(whole, tmp_path / "log of whole", 0.0)
    killed.mkdir()
    ends = [in_child(killed, log, 0.04 + 0.013 * attempt) for attempt in range(40)]
    assert ends[-1], "it came through in the end"
    assert ends.count(False) >= 3, "it was really killed"
    assert kept(killed) == kept(whole)
    traces = [trace.prompt_id for trace in read_traces(killed / "traces.jsonl")]
    assert traces == [row["id"] for row in ROWS]
    # An episode whose trace a kill came before is run again; one whose trace is whole never is.
    asked = log.read_text().splitlines()
    assert len(asked) == len(set(asked)) <= len(ROWS)


def test_two_evaluations_in_one_folder_do_not_ask_the_same(tmp_path: Path) -> None:
    with (tmp_path / "traces.jsonl").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another evaluation writes there"):
            evaluate(tmp_path, tmp_path / "log", 0.0)
    evaluate(tmp_path, tmp_path / "log", 0.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_itself_killed_twice_gives_the_records_of_a_run_that_was_not(
    tmp_path: Path,
) -> None:
    policy, data = tmp_path / "policy", tmp_path / "data"
    tiny_hybrid(0, vocab_size=1024, eos_token_id=1).save_pretrained(policy)
    tokenizer().save_pretrained(policy)
    data.mkdir()
    page = {"docid": "1", "text": "the gate is shut in winter"}
    (data / "corpus.jsonl").write_text(json.dumps(page) + "\n")
    rows = [{"id": f"q{at}", "question": f"when {at}?", "answer": "w"} for at in range(QUESTIONS)]
    (data / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def start(folder: Path) -> subprocess.Popen[bytes]:
        call = [sys.executable, "scripts/evaluate.py", "--model", str(policy), "--data", str(data)]
        with (tmp_path / "log").open("ab") as log:
            return subprocess.Popen(
                [*call, *SETTINGS, "--output", str(folder)],
                cwd=ROOT,
                env=env,
                stdout=log,
                stderr=log,
            )

    def lines(folder: Path) -> int:
        path = folder / "traces.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait() == 0
    for wanted in (3, 9):
        process = start(killed)
        while lines(killed) < wanted and process.poll() is None:
            time.sleep(0.005)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    before = [trace.prompt_id for trace in read_traces(killed / "traces.jsonl")]
    assert 9 <= len(before) < QUESTIONS
    assert start(killed).wait() == 0
    names = [trace.prompt_id for trace in read_traces(killed / "traces.jsonl")]
    assert sorted(names) == sorted(row["id"] for row in rows), "none twice, none lost"
    assert names[: len(before)] == before, "what was there is there still"
    one, other = kept(whole), kept(killed)
    assert sorted(one["records"].splitlines()) == sorted(other["records"].splitlines())
    assert one["runs"] == other["runs"]
    assert one["summary"]["accuracy"] == other["summary"]["accuracy"]
