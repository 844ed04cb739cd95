"""An evaluation survives its process; its records, run files and comparisons say what happened."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from octopus_trl.errors import ConfigError
from octopus_trl.eval.grader import AnswerReward
from octopus_trl.eval.paired import bootstrap_interval, compare, sign_test
from octopus_trl.eval.records import read_records, record_of, write_browsecomp
from octopus_trl.eval.run import Evaluation, RecordingTools
from octopus_trl.protocols import Page, SearchHit
from octopus_trl.trace import Segment, ThreadRecord, Trace
from octopus_trl.trace_files import TraceWriter, read_traces

ROWS = [
    {
        "id": f"q{at}",
        "question": f"hidden words {at}?",
        "answers": [str(at)],
        "gold_docs": ["d1", "d9"],
    }
    for at in range(7)
]


MODEL = {"model": "m", "max_output_tokens": 256}


class Corpus:
    def fingerprint(self) -> str:
        return "c"

    def search(self, query: str, k: int) -> list[SearchHit]:
        return [SearchHit(name, 1.0, name, "") for name in ("d2", "d1")]

    def open(self, docid: str, page: int = 1) -> Page:
        return Page(docid, docid, "text", page, 1)


class Runner:
    """Answers even questions rightly, and is interrupted after some."""

    def __init__(self, tools: RecordingTools, stop_after: int | None = None) -> None:
        self.tools, self.stop_after = tools, stop_after
        self.asked: list[str] = []

    def run(
        self, rows: Sequence[Mapping[str, Any]], *, seed: int, on_trace: Callable[[Trace], None]
    ) -> None:
        for row in rows:
            if len(self.asked) == self.stop_after:
                raise KeyboardInterrupt
            self.asked.append(row["id"])
            bound = self.tools.bind(row)
            bound.search("words", 2)
            bound.open("d1", 1)
            on_trace(episode(row["id"], int(row["id"][1:])))


def episode(name: str, at: int) -> Trace:
    segments = [Segment(0, 0, None, "prompt", [1] * 3), Segment(1, 0, 0, "action", [2])]
    calls = [["search", "ok"], ["open", "ok"], ["open", "refused"]]
    return Trace(
        f"{name}-s0",
        name,
        threads=[ThreadRecord(0, None, status="committed", head=1)],
        segments=segments,
        events=[{"type": "turn", "thread": 0, "segment": 1, "calls": calls}],
        meta={"question": "hidden words", "result": str(at) if at % 2 == 0 else "no"},
    ).place()


def evaluation(folder: Path, **changes: Any) -> Evaluation:
    folder.mkdir(exist_ok=True)
    fields: dict[str, Any] = {"grader": AnswerReward(), "setting": {"seed": 0}, **changes}
    return Evaluation(folder, fields.pop("rows", ROWS), **fields)


def ask(one: Evaluation, stop_after: int | None = None) -> tuple[list[str], list[tuple[int, ...]]]:
    tools = RecordingTools(Corpus())
    runner, told = Runner(tools, stop_after), []

    def tell(*counts: int) -> None:
        told.append(counts)

    try:
        one.run(runner, tools, seed=0, tell=tell)  # type: ignore[arg-type]  # a scripted runner
    except KeyboardInterrupt:
        assert stop_after is not None
    return runner.asked, told


def test_a_killed_evaluation_repeats_no_question_and_loses_none(tmp_path: Path) -> None:
    first, _ = ask(evaluation(tmp_path), stop_after=3)
    with (tmp_path / "traces.jsonl").open("ab") as stream:
        stream.write(b'{"schema": 1, "episode_id": "q3')  # the line that a kill cut
    second, told = ask(evaluation(tmp_path))
    assert first + second == [row["id"] for row in ROWS]
    assert told[0] == (3, 2, 7)
    assert told[-1] == (7, 4, 7)
    summary = evaluation(tmp_path).finish()
    assert (summary["n"], summary["accuracy"], summary["ungraded"]) == (7, 4 / 7, 0)
    assert summary["statistics"]["gold_recall"] == 0.5
    assert summary["bootstrap_95"][0] <= 4 / 7 <= summary["bootstrap_95"][1]
    assert list(read_records(tmp_path / "records.jsonl")) == [row["id"] for row in ROWS]


def test_threads_that_failed_are_told_by_reason(tmp_path: Path) -> None:
    one = evaluation(tmp_path)
    with TraceWriter(tmp_path / "traces.jsonl") as writer:
        for at, row in enumerate(ROWS):
            trace = episode(str(row["id"]), at)
            reason = "ConfigError: window=8" if at else "the root has ended"
            status = "failed" if at else "cut"
            trace.events.append({"type": "end", "thread": 0, "status": status, "reason": reason})
            writer.append(trace)
    one.finish()
    failed = len(ROWS) - 1
    assert one.failures == [
        f"{failed} threads failed in {len(ROWS)} episodes: ConfigError: window=8"
    ]


def test_a_limit_is_raised_later_and_another_setting_is_refused(tmp_path: Path) -> None:
    ask(evaluation(tmp_path, rows=ROWS[:2]))
    asked, _ = ask(evaluation(tmp_path))
    assert asked == [row["id"] for row in ROWS[2:]]
    with pytest.raises(ConfigError, match="another setting"):
        evaluation(tmp_path, setting={"seed": 1})
    with pytest.raises(ConfigError, match="come twice"):
        evaluation(tmp_path, rows=[ROWS[0], ROWS[0]])


def test_secret_questions_and_gold_answers_are_written_nowhere(tmp_path: Path) -> None:
    one = evaluation(tmp_path, private=True)
    ask(one)
    one.finish(browsecomp=MODEL)
    for path in tmp_path.rglob("*.json*"):
        assert "hidden words" not in path.read_text()


def test_run_files_have_the_keys_that_browsecomp_plus_reads(tmp_path: Path) -> None:
    one = evaluation(tmp_path)
    ask(one)
    one.finish(browsecomp=MODEL)
    files = sorted((tmp_path / "runs").glob("run_*.json"))
    assert len(files) == 7
    text = files[0].read_text()
    run = json.loads(text)
    assert text == json.dumps(run, indent=2)
    assert list(run) == [
        "metadata",
        "query_id",
        "tool_call_counts",
        "status",
        "retrieved_docids",
        "result",
    ]
    assert run["tool_call_counts"] == {"open": 1, "search": 1}
    assert run["retrieved_docids"] == ["d1", "d2"]
    last = {"type": "output_text", "tool_name": None, "arguments": None, "output": "0"}
    assert (run["status"], run["result"][-1]) == ("completed", last)
    traces = list(read_traces(tmp_path / "traces.jsonl"))
    with pytest.raises(ConfigError, match="several episodes"):
        write_browsecomp(tmp_path / "x", [traces[0], traces[0]], model=MODEL)


def test_a_record_cut_in_half_is_skipped_and_a_broken_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    whole = json.dumps(record_of(episode("q0", 0), "exact"))
    path.write_text(whole + "\n" + whole[:20])
    assert list(read_records(path)) == ["q0"]
    path.write_text("{}\n" + whole + "\n")
    with pytest.raises(ConfigError, match="line 1"):
        read_records(path)


def test_runs_are_compared_question_by_question() -> None:
    first = {f"q{at}": 0.0 for at in range(10)} | {"a": 1.0, "only": 1.0}
    second = {f"q{at}": float(at < 8) for at in range(10)} | {"a": 0.0}
    figures = compare(first, second)
    assert (figures["n"], figures["gained"], figures["lost"]) == (11, 8, 1)
    assert figures["difference"] == pytest.approx(7 / 11)
    assert figures["p"] == pytest.approx(2 * (1 + 9) / 2**9)
    assert figures["interval_95"][0] < 7 / 11 < figures["interval_95"][1]
    assert (figures["only_first"], figures["only_second"]) == (1, 0)
    assert sign_test(0, 0) == 1.0
    with pytest.raises(ConfigError, match="share no"):
        compare({"a": 1.0}, {"b": 1.0})


def test_the_bootstrap_interval_agrees_with_the_normal_one_and_repeats() -> None:
    values = [1.0] * 400 + [0.0] * 600
    low, high = bootstrap_interval(values)
    half = 1.96 * (0.4 * 0.6 / 1000) ** 0.5
    assert (low, high) == pytest.approx((0.4 - half, 0.4 + half), abs=4e-3)
    assert bootstrap_interval(values) == (low, high)
    with pytest.raises(ConfigError, match="at least one"):
        bootstrap_interval([])
