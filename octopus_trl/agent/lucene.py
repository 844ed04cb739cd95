"""BM25 by Lucene itself, through pyserini: exact scores of an Anserini index.

The index keeps its own analyzer; k1 and b count at query time. It needs the extra `lucene` and
Java 21.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

from octopus_trl.agent.corpus import title_of
from octopus_trl.agent.paging import (
    TextCutter,
    TokenEnds,
    check_weights,
    unknown_document,
    word_ends,
)
from octopus_trl.errors import ConfigError
from octopus_trl.protocols import Page, SearchHit

JAVA = 21


class LuceneBackend:
    """The `SearchBackend` of an Anserini index.

    Args:
        path: folder of the index; its raw documents hold `contents` or `text`.
        k1, b: BM25's saturation and length weight; Anserini's own defaults.
        snippet_tokens, page_tokens, ends: see `TextCutter`.
    Raises:
        ConfigError: no index there, no pyserini, no Java 21, or a number out of range.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        k1: float = 0.9,
        b: float = 0.4,
        snippet_tokens: int = 64,
        page_tokens: int = 8192,
        ends: TokenEnds = word_ends,
    ) -> None:
        check_weights(k1, b)
        self._cutter = TextCutter(snippet_tokens=snippet_tokens, page_tokens=page_tokens, ends=ends)
        path = Path(path)
        segments = sorted(path.glob("segments_*"))
        if not segments:
            raise ConfigError(
                f"{path}: no Lucene index (no segments_* file); give the folder of one that "
                "Anserini wrote"
            )
        check_java()
        searcher, version = _pyserini()
        self._searcher = searcher(str(path))
        self._searcher.set_bm25(float(k1), float(b))
        # A Lucene commit names its segments by random ids, so these bytes are the index's own.
        commit = hashlib.sha256(b"".join(file.read_bytes() for file in segments)).hexdigest()
        self._identity = {
            "lucene_commit": commit,
            "scorer": f"pyserini {version}",
            "k1": float(k1),
            "b": float(b),
        }
        self._lock = threading.Lock()  # calls into the JVM come from many threads

    def fingerprint(self) -> str:
        """Hash of all that a result depends on."""
        record = json.dumps({**self._identity, **self._cutter.identity}, sort_keys=True)
        return hashlib.sha256(record.encode()).hexdigest()

    def search(self, query: str, k: int) -> list[SearchHit]:
        """Return at most `k` documents in Lucene's order."""
        if k < 1 or not query.strip():
            return []
        with self._lock:
            found = [(hit.docid, float(hit.score)) for hit in self._searcher.search(query, k)]
        hits = []
        for docid, score in found:
            title, text = self._read(docid)
            hits.append(SearchHit(docid, score, title, self._cutter.snippet(text)))
        return hits

    def open(self, docid: str, page: int = 1) -> Page:
        """Return page `page` (from 1) of a document.

        Raises:
            ToolError: no such document or page; the text is for the model.
        """
        title, text = self._read(docid)
        return self._cutter.page(docid, title, text, page, self._cutter.spans(text))

    def _read(self, docid: str) -> tuple[str, str]:
        with self._lock:
            document = self._searcher.doc(docid)
            raw = None if document is None else document.raw()
        if raw is None:
            raise unknown_document(docid)
        try:
            record = json.loads(raw)
        except ValueError:
            return title_of(raw), raw
        text = str(record.get("contents") or record.get("text") or "")
        return str(record.get("title") or title_of(text)), text


def check_java() -> None:
    """Refuse to start a JVM that pyserini cannot use.

    Raises:
        ConfigError: no Java, or one older than 21.
    """
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    fix = f"pyserini needs Java {JAVA}: install a JDK {JAVA} and set JAVA_HOME to it"
    if java is None:
        raise ConfigError(f"no java in {'JAVA_HOME' if home else 'PATH'}; {fix}")
    try:
        done = subprocess.run(
            [java, "-version"], check=False, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{java} -version failed ({error}); {fix}") from None
    found = re.search(r'version "(\d+)', done.stderr + done.stdout)
    if found is None or int(found[1]) < JAVA:
        raise ConfigError(f"{java} is version {found[1] if found else 'unknown'}; {fix}")


def _pyserini() -> tuple[Any, str]:
    try:
        version = str(getattr(importlib.import_module("pyserini"), "__version__", "unknown"))
        return importlib.import_module("pyserini.search.lucene").LuceneSearcher, version
    except ImportError as error:
        raise ConfigError(
            f"pyserini cannot be imported ({error}): pip install 'octopus_trl[lucene]', or take "
            "the bm25s backend"
        ) from None
