"""`scripts/evaluate.py` and `ask.py` from the command line, with what people get wrong."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octopus_trl.agent.corpus import Corpus
from octopus_trl.agent.opensearch import connect, fill_index
from octopus_trl.agent.search import index_path, write_index
from octopus_trl.errors import ConfigError
from octopus_trl.eval.benchmarks.browsecomp_plus import CANARY_VARIABLE, encode
from octopus_trl.eval.policy_settings import rollout_settings
from octopus_trl.eval.run import Evaluation
from octopus_trl.eval.seal_join_studio import WORLD_ROLLOUT
from octopus_trl.trace_files import TraceWriter, read_traces
from tests.agent.search_server import SearchServer, serving
from tests.eval.judge_server import NO, YES, JudgeServer, said
from tests.train.runs import save_untrained

ROOT = Path(__file__).parents[2]
CANARY = "made-up canary 0123"
SHORT = ("--window", "1024", "--max-turns", "1", "--max-new-tokens", "4", "--live", "2")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_untrained(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A corpus of five pages and three questions."""
    folder = tmp_path / "data"
    folder.mkdir()
    pages = [{"docid": str(at), "text": f"gate {at} is shut in winter {at}"} for at in range(5)]
    questions = [{"id": f"q{at}", "question": f"when {at}?", "answer": f"w{at}"} for at in range(3)]
    write(folder / "corpus.jsonl", pages)
    write(folder / "questions.jsonl", questions)
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Script:
    """Runs a script in this process as a shell would."""

    def __init__(self, name: str, monkeypatch: Any, capsys: Any, *always: str) -> None:
        self.name, self.always = name, always
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *words: object) -> Ended:
        argv = [self.name, *self.always, *map(str, words)]
        self._monkeypatch.setattr(sys, "argv", argv)
        self._capsys.readouterr()
        try:
            runpy.run_path(str(ROOT / "scripts" / self.name), run_name="__main__")
            code: Any = 0
        except SystemExit as end:
            code = end.code or 0
        said_out, said_err = self._capsys.readouterr()
        assert "Traceback" not in said_err
        return Ended(code, said_out, said_err)


@pytest.fixture
def evaluate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], policy: Path, data: Path
) -> Script:
    always = ("--model", str(policy), "--data", str(data), *SHORT)
    return Script("evaluate.py", monkeypatch, capsys, *always)


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    with serving(JudgeServer()) as server:
        yield server


def answering(monkeypatch: pytest.MonkeyPatch, answers: dict[str, str]) -> None:
    """Let every episode commit what its question is given here; the policy never commits."""
    grade = Evaluation._grade_at_once

    def commit(self: Evaluation, row: Any, trace: Any) -> Any:
        trace.meta["result"] = answers[trace.prompt_id]
        return grade(self, row, trace)

    monkeypatch.setattr(Evaluation, "_grade_at_once", commit)


def records(folder: Path) -> dict[str, Any]:
    lines = (folder / "records.jsonl").read_text().splitlines()
    return {record["query_id"]: record for record in map(json.loads, lines)}


def last(ended: Ended) -> str:
    return ended.err.strip().splitlines()[-1]


# --- what is asked for


def test_settings_go_from_the_world_to_the_recipe_to_what_is_given(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("window: 900\ndisabled_tools: [fork]\nlearning_rate: 1.0\nsearch_k: 7\n")
    none: dict[str, Any] = {"window": None, "agent": None}
    assert rollout_settings(world=False, recipe=None, given=none) == {}
    assert rollout_settings(world=True, recipe=None, given=none) == dict(WORLD_ROLLOUT)
    merged = rollout_settings(world=True, recipe=str(recipe), given={**none, "search_k": 2})
    assert merged["window"] == 900
    assert merged["search_k"] == 2
    assert merged["disabled_tools"] == ("fork",)
    assert "learning_rate" not in merged
    assert merged["system_prompt"] == WORLD_ROLLOUT["system_prompt"]


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1,\nb: }"])
def test_a_recipe_that_is_none_is_refused_by_name(tmp_path: Path, text: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    for path in (recipe, tmp_path / "missing.yaml"):
        with pytest.raises(ConfigError, match=rf"--recipe {path}: "):
            rollout_settings(world=False, recipe=str(path), given={})


def test_an_evaluation_leaves_records_runs_and_a_summary_of_every_question(
    evaluate: Script, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = evaluate("--output", out, "--browsecomp-runs")
    assert ended.code == 0
    summary = json.loads(ended.out)
    assert (summary["n"], summary["accuracy"], summary["graded_by"]) == (3, 0.0, {"no_answer": 1.0})
    assert set(records(out)) == {"q0", "q1", "q2"}
    assert len(list((out / "runs").glob("run_*.json"))) == 3
    assert summary["setting"]["corpus"]
    assert evaluate("--output", out, "--browsecomp-runs").code == 0, "nothing is asked again"
    assert sum(1 for _ in read_traces(out / "traces.jsonl")) == 3


def test_benchmarks_and_their_options_come_from_the_command_line(
    evaluate: Script, tmp_path: Path
) -> None:
    rows = [{"id": str(at), "question": f"Q{at}?", "golden_answers": ["a"]} for at in range(9)]
    table = write(tmp_path / "qa.jsonl", rows)
    out = tmp_path / "out"
    asked = ("--benchmark", "qa", "--source", table, "--output")
    assert evaluate(*asked, out, "--loader-options", "limit=2").code == 0
    assert set(records(out)) == {"0", "1"}
    for word, says in (
        ("limt=2", "has no option 'limt'; its options are split, config"),
        ("limit", "must be KEY=VALUE"),
        ("limit=two", "of the wrong kind"),
    ):
        ended = evaluate(*asked, tmp_path / "x", "--loader-options", word)
        assert (ended.code, says in last(ended)) == (2, True), last(ended)


def test_a_judge_on_a_server_decides_what_exact_match_leaves_open(
    evaluate: Script, tmp_path: Path, judge: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, {"q0": "w0", "q1": "near", "q2": "far"})
    judge.reply = lambda b: (200, said(YES if "near" in b["messages"][0]["content"] else NO))
    out = tmp_path / "out"
    named = ("--judge-model", "pinned", "--judge-url", judge.url, "--output", out)
    ended = evaluate(*named)
    assert ended.code == 0
    found = {name: (r["score"], r["graded_by"]) for name, r in records(out).items()}
    assert found == {"q0": (1.0, "exact"), "q1": (1.0, "judge"), "q2": (0.0, "judge")}
    assert json.loads(ended.out)["graded_by"] == {"exact": 1 / 3, "judge": 2 / 3}
    assert len(judge.bodies) == 2
    assert evaluate(*named).code == 0
    assert len(judge.bodies) == 2, "verdicts are kept"
    ended = evaluate("--judge-url", judge.url, "--output", tmp_path / "x")
    assert (ended.code, "without judge_model" in last(ended)) == (2, True)


@pytest.mark.parametrize(
    ("reply", "score", "says"),
    [
        ((200, said("who knows")), 0.0, "to 3 of 3 answers the judge replied without a verdict"),
        ((400, {}), None, "3 of 3 answers have no grade, the judge could not be reached"),
    ],
)
def test_a_judge_of_nonsense_or_none_ends_with_1_and_is_asked_again(
    evaluate: Script,
    tmp_path: Path,
    judge: JudgeServer,
    monkeypatch: pytest.MonkeyPatch,
    reply: tuple[int, Any],
    score: float | None,
    says: str,
) -> None:
    answering(monkeypatch, dict.fromkeys(("q0", "q1", "q2"), "words"))
    judge.reply = lambda body: reply
    out = tmp_path / "out"
    named = ("--judge-model", "pinned", "--judge-url", judge.url, "--output", out)
    ended = evaluate(*named)
    assert (ended.code, says in last(ended)) == (1, True), last(ended)
    assert {record["score"] for record in records(out).values()} == {score}
    judge.reply = lambda body: (200, said(YES))
    assert evaluate(*named).code == 0
    assert {record["score"] for record in records(out).values()} == {1.0}
    assert sum(1 for _ in read_traces(out / "traces.jsonl")) == 3, "no episode was run again"


def test_opensearch_serves_an_evaluation_and_its_corpus_is_part_of_the_setting(
    evaluate: Script, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with serving(SearchServer()) as server:
        for name, folder in (("one", data), ("other", tmp_path / "other")):
            folder.mkdir(exist_ok=True)
            if name == "other":
                write(folder / "corpus.jsonl", [{"docid": "9", "text": "another corpus"}])
            fill_index(Corpus(folder), connect(server.url), name, k1=0.9, b=0.4)
        asked = ("--search-url", server.url, "--output")
        assert evaluate(*asked, out, "--index", "one").code == 0
        assert len(records(out)) == 3
        for words, says in (
            ((*asked, out, "--index", "other"), "another setting (corpus)"),
            ((*asked, tmp_path / "x", "--index", "none"), "no index 'none'"),
            ((*asked, tmp_path / "x", "--index", "one", "--k1", "2"), "k1 of index 'one' is 0.9"),
            ((*asked, tmp_path / "x"), "backend=opensearch without index"),
        ):
            ended = evaluate(*words)
            assert (ended.code, says in last(ended)) == (2, True), last(ended)


def test_pyserini_says_what_it_lacks(evaluate: Script, tmp_path: Path) -> None:
    words = ("--backend", "pyserini", "--index", tmp_path, "--output", tmp_path / "out")
    ended = evaluate(*words)
    assert (ended.code, "no Lucene index" in last(ended)) == (2, True)


# --- what people get wrong


def encoded(rows: int, canary: str = CANARY) -> list[dict[str, Any]]:
    return [
        {
            "query_id": str(at),
            "query": encode(f"SECRET {at}", canary),
            "answer": encode("SECRET", canary),
        }
        for at in range(rows)
    ]


@pytest.mark.parametrize(
    ("canary", "rows", "says"),
    [
        (None, encoded(2), "no canary"),
        ("another one", encoded(2), "not one of 2 questions decodes: the canary is a wrong one"),
        (CANARY, [*encoded(1), {**encoded(2)[1], "query": "no base64!"}], "is no base64"),
        (CANARY, [*encoded(1), {**encoded(2)[1], "query": "AAAA"}], "1 of 2 questions do not"),
        (CANARY, [encoded(1)[0], encoded(1)[0]], "id '0' is in rows 0 and 1"),
        (CANARY, [{**encoded(1)[0], "query_id": ""}], "row 0 has id ''"),
        (CANARY, [{"query": "x", "answer": "y"}], "no column query_id"),
    ],
)
def test_broken_browsecomp_plus_is_one_error_and_shows_no_secret(
    evaluate: Script,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    canary: str | None,
    rows: list[dict[str, Any]],
    says: str,
) -> None:
    monkeypatch.delenv(CANARY_VARIABLE, raising=False)
    if canary is not None:
        monkeypatch.setenv(CANARY_VARIABLE, canary)
    table = write(tmp_path / "plus.jsonl", rows)
    asked = ("--benchmark", "browsecomp-plus", "--source", table, "--output", tmp_path / "out")
    ended = evaluate(*asked, "--loader-options", "expected=null")
    assert (ended.code, says in last(ended)) == (2, True), last(ended)
    assert "SECRET" not in ended.out + ended.err
    ended = evaluate(*asked)
    assert ended.code == 2, "830 questions, or the part is named"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"id": "q0", "question": "again?", "answer": "a"}, "q0"),
        ({"question": "no id?", "answer": "a"}, "id is None"),
        ({"id": "q9", "answer": "a"}, "question"),
        ({"id": "q9", "question": "no gold?"}, "at least one accepted answer"),
    ],
)
def test_a_repeated_or_missing_id_is_one_error_with_its_line(
    evaluate: Script, data: Path, tmp_path: Path, line: dict[str, Any], says: str
) -> None:
    with (data / "questions.jsonl").open("a") as stream:
        stream.write(json.dumps(line) + "\n")
    ended = evaluate("--output", tmp_path / "out")
    assert (ended.code, says in last(ended)) == (2, True), last(ended)
    assert "questions.jsonl:4" in last(ended)


def test_another_corpus_or_other_questions_under_a_started_evaluation_are_refused(
    evaluate: Script, data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert evaluate("--output", out, "--limit", 1).code == 0
    held = (out / "records.jsonl").read_bytes()
    for name, line in (
        ("corpus", {"docid": "x", "text": "one page more"}),
        ("questions", {"id": "q9", "question": "one more?", "answer": "a"}),
    ):
        before = (data / f"{name}.jsonl").read_text()
        (data / f"{name}.jsonl").write_text(before + json.dumps(line) + "\n")
        ended = evaluate("--output", out)
        assert (ended.code, f"another setting ({name})" in last(ended)) == (2, True), last(ended)
        (data / f"{name}.jsonl").write_text(before)
    assert (out / "records.jsonl").read_bytes() == held
    assert evaluate("--output", out).code == 0
    assert len(records(out)) == 3


def test_a_recipe_that_was_edited_under_a_started_evaluation_is_refused(
    evaluate: Script, tmp_path: Path
) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text("max_turns: 1\nmax_new_tokens: 4\n")
    asked = ("--recipe", recipe, "--output", out, "--limit", 1)
    assert evaluate(*asked).code == 0
    recipe.write_text("max_turns: 2\nmax_new_tokens: 4\n")
    ended = evaluate(*asked)
    assert (ended.code, "another setting (recipe_sha256)" in last(ended)) == (2, True), last(ended)


def test_an_index_of_another_corpus_in_its_place_is_refused(
    evaluate: Script, data: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write(other / "corpus.jsonl", [{"docid": "9", "text": "another corpus"}])
    built = write_index(Corpus(other), k1=0.9, b=0.4)
    shutil.copytree(built, index_path(Corpus(data), 0.9, 0.4))
    ended = evaluate("--output", tmp_path / "out")
    assert (ended.code, "serves only the corpus and settings" in last(ended)) == (2, True)


def test_files_cut_in_half_are_gone_on_from_and_broken_ones_are_named(
    evaluate: Script, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert evaluate("--output", out, "--browsecomp-runs").code == 0
    whole = {
        path: path.read_bytes() for path in out.rglob("*.json*") if path.name != "summary.json"
    }
    for path, data in whole.items():
        path.write_bytes(data[: len(data) // 2])
        ended = evaluate("--output", out, "--browsecomp-runs")
        if path.name == "setting.json":
            assert (ended.code, "is no setting" in last(ended)) == (2, True)
            path.write_bytes(data)
            continue
        assert ended.code == 0, last(ended)
        found = {p.prompt_id for p in read_traces(out / "traces.jsonl")}
        assert found == {"q0", "q1", "q2"}
        assert set(records(out)) == found
        for run in (out / "runs").iterdir():
            assert json.loads(run.read_text())["query_id"] in found
    lines = (out / "traces.jsonl").read_bytes().splitlines(keepends=True)
    (out / "traces.jsonl").write_bytes(lines[0][:50] + b"\n" + b"".join(lines[1:]))
    held = (out / "records.jsonl").read_bytes()
    ended = evaluate("--output", out)
    assert (ended.code, "traces.jsonl line 1" in last(ended)) == (2, True)
    assert (out / "records.jsonl").read_bytes() == held


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB, where this process may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    call = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_ends_with_1_and_what_was_there_is_intact(
    evaluate: Script, small_disk: Path
) -> None:
    out, filler = small_disk / "out", small_disk / "filler"
    assert evaluate("--output", out, "--limit", 1).code == 0
    held = {path.name: path.read_bytes() for path in out.iterdir()}
    filler.touch()
    try:
        with filler.open("ab", buffering=0) as stream:
            while True:
                stream.write(b"x" * 512)
    except OSError:
        pass
    ended = evaluate("--output", out)
    assert ended.code in (1, 2), "while writing, or before anything was computed"
    assert "No space left on device" in last(ended)
    for name, data in held.items():  # a trace may have come half way behind the whole ones
        assert (out / name).read_bytes()[: len(data)] == data
    assert {path.name for path in out.iterdir()} == held.keys()
    filler.unlink()
    assert evaluate("--output", out).code == 0
    assert len(records(out)) == 3


def test_a_disk_that_fills_up_within_a_trace_loses_that_one_alone(
    evaluate: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.write, 0

    def write_half(descriptor: int, data: Any) -> int:
        nonlocal calls
        if not bytes(data).startswith(b'{"schema"'):
            return real(descriptor, data)
        calls += 1
        if calls == 2:
            real(descriptor, bytes(data)[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    out = tmp_path / "out"
    monkeypatch.setattr(os, "write", write_half)
    ended = evaluate("--output", out)
    assert (ended.code, "No space left on device" in last(ended)) == (1, True)
    assert "the episodes so far are kept" in last(ended)
    assert sum(1 for _ in read_traces(out / "traces.jsonl")) == 1
    monkeypatch.setattr(os, "write", real)
    assert evaluate("--output", out).code == 0
    assert len(records(out)) == 3


def test_ctrl_c_keeps_what_has_ended_and_the_same_command_goes_on(
    evaluate: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = TraceWriter.append

    def append_and_interrupt(self: TraceWriter, trace: Any) -> None:
        append(self, trace)
        os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "out"
    monkeypatch.setattr(TraceWriter, "append", append_and_interrupt)
    ended = evaluate("--output", out)
    assert (ended.code, last(ended).startswith("stopped; the episodes so far")) == (130, True)
    assert sum(1 for _ in read_traces(out / "traces.jsonl")) >= 1
    monkeypatch.setattr(TraceWriter, "append", append)
    assert evaluate("--output", out).code == 0
    assert len(records(out)) == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--limit", "0"), "--limit 0: must be at least 1"),
        (("--adapter", "no/where"), "--adapter=no/where"),
        (("--data", "data/seal_join", "--backend", "opensearch"), "drop --backend"),
        (("--recipe", "missing.yaml"), "--recipe missing.yaml: cannot be read"),
    ],
)
def test_a_wrong_word_is_one_clear_error(
    evaluate: Script, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    ended = evaluate("--output", tmp_path / "out", *words)
    assert (ended.code, says in last(ended)) == (2, True), last(ended)


# --- ask


def test_one_question_is_answered_over_a_folder_and_over_a_server(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    policy: Path,
    data: Path,
    tmp_path: Path,
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("window: 1024\nmax_turns: 1\nmax_new_tokens: 4\n")
    ask = Script("ask.py", monkeypatch, capsys, "--model", str(policy), "--recipe", str(recipe))
    trace = tmp_path / "trace.jsonl"
    ended = ask("--data", data, "--trace", trace, "When is the gate shut?")
    assert ended.code == 0
    assert "no answer: the root ended without a commit" in ended.out
    (kept,) = read_traces(trace)
    assert kept.threads
    with serving(SearchServer()) as server:
        fill_index(Corpus(data), connect(server.url), "one", k1=0.9, b=0.4)
        served = ask("--search-url", server.url, "--index", "one", "When is the gate shut?")
    assert served.code == 0
    for words, says in (
        (("--data", data, " "), "the question is empty"),
        (("When?",), "--data is missing"),
        (("--data", "nowhere", "When?"), "no such file"),
        (("--data", data, "--backend", "pyserini", "When?"), "without index"),
    ):
        ended = ask(*words)
        assert (ended.code, says in last(ended)) == (2, True), last(ended)
