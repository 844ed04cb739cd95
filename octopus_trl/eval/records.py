"""What an evaluation keeps of each question: one line of `records.jsonl`, and the run format of
BrowseComp-Plus.

A line is derived from the episode's trace and its grade alone, so that a line that a killed
process did not write is written by the next. Neither format holds the question or a gold answer:
some benchmarks forbid to write them in clear.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octopus_trl.errors import ConfigError
from octopus_trl.files import write_whole
from octopus_trl.trace import Trace

RETRIEVAL = "retrieval"  # key of a trace's meta: searches and opens, in the order they ended


def record_of(trace: Trace, stage: str | None) -> dict[str, Any]:
    """Give the record of an episode.

    Args:
        stage: what decided its grade (`eval.grader.Stage`), None where it is not graded yet.
    """
    counts = Counter(
        name
        for event in trace.events
        if event.get("type") == "turn"
        for name, outcome in event.get("calls", [])
        if outcome == "ok"
    )
    root = next(thread for thread in trace.threads if thread.parent is None)
    return {
        "query_id": trace.prompt_id,
        "episode_id": trace.episode_id,
        "score": trace.reward,
        "graded_by": stage,
        "status": "completed" if root.status == "committed" else root.status,
        "answer": trace.meta.get("result"),
        "tool_call_counts": dict(sorted(counts.items())),
        "retrieved_docids": retrieved(trace),
        "opened_docids": trace.meta.get("opened_docs", []),
        "threads": len(trace.threads),
        "tokens": sum(trace.lengths),
        "sampled_tokens": trace.num_owned,
        "hops": trace.meta.get("hops", trace.meta.get("branches")),
    }


def retrieved(trace: Trace) -> list[str]:
    """Give the union of all documents that searches of an episode showed, sorted."""
    found = {
        docid
        for call in trace.meta.get(RETRIEVAL, [])
        if call["tool"] == "search"
        for docid in call["docids"]
    }
    return sorted(found)


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Read records by query id, the last line of each; none where there is no file.

    A last line without its newline is what a killed writer leaves; it is skipped.

    Raises:
        ConfigError: another line is broken.
    """
    if not path.is_file():
        return {}
    records: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            record = json.loads(line)
            records[record["query_id"]] = record
        except (ValueError, KeyError, TypeError) as error:
            if not line.endswith(b"\n"):
                break
            raise ConfigError(
                f"{path} line {number}: is no record ({error}); remove the line, the traces beside "
                "it give it again"
            ) from error
    return records


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write all records at once, whole or not at all."""
    write_whole(path, "".join(json.dumps(record) + "\n" for record in records))


def write_browsecomp(folder: Path, traces: Sequence[Trace], *, model: Mapping[str, Any]) -> None:
    """Write one `run_ID.json` an episode as BrowseComp-Plus's evaluation reads them.

    Keys, their order and their types are those of `search_agent/qwen_client.py` of
    texttron/BrowseComp-Plus, as are the bytes around them: two spaces, non-ASCII escaped, no last
    newline. A search is a `tool_call` item whose output lists docids and no text; the last item of
    `result` is the committed answer, empty where there is none, and `status` is then `incomplete`.
    Its clients name files by the time, its evaluation reads `run_*.json`; ours carry the query.

    Args:
        model: the metadata `model` and `max_output_tokens`.
    Raises:
        ConfigError: two episodes of one query: its evaluation would count both.
    """
    seen = Counter(trace.prompt_id for trace in traces)
    if twice := [name for name, count in seen.items() if count > 1]:
        raise ConfigError(f"queries {twice[:5]} have several episodes; a run has one of each")
    folder.mkdir(parents=True, exist_ok=True)
    for trace in traces:
        text = json.dumps(browsecomp_run(trace, folder, model), indent=2)
        write_whole(folder / f"run_{_file_part(trace.prompt_id)}.json", text)


def browsecomp_run(trace: Trace, folder: Path, model: Mapping[str, Any]) -> dict[str, Any]:
    """Give an episode in BrowseComp-Plus's run format."""
    record = record_of(trace, None)
    items = [_tool_call(call) for call in trace.meta.get(RETRIEVAL, [])]
    answer = trace.meta.get("result") or ""
    items.append({"type": "output_text", "tool_name": None, "arguments": None, "output": answer})
    return {
        "metadata": {
            "model": model["model"],
            "max_output_tokens": model["max_output_tokens"],
            "output_dir": str(folder),
        },
        "query_id": trace.prompt_id,
        "tool_call_counts": record["tool_call_counts"],
        "status": "completed" if record["status"] == "completed" and answer else "incomplete",
        "retrieved_docids": record["retrieved_docids"],
        "result": items,
    }


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    found: list[dict[str, str]] = [{"docid": docid} for docid in call["docids"]]
    return {
        "type": "tool_call",
        "tool_name": call["tool"],
        "arguments": json.dumps(call["arguments"]),
        "output": json.dumps(found if call["tool"] == "search" else found[0], indent=2),
    }


def _file_part(query_id: str) -> str:
    """Give a query id as part of a file's name; ids that differ never share one."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", query_id)[:100]
    if safe == query_id:
        return safe
    return f"{safe}_{hashlib.sha256(query_id.encode()).hexdigest()[:12]}"
