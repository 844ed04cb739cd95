"""BM25 search over a corpus folder: bm25s with its known faults closed.

bm25s returns documents at score 0 for words that it does not know, breaks ties differently from
run to run, raises where k exceeds the corpus, and keeps neither the vocabulary's analyzer nor the
corpus that an index belongs to. Here zero scores are dropped, ties go by docid, k is clamped, an
empty query finds nothing, and the fingerprint of an index covers the bytes of its corpus, the
analyzer, k1 and b (bm25s bakes both into its scores, so that another value is another index).
Order differs from Lucene's where its one-byte document lengths do.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from octopus_trl.agent._bm25s import bm25s
from octopus_trl.agent.analyzer import ANALYZER, analyze
from octopus_trl.agent.corpus import Corpus
from octopus_trl.agent.paging import (
    Spans,
    TextCutter,
    TokenEnds,
    check_weights,
    split_pages,
    token_ends,
    unknown_document,
    word_ends,
)
from octopus_trl.agent.postings import MAX_POSTINGS, Progress, write_postings
from octopus_trl.errors import ConfigError
from octopus_trl.files import write_whole
from octopus_trl.protocols import Page, SearchHit

__all__ = ["Bm25Backend", "analyze", "index_path", "split_pages", "token_ends", "word_ends"]

# Above this many documents an index is built by scripts/build_index.py, not at every start.
MAX_UNSAVED = 50_000
_FORMAT = 1
_MANIFEST = "manifest.json"


class Bm25Backend:
    """The `SearchBackend` of a corpus: BM25 (Lucene's formula), snippets and pages.

    Args:
        corpus: the documents.
        k1, b: BM25's saturation and length weight; part of the fingerprint.
        snippet_tokens, page_tokens, ends: see `TextCutter`.
        index: scores that `load` has read; None builds them.
    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        k1: float = 0.9,
        b: float = 0.4,
        snippet_tokens: int = 64,
        page_tokens: int = 8192,
        ends: TokenEnds = word_ends,
        index: bm25s.BM25 | None = None,
    ) -> None:
        check_weights(k1, b)
        self.corpus, self.k1, self.b = corpus, float(k1), float(b)
        self._cutter = TextCutter(snippet_tokens=snippet_tokens, page_tokens=page_tokens, ends=ends)
        self._index = index if index is not None else self._build()
        self._rank = np.empty(len(corpus), dtype=np.int64)
        self._rank[np.argsort(np.asarray(corpus.docids))] = np.arange(len(corpus))
        # One backend serves many threads and the rollouts of a group repeat their queries.
        self._ranked = functools.lru_cache(maxsize=4096)(self._rank_documents)
        self._snippet = functools.lru_cache(maxsize=4096)(self._cut_snippet)
        self._pages = functools.lru_cache(maxsize=256)(self._split)

    @classmethod
    def from_folder(cls, folder: str | Path, **settings: Any) -> Bm25Backend:
        """Open `folder/corpus.jsonl`, with the saved index of these k1 and b where there is one.

        Raises:
            ConfigError: the corpus is broken, or large and without an index.
        """
        corpus = Corpus(folder)
        saved = index_path(corpus, settings.get("k1", 0.9), settings.get("b", 0.4))
        if saved.is_dir():
            return cls.load(saved, corpus, **settings)
        if len(corpus) > MAX_UNSAVED:
            raise ConfigError(
                f"{corpus.path}: {len(corpus)} documents and no index for these k1 and b; more "
                f"than {MAX_UNSAVED} are indexed once; run scripts/build_index.py {folder}"
            )
        return cls(corpus, **settings)

    @classmethod
    def load(cls, path: str | Path, corpus: Corpus, **settings: Any) -> Bm25Backend:
        """Map a saved index into memory; its arrays are shared by all processes that do.

        Raises:
            ConfigError: not an index, one of another corpus, or one of another k1, b, analyzer
                or bm25s version.
        """
        path = Path(path)
        try:
            manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path}: no readable {_MANIFEST} ({error}); an index is a folder written by "
                "scripts/build_index.py; build it again"
            ) from None
        expected = _identity(corpus, settings.get("k1", 0.9), settings.get("b", 0.4))
        for name, value in expected.items():
            if manifest.get(name) != value:
                raise ConfigError(
                    f"{path}: {name} of the index is {manifest.get(name)!r}, here it is {value!r}; "
                    "an index serves only the corpus and settings it was built from; run "
                    "scripts/build_index.py again"
                )
        index = bm25s.BM25.load(path, mmap=True, load_corpus=False, show_progress=False)
        return cls(corpus, index=index, **settings)

    def save(self, path: str | Path | None = None) -> Path:
        """Write the index for later processes to map; see `write_index`."""
        return write_index(self.corpus, k1=self.k1, b=self.b, path=path)

    def fingerprint(self) -> str:
        """Hash of all that a result depends on.

        These are corpus bytes, analyzer, k1, b and scorer, which rank; and the lengths of snippets
        and pages with the tokenizer that measures them.
        """
        return _hash({**_identity(self.corpus, self.k1, self.b), **self._cutter.identity})

    def search(self, query: str, k: int) -> list[SearchHit]:
        """Return at most `k` documents with a score above 0, best first, ties by docid."""
        return [
            SearchHit(self.corpus.docids[row], score, self.corpus.titles[row], self._snippet(row))
            for row, score in self._ranked(query, max(0, min(k, len(self.corpus))))
        ]

    def open(self, docid: str, page: int = 1) -> Page:
        """Return page `page` (from 1) of a document.

        Raises:
            ToolError: no such document or page; the text is for the model.
        """
        document = self.corpus.find(docid)
        if document is None:
            raise unknown_document(docid)
        return self._cutter.page(docid, document.title, document.text, page, self._pages(docid))

    def _build(self) -> bm25s.BM25:
        with tempfile.TemporaryDirectory(prefix="octopus-bm25-") as folder:
            write_postings(self.corpus, Path(folder), k1=self.k1, b=self.b)
            return bm25s.BM25.load(folder, mmap=False, load_corpus=False, show_progress=False)

    def _rank_documents(self, query: str, k: int) -> tuple[tuple[int, float], ...]:
        vocabulary = self._index.vocab_dict
        terms = [vocabulary[term] for term in analyze(query) if term in vocabulary]
        if not terms or k == 0:
            return ()
        scores = self._index.get_scores_from_ids(terms)
        rows = np.flatnonzero(scores > 0)
        if len(rows) > k:  # every tie of the k-th best stays in, so that docids decide
            worst = np.partition(scores[rows], len(rows) - k)[len(rows) - k]
            rows = rows[scores[rows] >= worst]
        rows = rows[np.lexsort((self._rank[rows], -scores[rows]))][:k]
        return tuple((int(row), float(scores[row])) for row in rows)

    def _cut_snippet(self, row: int) -> str:
        return self._cutter.snippet(self.corpus[row].text)

    def _split(self, docid: str) -> Spans:
        document = self.corpus.find(docid)
        assert document is not None, "open looks the document up first"
        return self._cutter.spans(document.text)


def write_index(
    corpus: Corpus,
    *,
    k1: float = 0.9,
    b: float = 0.4,
    path: str | Path | None = None,
    progress: Progress | None = None,
    max_postings: int = MAX_POSTINGS,
) -> Path:
    """Write the index of a corpus beside its place and rename it: no half index is ever seen.

    What a killed build left behind is removed by the next one.

    Args:
        path: its place; by default where `Bm25Backend.from_folder` looks.
        progress, max_postings: see `write_postings`.
    Returns:
        The place.
    Raises:
        ConfigError: no word in the corpus, or another process is building beside that place.
        OSError: the disk refused; nothing is left there.
    """
    target = Path(path) if path is not None else index_path(corpus, k1, b)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target.parent):
        scratch = target.with_name(f".{target.name}.building")
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        try:
            scratch.mkdir()
            write_postings(
                corpus, scratch, k1=k1, b=b, progress=progress, max_postings=max_postings
            )
            write_whole(scratch / _MANIFEST, json.dumps(_identity(corpus, k1, b), indent=1))
            if target.exists():  # a folder in use cannot be renamed over: move it aside first
                os.replace(target, old)
            os.replace(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    return target


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; a killed holder's is free again."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another process is building an index there; one at a time does; wait "
                "for it"
            ) from None
        yield
    finally:
        os.close(descriptor)


def index_path(corpus: Corpus, k1: float, b: float) -> Path:
    """Give the place of a saved index: `index/<fingerprint>` beside the corpus."""
    return corpus.path.parent / "index" / _hash(_identity(corpus, k1, b))[:16]


def _identity(corpus: Corpus, k1: float, b: float) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "corpus_sha256": corpus.sha256,
        "num_documents": len(corpus),
        "analyzer": ANALYZER,
        "scorer": f"bm25s {bm25s.__version__} lucene float32",
        "k1": float(k1),
        "b": float(b),
    }


def _hash(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
