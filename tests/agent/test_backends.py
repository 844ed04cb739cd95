"""One address names a backend; all three give one protocol."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octopus_trl.agent.backends import open_backend
from octopus_trl.agent.corpus import Corpus
from octopus_trl.agent.lucene import LuceneBackend
from octopus_trl.agent.opensearch import OpenSearchBackend, connect, fill_index
from octopus_trl.agent.search import Bm25Backend
from octopus_trl.errors import ConfigError
from octopus_trl.protocols import SearchBackend
from tests.agent.search_server import SearchServer, serving
from tests.agent.test_lucene import install

SETTINGS = {"k1": 1.2, "b": 0.75, "snippet_tokens": 3, "page_tokens": 5}


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
        monkeypatch.setenv("OPENSEARCH_USER", "me")
        monkeypatch.setenv("OPENSEARCH_PASSWORD", "pass")
        here = open_backend(folder, **SETTINGS)
        there = open_backend(f"opensearch:{server.url}/octo", **SETTINGS)
        assert server.headers[-1]["Authorization"] == "Basic bWU6cGFzcw=="
        assert isinstance(here, Bm25Backend)
        assert isinstance(there, OpenSearchBackend)
        for backend in (here, there):
            assert isinstance(backend, SearchBackend)
        one, two = here.search("kite 3", 4), there.search("kite 3", 4)
        assert [(hit.docid, hit.snippet) for hit in one] == [(h.docid, h.snippet) for h in two]
        assert here.open("d3", 2) == there.open("d3", 2)


def test_lucene_is_an_address_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path, "21.0.2")
    (tmp_path / "lucene").mkdir()
    (tmp_path / "lucene" / "segments_1").write_bytes(b"commit")
    backend = open_backend(f"lucene:{tmp_path / 'lucene'}", **SETTINGS)
    assert isinstance(backend, LuceneBackend)
    assert isinstance(backend, SearchBackend)


@pytest.mark.parametrize("address", ["opensearch:localhost:9200/octo", "opensearch:http://h:9200/"])
def test_an_address_without_server_or_index_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="opensearch:http://HOST:PORT/INDEX"):
        open_backend(address)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        open_backend(tmp_path / "none")
