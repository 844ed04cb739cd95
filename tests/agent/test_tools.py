"""Schemas, types and texts of the tools, and the pool that runs them."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from octopus_trl.agent.calls import RawCall
from octopus_trl.agent.pool import PoolCall, ToolPool
from octopus_trl.agent.tools import (
    BY_NAME,
    TOOLS,
    ToolCall,
    bind,
    offered,
    run_corpus_tool,
    wait_text,
)
from octopus_trl.errors import ToolError
from octopus_trl.protocols import Page, SearchHit
from tests.agent.fakes import ListCorpus, hang

NAMES = [tool.name for tool in TOOLS]


def raw(name: str, typed: bool = False, **arguments: Any) -> RawCall:
    return RawCall(name, arguments, typed=typed)


def test_the_seven_tools_have_valid_json_schemas() -> None:
    assert NAMES == [
        "fork",
        "read_thread",
        "wait_threads",
        "rewind",
        "commit",
        "search",
        "open",
    ]
    for tool in TOOLS:
        schema = json.loads(json.dumps(tool.schema()))["function"]
        properties = schema["parameters"]["properties"]
        assert schema["name"] == tool.name
        assert set(schema["parameters"]["required"]) <= set(properties)
        assert all(item["description"] for item in properties.values())
    assert BY_NAME["rewind"].signature() == "rewind(turn, note)"


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (raw("fork", task=" a task\nof lines "), {"task": " a task\nof lines "}),
        (raw("read_thread", thread_id=" 3 "), {"thread_id": 3}),
        (raw("wait_threads", thread_ids="[1, 2]"), {"thread_ids": [1, 2]}),
        (raw("wait_threads"), {}),
        (raw("open", docid="00123"), {"docid": "00123"}),
        (raw("open", docid="d", page="2"), {"docid": "d", "page": 2}),
        (raw("rewind", turn="-1", note=""), {"turn": -1, "note": ""}),
        (raw("open", typed=True, docid="d", page=2), {"docid": "d", "page": 2}),
        (raw("wait_threads", typed=True, thread_ids=[]), {"thread_ids": []}),
    ],
)
def test_a_call_that_fits_its_schema_is_typed(call: RawCall, arguments: dict[str, Any]) -> None:
    assert bind(call, NAMES) == ToolCall(call.name, arguments)


@pytest.mark.parametrize(
    ("alias", "name", "arguments"),
    [("wait", "wait_threads", {"thread_ids": "[1]"}), ("done", "commit", {"result": "x"})],
)
def test_the_papers_other_names_are_accepted(
    alias: str, name: str, arguments: dict[str, Any]
) -> None:
    assert bind(raw(alias, **arguments), NAMES).name == name


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (raw("read_thread", thread_id="seven"), 'thread_id must be an integer, got "seven"'),
        (raw("read_thread", thread_id="1.0"), "an integer"),
        (raw("read_thread", thread_id="٣"), "an integer"),
        (raw("read_thread", thread_id="9" * 30), "an integer"),
        (raw("read_thread", typed=True, thread_id="1"), "an integer"),
        (raw("read_thread", typed=True, thread_id=True), "an integer"),
        (raw("read_thread", typed=True, thread_id=1.0), "an integer"),
        (raw("wait_threads", thread_ids="1, 2"), "a list of integers"),
        (raw("wait_threads", thread_ids='["a"]'), "a list of integers"),
        (raw("wait_threads", thread_ids="[" * 999), "a list of integers"),
        (raw("wait_threads", typed=True, thread_ids="[1]"), "a list of integers"),
        (raw("open", typed=True, docid=123), "a string"),
        (raw("open", page="1"), "open needs docid; the call is open(docid, page)"),
        (raw("search", query="x", k="3"), 'search has no argument "k"'),
        (raw("fly", to="the moon"), 'unknown tool "fly"; the tools are fork'),
        (RawCall("search", fault="broken"), "malformed call: broken"),
    ],
)
def test_a_call_that_does_not_fit_is_refused_with_a_text(call: RawCall, words: str) -> None:
    with pytest.raises(ToolError) as refusal:
        bind(call, NAMES)
    assert words in str(refusal.value)
    assert len(str(refusal.value)) < 250
    assert "\n" not in str(refusal.value)


def test_hidden_tools_are_unknown_and_disabled_ones_are_refused() -> None:
    alone = [tool.name for tool in offered(primitives=False, corpus=True)]
    assert alone == ["commit", "search", "open"]
    assert [tool.name for tool in offered(primitives=True, corpus=False)] == NAMES[:5]
    with pytest.raises(ToolError, match="unknown tool"):
        bind(raw("fork", task="x"), alone)
    with pytest.raises(ToolError, match="wait_threads is disabled"):
        bind(raw("wait", thread_ids="[1]"), NAMES, disabled={"wait_threads"})


def test_search_lists_one_hit_a_line_and_says_when_there_is_none() -> None:
    class Lines(ListCorpus):
        def search(self, query: str, k: int) -> list[SearchHit]:
            return [SearchHit("d1", 2.0, "a\ntitle", "snip\r\npet"), *super().search(query, k)][:k]

    found = run_corpus_tool(ToolCall("search", {"query": "q"}), Lines, k=1, page_tokens=9)
    assert found.text == "d1 | a title | snip pet"
    assert found.limit == 9
    for query in ("zzz", "  "):
        call = ToolCall("search", {"query": query})
        nothing = run_corpus_tool(call, lambda: ListCorpus(a="text"), k=3, page_tokens=9)
        assert nothing.text == "no hits"


def test_open_shows_where_in_the_document_the_page_is() -> None:
    class Paged(ListCorpus):
        def open(self, docid: str, page: int) -> Page:
            return Page(docid, "t", "body", page, 4)

    opened = run_corpus_tool(ToolCall("open", {"docid": "d", "page": 2}), Paged, k=1, page_tokens=9)
    assert opened.text == "d | t | page 2 of 4\nbody"


def test_a_wait_reports_each_threads_end() -> None:
    ends = [(1, "committed", "x = 3"), (2, "cut", None), (4, "running", None)]
    assert wait_text(ends) == "thread 1 committed: x = 3\nthread 2 cut\nthread 4 running"


def collect(pool: ToolPool, count: int, seconds: float = 5.0) -> list[PoolCall]:
    ended: list[PoolCall] = []
    limit = time.monotonic() + seconds
    while len(ended) < count and time.monotonic() < limit:
        ended += pool.collect(0.01)
    return ended


def refuse() -> Any:
    raise ToolError("no such page")


def crash() -> Any:
    raise OSError("disk")


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_every_call_ends_in_one_word_and_none_raises(workers: int) -> None:
    pool = ToolPool(workers, timeout_s=5.0)
    works: list[Any] = [lambda: 7, refuse, crash]
    calls = [pool.submit(work, index) for index, work in enumerate(works)]
    collect(pool, 3 if workers else 0)
    assert [(call.outcome, call.value) for call in calls] == [
        ("ok", 7),
        ("refused", "no such page"),
        ("failed", "OSError: disk"),
    ]
    assert not pool.busy
    pool.close()


def test_a_hanging_call_times_out_and_holds_no_other_up() -> None:
    pool = ToolPool(1, timeout_s=0.1)
    stop = threading.Event()
    hanging = [pool.submit(stop.wait, "hang") for _ in range(3)]
    quick = pool.submit(lambda: "done", "quick")
    ended = collect(pool, 4)
    assert [call.outcome for call in hanging] == ["timeout"] * 3
    assert (quick.outcome, quick.value) == ("ok", "done")
    assert {call.key for call in ended} == {"hang", "quick"}
    stop.set()
    assert collect(pool, 1, seconds=0.2) == [], "what comes back late is not reported again"
    after = pool.submit(lambda: "still works", "after")
    collect(pool, 1)
    assert after.value == "still works"
    pool.close()


def test_time_in_the_queue_does_not_count() -> None:
    pool = ToolPool(1, timeout_s=0.5)
    calls = [pool.submit(hang(0.12), index) for index in range(6)]
    collect(pool, 6)
    assert [call.outcome for call in calls] == ["ok"] * 6
    pool.close()


def test_closing_lets_idle_workers_end() -> None:
    pool = ToolPool(4, timeout_s=5.0)
    seen: set[threading.Thread] = set()

    def work() -> None:
        seen.add(threading.current_thread())
        time.sleep(0.02)

    for index in range(8):
        pool.submit(work, index)
    collect(pool, 8)
    pool.close()
    for worker in seen:
        worker.join(timeout=5)
    assert seen
    assert not any(worker.is_alive() for worker in seen)
