"""An evaluation on disk: every question once, whatever kills the process in between.

`traces.jsonl` holds the episodes and is the truth; `records.jsonl`, the summary and the run files
derive from it and from the grades. A question whose trace is whole is never asked again.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octopus_trl.agent.recorder import failures
from octopus_trl.agent.rollout import EpisodeRunner, prompt_id_of
from octopus_trl.errors import ConfigError
from octopus_trl.eval.grader import AnswerReward, Grade
from octopus_trl.eval.metrics import summarise
from octopus_trl.eval.paired import bootstrap_interval
from octopus_trl.eval.records import (
    RETRIEVAL,
    read_records,
    record_of,
    write_browsecomp,
    write_records,
)
from octopus_trl.eval.trace_statistics import HOPS, statistics_of
from octopus_trl.files import write_whole
from octopus_trl.protocols import BindsExample, Page, SearchBackend, SearchHit
from octopus_trl.trace import Trace
from octopus_trl.trace_files import TraceWriter, read_traces

UNSETTLED = ("judge_unparsed", "judge_down")  # stages that another try may settle
COPIED = ("gold_docs", *HOPS)  # columns of a question that the statistics of its trace need

Progress = Callable[[int, int, int], None]
"""Called with the questions done, those right, and all of them."""


class RecordingTools:
    """A corpus that notes what each question searched for, was shown and opened."""

    def __init__(self, corpus: SearchBackend | BindsExample) -> None:
        self._corpus = corpus
        self._lock = threading.Lock()
        self._calls: dict[str, list[dict[str, Any]]] = {}

    def bind(self, example: Mapping[str, Any]) -> SearchBackend:
        """Give the view of one question."""
        corpus = self._corpus
        bound = corpus.bind(example) if isinstance(corpus, BindsExample) else corpus
        return _RecordingBackend(bound, prompt_id_of(example), self)

    def note(self, prompt_id: str, call: dict[str, Any]) -> None:
        """Keep a call; called on worker threads."""
        with self._lock:
            self._calls.setdefault(prompt_id, []).append(call)

    def take(self, prompt_id: str) -> list[dict[str, Any]]:
        """Give the calls of a question that has ended, and forget them."""
        with self._lock:
            return self._calls.pop(prompt_id, [])


class _RecordingBackend:
    def __init__(self, backend: SearchBackend, prompt_id: str, notes: RecordingTools) -> None:
        self._backend, self._prompt_id, self._notes = backend, prompt_id, notes

    def fingerprint(self) -> str:
        return self._backend.fingerprint()

    def search(self, query: str, k: int) -> Sequence[SearchHit]:
        hits = self._backend.search(query, k)
        docids = [hit.docid for hit in hits]
        call = {"tool": "search", "arguments": {"query": query}, "docids": docids}
        self._notes.note(self._prompt_id, call)
        return hits

    def open(self, docid: str, page: int = 1) -> Page:
        found = self._backend.open(docid, page)
        arguments = {"docid": docid, "page": page}
        call = {"tool": "open", "arguments": arguments, "docids": [found.docid]}
        self._notes.note(self._prompt_id, call)
        return found


class Evaluation:
    """Questions, their episodes on disk, and what derives from them.

    Args:
        folder: gets `setting.json`, `traces.jsonl`, `records.jsonl` and `summary.json`.
        rows: questions with `question`, `answers` and `id`; ids are unique.
        grader: decides what is right.
        setting: what the result depends on; a folder keeps one.
        private: keep the questions out of everything written in clear.

    Attributes:
        failures: after `finish`, why threads failed, a line for each reason.

    Raises:
        ConfigError: two rows share an id, or the folder holds another setting.
    """

    def __init__(
        self,
        folder: Path,
        rows: Sequence[Mapping[str, Any]],
        *,
        grader: AnswerReward,
        setting: Mapping[str, Any],
        private: bool = False,
    ) -> None:
        self.folder, self.grader, self.setting = folder, grader, dict(setting)
        self.rows = {prompt_id_of(row): row for row in rows}
        self._private = private
        self.failures: list[str] = []
        self._exact = AnswerReward()
        if len(self.rows) < len(rows):
            ids = [prompt_id_of(row) for row in rows]
            twice = sorted({name for name in ids if ids.count(name) > 1})
            raise ConfigError(f"questions {twice[:5]} come twice: ids are unique, rename them")
        keep_setting(folder / "setting.json", self.setting)

    def run(
        self, runner: EpisodeRunner, tools: RecordingTools, *, seed: int, tell: Progress
    ) -> None:
        """Ask every question that has no trace yet.

        Raises:
            ConfigError: another process asks them now.
        """
        kept = read_records(self.folder / "records.jsonl")
        path = self.folder / "traces.jsonl"
        with _alone(path), TraceWriter(path) as writer:
            done = {trace.prompt_id: trace for trace in read_traces(writer.path, check=False)}
            todo = [row for name, row in self.rows.items() if name not in done]
            scores = [
                kept[name]["score"] if name in kept else trace.reward
                for name, trace in done.items()
                if name in self.rows
            ]
            right, num = sum(score == 1.0 for score in scores), len(scores)
            tell(num, right, len(self.rows))

            def keep(trace: Trace) -> None:
                nonlocal right, num
                row = self.rows[trace.prompt_id]
                calls = tools.take(trace.prompt_id)
                opened = (d for call in calls if call["tool"] == "open" for d in call["docids"])
                trace.meta |= {RETRIEVAL: calls, "opened_docs": list(dict.fromkeys(opened))}
                trace.meta |= {key: row[key] for key in COPIED if row.get(key) is not None}
                if self._private:
                    trace.meta.pop("question", None)
                trace.reward = self._grade_at_once(row, trace)
                writer.append(trace)
                right, num = right + (trace.reward == 1.0), num + 1
                tell(num, right, len(self.rows))

            if todo:
                runner.run(todo, seed=seed, on_trace=keep)

    def finish(self, *, browsecomp: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Grade what is open, write records and summary, and give the summary.

        Args:
            browsecomp: metadata of run files (see `write_browsecomp`); given, they go to `runs/`.
        Raises:
            ConfigError: no question has an episode.
        """
        traces = [
            trace
            for trace in read_traces(self.folder / "traces.jsonl")
            if trace.prompt_id in self.rows
        ]
        self.failures = failures(traces)
        stages = self._grade(traces)
        write_records(
            self.folder / "records.jsonl",
            (record_of(trace, stages[trace.prompt_id]) for trace in traces),
        )
        if browsecomp is not None:
            write_browsecomp(self.folder / "runs", traces, model=browsecomp)
        graded = [trace for trace in traces if trace.reward is not None]
        summary: dict[str, Any] = {**summarise(graded)} if graded else {"n": 0}
        if graded:
            scores = [float(trace.reward or 0.0) for trace in graded]
            summary["bootstrap_95"] = list(bootstrap_interval(scores))
            summary["statistics"] = statistics_of(graded)
        summary["asked"], summary["ungraded"] = len(self.rows), len(traces) - len(graded)
        decided = list(stages.values())
        summary["graded_by"] = {
            str(stage): decided.count(stage) / len(decided)
            for stage in sorted(set(decided), key=str)
        }
        summary["setting"] = self.setting
        write_whole(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        return summary

    def _grade_at_once(self, row: Mapping[str, Any], trace: Trace) -> float | None:
        """Grade what needs no judge: it is asked once for all, the engine does not wait for it."""
        identity = self.grader.identity
        if not identity["exact_first"]:
            return None
        answer = trace.meta.get("result")
        (grade,) = self._exact.grade([str(row["question"])], [row["answers"]], [answer])
        open_case = identity["judge"] is not None and grade == Grade(0.0, "exact")
        return None if open_case else grade.score

    def _grade(self, traces: Sequence[Trace]) -> dict[str, str | None]:
        """Set the reward of each trace; gives what decided it."""
        kept = read_records(self.folder / "records.jsonl")
        stages: dict[str, str | None] = {}
        still: list[Trace] = []
        for trace in traces:
            record = kept.get(trace.prompt_id, {})
            settled = record.get("score") is not None and record.get("graded_by") not in UNSETTLED
            if settled and record.get("episode_id") == trace.episode_id:
                trace.reward, stages[trace.prompt_id] = record["score"], record.get("graded_by")
            else:
                still.append(trace)
        rows = [self.rows[trace.prompt_id] for trace in still]
        grades = self.grader.grade(
            [str(row["question"]) for row in rows],
            [row["answers"] for row in rows],
            [trace.meta.get("result") for trace in still],
        )
        for trace, grade in zip(still, grades, strict=True):
            trace.reward, stages[trace.prompt_id] = grade.score, grade.stage
        return stages


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a file for this process: two evaluations in one folder would ask everything twice."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{path}: another evaluation writes there; wait for it, or give another --output"
            ) from None
        yield
    finally:
        os.close(descriptor)


def keep_setting(path: Path, setting: Mapping[str, Any]) -> None:
    """Keep one setting a folder, so that a resumed evaluation never mixes two.

    What an older version did not know, and so did not write, is not compared.

    Raises:
        ConfigError: the folder holds another setting, or a broken one.
    """
    wanted = json.loads(json.dumps(setting))
    if path.exists():
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
            differing = sorted(key for key in held if held[key] != wanted.get(key))
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{path}: is no setting ({error}); give another --output") from error
        if differing:
            raise ConfigError(
                f"{path} holds another setting ({', '.join(differing)}): an evaluation goes on "
                "only with its own; give another --output"
            )
        return
    write_whole(path, json.dumps(wanted, indent=1) + "\n")
