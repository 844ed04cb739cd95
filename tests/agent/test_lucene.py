"""The pyserini backend: what is missing is named; a stand-in searcher shows what is asked of it."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from octopus_trl.agent.lucene import LuceneBackend
from octopus_trl.errors import ConfigError, ToolError
from octopus_trl.protocols import SearchBackend

RAW = {
    "7": json.dumps({"id": "7", "contents": "---\ntitle: Owl\n---\nA grey owl sits here"}),
    "8": "plain text of an owl",
}


class Searcher:
    def __init__(self, path: str) -> None:
        self.path = path

    def set_bm25(self, k1: float, b: float) -> None:
        self.weights = (k1, b)

    def search(self, query: str, k: int) -> list[Any]:
        return [types.SimpleNamespace(docid=d, score=2.0 - i) for i, d in enumerate(RAW)][:k]

    def doc(self, docid: str) -> Any:
        return types.SimpleNamespace(raw=lambda: RAW[docid]) if docid in RAW else None


def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, java: str | None) -> None:
    """Put a `java` of this version on the PATH, or none, and a stand-in for pyserini."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if java is not None:
        program = tmp_path / "java"
        program.write_text(f"#!/bin/sh\necho 'openjdk version \"{java}\"' >&2\n")
        program.chmod(0o755)
    lucene = types.ModuleType("pyserini.search.lucene")
    lucene.LuceneSearcher = Searcher  # type: ignore[attr-defined]
    for name in ("pyserini", "pyserini.search"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "pyserini.search.lucene", lucene)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / "segments_1").write_bytes(b"commit one")
    return folder


def test_hits_and_pages_come_from_the_raw_documents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: Path
) -> None:
    install(monkeypatch, tmp_path, "21.0.2")
    backend = LuceneBackend(index, k1=25, b=1, snippet_tokens=3, page_tokens=3)
    assert isinstance(backend, SearchBackend)
    assert backend._searcher.weights == (25.0, 1.0)
    hits = backend.search("owl", 5)
    assert [(h.docid, h.score, h.title, h.snippet) for h in hits] == [
        ("7", 2.0, "Owl", "--- title: Owl"),
        ("8", 1.0, "plain text of an owl", "plain text of"),
    ]
    assert backend.search("owl", 1) == hits[:1]
    assert backend.search(" ", 5) == backend.search("owl", 0) == []
    assert backend.open("8", 2).text == " an owl"
    with pytest.raises(ToolError, match="no document '9'"):
        backend.open("9", 1)
    with pytest.raises(ToolError, match="pages are 1 to 2"):
        backend.open("8", 3)


def test_the_commit_k1_and_b_are_in_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: Path
) -> None:
    install(monkeypatch, tmp_path, "21.0.2")
    prints = [LuceneBackend(index).fingerprint(), LuceneBackend(index, k1=1.2).fingerprint()]
    (index / "segments_1").write_bytes(b"commit two")
    prints.append(LuceneBackend(index).fingerprint())
    assert len(set(prints)) == 3


@pytest.mark.parametrize(
    ("java", "message"),
    [(None, "no java in PATH"), ("17.0.15", "is version 17"), ("", "version unknown")],
)
def test_a_java_that_pyserini_cannot_use_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: Path, java: str | None, message: str
) -> None:
    install(monkeypatch, tmp_path, java)
    with pytest.raises(ConfigError, match=f"{message}.*needs Java 21"):
        LuceneBackend(index)


def test_a_missing_pyserini_is_named_with_its_install_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: Path
) -> None:
    install(monkeypatch, tmp_path, "21.0.2")
    monkeypatch.setitem(sys.modules, "pyserini.search.lucene", None)
    with pytest.raises(ConfigError, match=r"pip install 'octopus_trl\[lucene\]'"):
        LuceneBackend(index)


def test_a_folder_without_an_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no Lucene index"):
        LuceneBackend(tmp_path)
