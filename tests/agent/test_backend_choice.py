"""A run names its backend; all three give one protocol, and what does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octopus_trl.agent.backend_choice import open_backend
from octopus_trl.agent.corpus import Corpus
from octopus_trl.agent.lucene import LuceneBackend
from octopus_trl.agent.opensearch import OpenSearchBackend, connect, fill_index
from octopus_trl.agent.search import Bm25Backend
from octopus_trl.errors import ConfigError
from octopus_trl.protocols import SearchBackend
from tests.agent.search_server import SearchServer, serving
from tests.agent.test_lucene import install

SETTINGS: dict[str, Any] = {"k1": 1.2, "b": 0.75, "snippet_tokens": 3, "page_tokens": 5}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [{"docid": f"d{i}", "text": f"red kite number {i} over the hill"} for i in range(7)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_a_folder_and_a_server_give_the_same_hits_and_pages(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(SearchServer()) as server:
        fill_index(Corpus(folder), connect(server.url), "octo", k1=1.2, b=0.75)
        monkeypatch.setenv("OPENSEARCH_PASSWORD", "pass")
        here = open_backend(None, folder, **SETTINGS)
        there = open_backend(None, folder, url=server.url, index="octo", user="me", **SETTINGS)
        assert server.headers[-1]["Authorization"] == "Basic bWU6cGFzcw=="
        assert isinstance(here, Bm25Backend)
        assert isinstance(there, OpenSearchBackend)
        for backend in (here, there):
            assert isinstance(backend, SearchBackend)
        one, two = here.search("kite 3", 4), there.search("kite 3", 4)
        assert [(hit.docid, hit.snippet) for hit in one] == [(h.docid, h.snippet) for h in two]
        assert here.open("d3", 2) == there.open("d3", 2)


def test_an_index_of_lucene_is_read_without_a_corpus_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, "21.0.2")
    (tmp_path / "lucene").mkdir()
    (tmp_path / "lucene" / "segments_1").write_bytes(b"commit")
    place = str(tmp_path / "lucene")
    backend = open_backend("pyserini", tmp_path / "none", index=place, **SETTINGS)
    assert isinstance(backend, LuceneBackend)
    assert isinstance(backend, SearchBackend)


@pytest.mark.parametrize(
    ("kind", "asked", "message"),
    [
        ("elastic", {}, "must be one of bm25, opensearch, pyserini"),
        ("bm25", {"url": "http://h:9200"}, "only opensearch has an address"),
        (None, {"index": "octo"}, "its index lies in the folder"),
        ("opensearch", {"url": "http://h:9200"}, "without index"),
        ("opensearch", {"index": "octo"}, "without search_url"),
        ("pyserini", {}, "the folder of a Lucene index"),
        (None, {}, "no such file"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(
    tmp_path: Path, kind: str | None, asked: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_backend(kind, tmp_path / "none", **asked)
