"""BM25 search over a corpus folder: bm25s with its known faults closed.

bm25s returns documents at score 0 for words that it does not know, breaks ties differently from
run to run, raises where k exceeds the corpus, and keeps neither the vocabulary's analyzer nor the
corpus that an index belongs to. Here zero scores are dropped, ties go by docid, k is clamped, an
empty query finds nothing, and the fingerprint of an index covers the bytes of its corpus, the
analyzer, k1 and b (bm25s bakes both into its scores, so that another value is another index).
Order differs from Lucene's where its one-byte document lengths do.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import Stemmer

from octopus_trl.agent.corpus import Corpus, Document
from octopus_trl.errors import ConfigError, ToolError
from octopus_trl.protocols import Page, SearchHit

ANALYZER = "lower, \\w+, Lucene's 33 stop words, Porter"
# Above this many documents an index is built by scripts/build_index.py, not at every start.
MAX_UNSAVED = 50_000
_FORMAT = 1
_MANIFEST = "manifest.json"
_WORD = re.compile(r"\w+")
_STOP = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then "
    "there these they this to was will with"
)
_STOP_WORDS = frozenset(_STOP.split(" "))
_local = threading.local()

TokenEnds = Callable[[str], list[int]]


def analyze(text: str) -> list[str]:
    """Split a text into index terms: lower-cased words less stop words, stemmed by Porter."""
    stemmer = getattr(_local, "stemmer", None)
    if stemmer is None:  # PyStemmer's objects must not be shared between threads
        stemmer = _local.stemmer = Stemmer.Stemmer("porter")
    return stemmer.stemWords(
        [word for word in _WORD.findall(text.lower()) if word not in _STOP_WORDS]
    )


def word_ends(text: str) -> list[int]:
    """Give the end of each word: the measure of pages and snippets without a tokenizer."""
    return [match.end() for match in re.finditer(r"\S+", text)]


def token_ends(tokenizer: Any) -> TokenEnds:
    """Give the measure that counts tokens of a fast Hugging Face tokenizer.

    Raises:
        ConfigError: the tokenizer is a slow one and knows no offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"tokenizer is {type(tokenizer).__name__}; pages are cut at token offsets, which only "
            "fast tokenizers know; load it with use_fast=True or leave the tokenizer out"
        )

    def ends(text: str) -> list[int]:
        encoded = tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            split_special_tokens=True,
            verbose=False,
        )
        return [end for _, end in encoded["offset_mapping"]]

    return ends


class Bm25Backend:
    """The `SearchBackend` of a corpus: BM25 (Lucene's formula), snippets and pages.

    Args:
        corpus: the documents.
        k1, b: BM25's saturation and length weight; part of the fingerprint.
        snippet_tokens: length of a hit's snippet, the head of the document; 0 for none.
        page_tokens: most tokens of an opened page.
        ends: measure of both lengths; `word_ends` counts words, `token_ends(tokenizer)` tokens.
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
        if not 0 <= k1 < float("inf") or not 0 <= b <= 1:
            raise ConfigError(f"k1={k1}, b={b}: k1 must be finite and at least 0, b lie in [0, 1]")
        if snippet_tokens < 0 or page_tokens < 1:
            raise ConfigError(
                f"snippet_tokens={snippet_tokens}, page_tokens={page_tokens}: a snippet has at "
                "least 0 tokens and a page at least 1"
            )
        self.corpus, self.k1, self.b = corpus, float(k1), float(b)
        self.snippet_tokens, self.page_tokens, self._ends = snippet_tokens, page_tokens, ends
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
        """Write the index beside its place and rename it, so that no half index is ever seen.

        `path` is by default the place where `from_folder` looks. Returns the place.
        """
        target = Path(path) if path is not None else index_path(self.corpus, self.k1, self.b)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        old = Path(f"{scratch}.old")
        try:
            self._index.save(scratch, show_progress=False)
            manifest = {
                **_identity(self.corpus, self.k1, self.b),
                "fingerprint": self.fingerprint(),
            }
            with (scratch / _MANIFEST).open("w", encoding="utf-8") as stream:
                json.dump(manifest, stream, indent=1)
                stream.flush()
                os.fsync(stream.fileno())
            scratch.chmod(0o755)
            if target.exists():  # a folder in use cannot be renamed over: move it aside first
                os.replace(target, old)
            os.replace(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
        return target

    def fingerprint(self) -> str:
        """Hash of corpus bytes, analyzer, k1, b and scorer: what a result was ranked with."""
        return _fingerprint(self.corpus, self.k1, self.b)

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
            raise ToolError(f"no document {docid!r}; open takes a docid that search returned")
        pages = self._pages(docid)
        if not 1 <= page <= len(pages):
            raise ToolError(f"no page {page} of {docid}; its pages are 1 to {len(pages)}")
        start, end = pages[page - 1]
        return Page(docid, document.title, document.text[start:end], page, len(pages))

    def _build(self) -> bm25s.BM25:
        vocabulary: dict[str, int] = {}
        # Four bytes a term: lists of Python integers would take eight times the corpus.
        rows: list[array[int]] = []
        for document in self.corpus:
            terms = analyze(_indexed(document))
            rows.append(array("i", [vocabulary.setdefault(t, len(vocabulary)) for t in terms]))
        if not vocabulary:
            raise ConfigError(
                f"{self.corpus.path}: no document holds a word to index; texts need letters or "
                "digits besides stop words"
            )
        index = bm25s.BM25(k1=self.k1, b=self.b, method="lucene", backend="numpy")
        index.index((rows, vocabulary), create_empty_token=False, show_progress=False)
        return index

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
        if self.snippet_tokens == 0:
            return ""
        text = self.corpus[row].text
        # Only as much of the head as can hold the snippet is measured; documents may be long.
        room = 16 * self.snippet_tokens
        ends = self._ends(text[:room])
        while len(ends) <= self.snippet_tokens and room < len(text):
            room *= 4
            ends = self._ends(text[:room])
        cut = len(text) if len(ends) <= self.snippet_tokens else ends[self.snippet_tokens - 1]
        return " ".join(text[:cut].split())

    def _split(self, docid: str) -> tuple[tuple[int, int], ...]:
        document = self.corpus.find(docid)
        assert document is not None, "open looks the document up first"
        return split_pages(document.text, self.page_tokens, self._ends)


def split_pages(text: str, limit: int, ends: TokenEnds) -> tuple[tuple[int, int], ...]:
    """Cut a text into spans of at most `limit` tokens that join to the whole text.

    A cut falls after white space where the last eighth of the page has some. A piece is measured
    again by itself, since the tokens of a part may outnumber its share of the whole.
    """
    marks = ends(text)
    if len(marks) <= limit:
        return ((0, len(text)),)
    spans: list[tuple[int, int]] = []
    start, taken = 0, 0
    while start < len(text):
        if len(marks) - taken <= limit:
            end = len(text)
        else:
            end = max(marks[taken + limit - 1], start + 1)
            space = max(text.rfind(mark, start, end) for mark in ("\n", " "))
            if space > end - (end - start) // 8:
                end = space + 1
        while end > start + 1 and len(ends(text[start:end])) > limit:
            end -= max(1, (end - start) // 64)
        spans.append((start, end))
        start = end
        while taken < len(marks) and marks[taken] <= start:
            taken += 1
    return tuple(spans)


def _indexed(document: Document) -> str:
    """Join title and text, unless the text opens with its title or a front-matter block."""
    text = document.text.lstrip()
    return text if text.startswith((document.title, "---")) else f"{document.title}\n{text}"


def index_path(corpus: Corpus, k1: float, b: float) -> Path:
    """Give the place of a saved index: `index/<fingerprint>` beside the corpus."""
    return corpus.path.parent / "index" / _fingerprint(corpus, k1, b)[:16]


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


def _fingerprint(corpus: Corpus, k1: float, b: float) -> str:
    identity = json.dumps(_identity(corpus, k1, b), sort_keys=True)
    return hashlib.sha256(identity.encode()).hexdigest()
