"""Run files against the writer and the reader of texttron/BrowseComp-Plus, as read on 2026-12-01.

Writer: `_persist_response` of search_agent/qwen_client.py, which ends in
`json.dump(record, f, indent=2, default=str)`. Reader: scripts_evaluation/evaluate_run.py. Both at
commit b90a68c.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octopus_trl.errors import ConfigError
from octopus_trl.eval.records import RETRIEVAL, write_browsecomp
from octopus_trl.trace import Segment, ThreadRecord, Trace

MODEL = {"model": "Qwen/Qwen3.5-4B", "max_output_tokens": 2048}
# What that writer leaves of: one search that showed two documents, one of them opened, an answer.
FROZEN = r"""{
  "metadata": {
    "model": "Qwen/Qwen3.5-4B",
    "max_output_tokens": 2048,
    "output_dir": "runs"
  },
  "query_id": "769",
  "tool_call_counts": {
    "open": 1,
    "search": 1
  },
  "status": "completed",
  "retrieved_docids": [
    "10117",
    "5"
  ],
  "result": [
    {
      "type": "tool_call",
      "tool_name": "search",
      "arguments": "{\"query\": \"caf\\u00e9 \\\"north\\\"\"}",
      "output": "[\n  {\n    \"docid\": \"5\"\n  },\n  {\n    \"docid\": \"10117\"\n  }\n]"
    },
    {
      "type": "tool_call",
      "tool_name": "open",
      "arguments": "{\"docid\": \"5\", \"page\": 1}",
      "output": "{\n  \"docid\": \"5\"\n}"
    },
    {
      "type": "output_text",
      "tool_name": null,
      "arguments": null,
      "output": "Explanation: a [5]\nExact Answer: Caf\u00e9\nConfidence: 80%"
    }
  ]
}"""


def episode(name: str = "769", status: str = "committed", result: str | None = "answer") -> Trace:
    segments = [Segment(0, 0, None, "prompt", [1] * 3), Segment(1, 0, 0, "action", [2])]
    calls = [["search", "ok"], ["open", "ok"], ["open", "refused"]]
    return Trace(
        f"{name}-s0",
        name,
        threads=[ThreadRecord(0, None, status=status, head=1)],
        segments=segments,
        events=[{"type": "turn", "thread": 0, "segment": 1, "calls": calls}],
        meta={
            "result": result,
            RETRIEVAL: [
                {
                    "tool": "search",
                    "arguments": {"query": 'café "north"'},
                    "docids": ["5", "10117"],
                },
                {"tool": "open", "arguments": {"docid": "5", "page": 1}, "docids": ["5"]},
            ],
        },
    ).place()


def written(folder: Path, *traces: Trace) -> dict[str, Any]:
    write_browsecomp(folder, list(traces), model=MODEL)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_run_file_has_the_bytes_of_the_upstream_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "Explanation: a [5]\nExact Answer: Café\nConfidence: 80%"
    files = written(Path("runs"), episode(result=text))
    assert files == {"run_769.json": FROZEN.encode("ascii")}
    assert json.dumps(json.loads(FROZEN), indent=2, default=str) == FROZEN


def read_as_upstream(path: Path, evidence: list[str]) -> dict[str, Any]:
    """Read what the upstream evaluation reads, by the same steps."""
    run = json.loads(path.read_text(encoding="utf-8"))
    response = ""
    if len(run["result"]) > 0 and run["result"][-1]["type"] == "output_text":
        response = run["result"][-1]["output"]
    shown: set[str] = set()
    for item in run["result"]:
        if item["type"] == "tool_call" and "search" in str(item["tool_name"] or "").lower():
            shown |= {str(hit["docid"]) for hit in json.loads(item["output"])}
    return {
        "query_id": str(run["query_id"]),
        "judged": response != "" and run["status"] == "completed",
        "recall": len(set(run["retrieved_docids"]) & set(evidence)) / len(evidence),
        "shown": shown,
        "retrieved": set(run["retrieved_docids"]),
        "calls": sum(run["tool_call_counts"].values()),
        "model": run["metadata"]["model"],
    }


@pytest.mark.parametrize(
    ("status", "result", "judged"),
    [
        ("committed", "answer", True),
        ("committed", "", False),
        ("cut", None, False),
        ("failed", None, False),
    ],
)
def test_the_upstream_reader_finds_answer_status_and_documents(
    tmp_path: Path, status: str, result: str | None, judged: bool
) -> None:
    written(tmp_path, episode(status=status, result=result))
    (path,) = tmp_path.glob("run_*.json")
    found = read_as_upstream(path, ["10117", "9"])
    assert (found["query_id"], found["judged"], found["recall"]) == ("769", judged, 0.5)
    assert found["shown"] == found["retrieved"] == {"5", "10117"}
    assert (found["calls"], found["model"]) == (2, MODEL["model"])
    assert json.loads(path.read_text())["status"] == ("completed" if judged else "incomplete")


def test_ids_that_differ_never_share_a_file_and_one_id_has_one(tmp_path: Path) -> None:
    names = ["a/b", "a_b", "a b", "../up", "ü" * 300, "a" * 300, "a" * 301]
    files = written(tmp_path, *(episode(name) for name in names))
    assert len(files) == len(names)
    assert {json.loads(text)["query_id"] for text in files.values()} == set(names)
    assert all(name.startswith("run_") and name.endswith(".json") for name in files)
    assert "run_a_b.json" in files
    with pytest.raises(ConfigError, match="several episodes"):
        written(tmp_path, episode(), episode())
