"""The OpenSearch backend against a stand-in of its HTTP API, and a real server where one runs."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from octopus_trl.agent.corpus import Corpus
from octopus_trl.agent.opensearch import OpenSearchBackend, connect, fill_index
from octopus_trl.agent.search import Bm25Backend
from octopus_trl.errors import ConfigError, ServiceDown, ToolError
from octopus_trl.protocols import SearchBackend
from tests.agent.search_server import SearchServer, serving

QUERIES = ("w1 w7", "running", "w5 w5 w39", "w0 w1 w2 w3 w4", "The ÜNÏ", "zzz", "", "the of")


@pytest.fixture
def server() -> Iterator[SearchServer]:
    with serving(SearchServer()) as server:
        yield server


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    draw = random.Random()
    words = [f"w{i}" for i in range(40)] + ["runs", "the", "ünï"]
    lines = [
        {"docid": f"d/{i}?", "text": " ".join(draw.choices(words, k=draw.randint(1, 60)))}
        for i in range(65)
    ]
    lines += [{"docid": f"tie{i}", "text": "red kite running", "title": "Kite"} for i in range(3)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Corpus(tmp_path)


def filled(server: SearchServer, corpus: Corpus, **settings: float) -> None:
    fill_index(corpus, connect(server.url, retries=0), "octo", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (25.0, 1.0)])
def test_ranking_snippets_and_pages_are_those_of_the_embedded_backend(
    server: SearchServer, corpus: Corpus, k1: float, b: float
) -> None:
    filled(server, corpus, k1=k1, b=b)
    sizes = {"k1": k1, "b": b, "snippet_tokens": 5, "page_tokens": 7}
    ours = OpenSearchBackend(server.url, "octo", corpus_sha256=corpus.sha256, **sizes)  # type: ignore[arg-type]
    embedded = Bm25Backend(corpus, **sizes)  # type: ignore[arg-type]
    assert isinstance(ours, SearchBackend)
    for query in QUERIES:
        for k in (0, 1, 5, 1000):
            found, wanted = ours.search(query, k), embedded.search(query, k)
            assert len(found) == len(wanted), query
            for one, two in zip(found, wanted, strict=True):
                assert one.score == pytest.approx(two.score, rel=1e-4)
            exact = {(h.docid, h.title, h.snippet) for h in found}
            if k == 1000:
                assert exact == {(h.docid, h.title, h.snippet) for h in wanted}
    for docid in corpus.docids[:9]:
        last = embedded.open(docid).num_pages
        assert ours.open(docid, last) == embedded.open(docid, last)
    assert [hit.docid for hit in ours.search("kite", 2)] == ["tie0", "tie1"]


def test_idf_counts_all_shards(server: SearchServer, corpus: Corpus) -> None:
    filled(server, corpus)
    OpenSearchBackend(server.url, "octo").search("w1", 3)
    assert server.requests[-1][1] == "/octo/_search?search_type=dfs_query_then_fetch"


def test_what_the_model_gets_wrong_is_a_message(server: SearchServer, corpus: Corpus) -> None:
    filled(server, corpus)
    backend = OpenSearchBackend(server.url, "octo", retries=0)
    for docid in ("nope", "../_search", "", "x" * 600):
        with pytest.raises(ToolError, match="no document"):
            backend.open(docid, 1)
    with pytest.raises(ToolError, match="pages are 1 to 1"):
        backend.open("tie0", 2)
    with pytest.raises(ToolError, match="1025 different words; at most 1024"):
        backend.search(" ".join(f"x{i}" for i in range(1025)), 5)


def test_an_index_counts_only_when_complete(server: SearchServer, corpus: Corpus) -> None:
    server.refuse_docid = "tie1"
    with pytest.raises(ConfigError, match="1 documents were refused, docid 'tie1' first"):
        filled(server, corpus)
    with pytest.raises(ConfigError, match="half written"):
        OpenSearchBackend(server.url, "octo")
    server.refuse_docid = None
    filled(server, corpus)
    assert len(OpenSearchBackend(server.url, "octo").search("kite", 5)) == 3
    server.requests.clear()
    filled(server, corpus)
    assert server.requests == [("GET", "/octo/_mapping")], "a complete index is left alone"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k1": 1.2}, r"k1 of index 'octo' is 0\.9, here it is 1\.2"),
        ({"b": 0.75}, "b of index"),
        ({"corpus_sha256": "0" * 64}, "corpus_sha256 of index"),
        ({"k1": -1.0}, "k1 must be finite"),
        ({"page_tokens": 0}, "a page at least 1"),
    ],
)
def test_an_index_of_something_else_is_refused(
    server: SearchServer, corpus: Corpus, settings: dict, message: str
) -> None:
    filled(server, corpus)
    with pytest.raises(ConfigError, match=message):
        OpenSearchBackend(server.url, "octo", **settings)


def test_another_corpus_does_not_overwrite_an_index(
    server: SearchServer, corpus: Corpus, tmp_path: Path
) -> None:
    filled(server, corpus)
    (tmp_path / "other.jsonl").write_text('{"docid": "1", "text": "red"}\n')
    with pytest.raises(ConfigError, match="holds something else"):
        filled(server, Corpus(tmp_path / "other.jsonl"))


def test_a_missing_index_and_a_missing_server_are_named(server: SearchServer) -> None:
    with pytest.raises(ConfigError, match=r"no index 'octo'.*build_index\.py"):
        OpenSearchBackend(server.url, "octo")
    with pytest.raises(ConfigError, match="no answer .* check the address"):
        OpenSearchBackend("http://127.0.0.1:9", "octo", retries=0)
    with pytest.raises(ConfigError, match="must be http"):
        OpenSearchBackend("localhost:9200", "octo")


def test_a_busy_server_is_asked_again_and_an_outage_is_said(
    server: SearchServer, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    filled(server, corpus)
    backend = OpenSearchBackend(server.url, "octo", retries=2)
    server.failures = 2
    assert len(backend.search("kite", 3)) == 3
    assert len(pauses) == 2
    assert pauses[1] > pauses[0] > 0
    server.failures = 99
    with pytest.raises(ServiceDown, match="status 503 .*tried 3 times") as error:
        backend.search("kite", 3)
    assert "kite" not in str(error.value)


def test_the_password_goes_out_as_basic_authentication(
    server: SearchServer, corpus: Corpus
) -> None:
    filled(server, corpus)
    OpenSearchBackend(server.url, "octo", user="me", password="pass")
    assert server.headers[-1]["Authorization"] == "Basic bWU6cGFzcw=="


def test_fingerprints_tell_settings_apart(server: SearchServer, corpus: Corpus) -> None:
    filled(server, corpus)
    one, two, three = (
        OpenSearchBackend(server.url, "octo", snippet_tokens=size).fingerprint()
        for size in (5, 6, 5)
    )
    assert one == three != two


def test_a_real_server_ranks_as_the_stand_in_does(corpus: Corpus) -> None:
    url = os.environ.get("OCTOPUS_OPENSEARCH_URL")
    if not url:
        pytest.skip(
            "no OpenSearch server: set OCTOPUS_OPENSEARCH_URL to one, such as a container's"
        )
    name = f"octopus-test-{random.SystemRandom().randrange(10**9)}"
    server = connect(url)
    try:
        fill_index(corpus, server, name)
        backend, embedded = OpenSearchBackend(url, name), Bm25Backend(corpus)
        assert [h.docid for h in backend.search("kite", 9)] == ["tie0", "tie1", "tie2"]
        for query in QUERIES:  # its one-byte lengths move scores, so sets are compared, not order
            assert {h.docid for h in backend.search(query, 1000)} == {
                h.docid for h in embedded.search(query, 1000)
            }
        assert backend.open("tie0", 1) == embedded.open("tie0", 1)
    finally:
        server.call("DELETE", f"/{name}")
