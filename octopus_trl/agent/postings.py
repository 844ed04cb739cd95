"""Writes the arrays of a bm25s index from a stream of documents, in bounded memory.

bm25s builds from lists of all terms of all documents: 14.9 GB for 100,195 documents of 32 KB
(519M words, 238M postings). Here documents are read once; their postings (term, document, count)
go to disk in runs sorted by term, and a merge over ranges of terms writes the score columns in
order. The arrays equal those that bm25s computes, bit for bit.

Memory, with P postings a run and a block (default 2²² each) and V distinct terms:

- a run: 12 P bytes collected, 8 P its order, 12 P sorted: 32 P = 134 MB
- a block of the merge: 12 P read, 8 P order, 12 P sorted, 32 P for scores in float64: 64 P = 268 MB
- the vocabulary: about 150 V bytes, and as much for at most 2²¹ remembered word forms: 0.3 GB;
  0.75 GB at V = 5M
- documents: 8 bytes a length and an offset, docids and titles about 250 bytes: 25 MB at 100,195

so about 1.4 GB at BrowseComp-Plus's size, whatever the length of its documents. Disk: 12 bytes a
posting for the runs and 8 for the index, 4.8 GB at 238M postings, 1.9 GB of which stay.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from octopus_trl.agent._bm25s import bm25s
from octopus_trl.agent.analyzer import STOP_WORDS, split, stem
from octopus_trl.agent.corpus import Corpus, Document
from octopus_trl.errors import ConfigError

MAX_POSTINGS = 1 << 22
MAX_WORD_FORMS = 1 << 21
_STOP = -1
Progress = Callable[[str, int, int], None]
"""Called with a stage's name, units done and units in all."""


def write_postings(
    corpus: Corpus,
    folder: Path,
    *,
    k1: float,
    b: float,
    progress: Progress | None = None,
    max_postings: int = MAX_POSTINGS,
) -> None:
    """Write the files that `bm25s.BM25.load` reads into an existing empty folder.

    score(t, d) = ln(1 + (N − df + ½)/(df + ½)) · tf / (k1 (1 − b + b |d| / mean|d|) + tf)

    Args:
        max_postings: postings of a run and of a block of the merge; sets the memory.
        progress: called after every 64 documents and every block.
    Raises:
        ConfigError: no document holds a word.
    """
    report = progress or (lambda stage, done, total: None)
    vocabulary, lengths, frequency = _write_runs(corpus, folder, report, max_postings)
    if not vocabulary:
        raise ConfigError(
            f"{corpus.path}: no document holds a word to index; texts need letters or digits "
            "besides stop words"
        )
    indptr = np.concatenate([[0], np.cumsum(frequency)])
    total = int(indptr[-1])
    runs = [np.load(path, mmap_mode="r") for path in sorted(folder.glob("run_*.npy"))]
    idf = np.array(
        [math.log(1 + (len(corpus) - df + 0.5) / (df + 0.5)) for df in frequency.tolist()],
        dtype=np.float32,
    )
    norm = k1 * (1 - b + b * lengths / lengths.mean())
    with _Column(folder / "data.csc.index.npy", np.float32, total) as scores:
        with _Column(folder / "indices.csc.index.npy", np.int32, total) as documents:
            for lo, hi in _blocks(indptr, max_postings):
                term, document, tf = _merge(runs, lo, hi)
                weight = tf / (norm[document] + tf)
                scores.append((idf[term] * weight).astype(np.float32))
                documents.append(document)
                report("merge", int(indptr[hi]), total)
    narrow = indptr.astype(np.int32) if total < 2**31 else indptr
    with _Column(folder / "indptr.csc.index.npy", narrow.dtype, len(narrow)) as column:
        column.append(narrow)
    del runs
    for path in folder.glob("run_*.npy"):
        path.unlink()
    _write_json(folder / "vocab.index.json", vocabulary)
    _write_json(folder / "params.index.json", _params(k1, b, len(corpus)))


def indexed_text(document: Document) -> str:
    """Join title and text, unless the text opens with its title or a front-matter block."""
    text = document.text.lstrip()
    return text if text.startswith((document.title, "---")) else f"{document.title}\n{text}"


def _write_runs(
    corpus: Corpus, folder: Path, report: Progress, max_postings: int
) -> tuple[dict[str, int], np.ndarray, np.ndarray]:
    """Write the sorted runs.

    Returns:
        Term ids by term, terms of each document [N] int64, documents of each term [V] int64.
    """
    terms = _TermIds()
    lengths = np.zeros(len(corpus), dtype=np.int64)
    frequency = np.zeros(0, dtype=np.int64)
    held: list[np.ndarray] = []
    size, number = 0, 0
    for row, document in enumerate(corpus):
        ids = terms.of(indexed_text(document))
        lengths[row] = len(ids)
        unique, tf = np.unique(ids, return_counts=True)
        held.append(np.stack([unique, np.full_like(unique, row), tf.astype(np.int32)]))
        size += len(unique)
        last = row + 1 == len(corpus)
        if size and (size >= max_postings or last):
            run = np.concatenate(held, axis=1)
            run = run[:, np.argsort(run[0], kind="stable")]
            np.save(folder / f"run_{number:06d}.npy", run)
            df = np.bincount(run[0], minlength=len(terms.ids))
            df[: len(frequency)] += frequency
            frequency, held, size, number = df, [], 0, number + 1
        if last or row % 64 == 63:
            report("read", row + 1, len(corpus))
    return terms.ids, lengths, frequency


class _TermIds:
    """Numbers terms in the order of their first use; remembers word forms, so that few are stemmed.

    What is remembered is dropped when it grows past `MAX_WORD_FORMS`: text of the web never stops
    bringing new ones.
    """

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self._forms: dict[str, int] = {}

    def of(self, text: str) -> np.ndarray:
        """Give the term ids of a text, [terms] int32."""
        forms = self._forms
        if len(forms) > MAX_WORD_FORMS:
            forms.clear()
        found = split(text)
        # Nearly every word is known: one pass in C over all, then a loop over the rest alone.
        ids = list(map(forms.get, found))
        for at in [at for at, term in enumerate(ids) if term is None]:
            ids[at] = self._number(found[at])
        terms = np.array(ids, dtype=np.int32)
        return terms[terms != _STOP]

    def _number(self, word: str) -> int:
        number = self._forms.get(word)
        if number is None:
            number = _STOP
            if word not in STOP_WORDS:
                number = self.ids.setdefault(stem(word), len(self.ids))
            self._forms[word] = number
        return number


def _blocks(indptr: np.ndarray, limit: int) -> Iterator[tuple[int, int]]:
    """Cut the terms into ranges of at most `limit` postings, or of one term."""
    lo, last = 0, len(indptr) - 1
    while lo < last:
        hi = int(np.searchsorted(indptr, indptr[lo] + limit, side="right")) - 1
        hi = min(max(hi, lo + 1), last)
        yield lo, hi
        lo = hi


def _merge(runs: list[np.ndarray], lo: int, hi: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give term, document and count of the postings of terms lo..hi−1, by term, then document."""
    parts = []
    for run in runs:  # runs follow the order of documents, so a stable sort keeps it
        start, end = np.searchsorted(run[0], [lo, hi])
        parts.append(np.asarray(run[:, start:end]))
    block = np.concatenate(parts, axis=1)
    term, document, tf = block[:, np.argsort(block[0], kind="stable")]
    return term, document, tf.astype(np.float32)


class _Column:
    """A one-dimensional `.npy` file of known length, written piece by piece."""

    def __init__(self, path: Path, dtype: Any, length: int) -> None:
        self._stream = path.open("wb")
        header = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
            "fortran_order": False,
            "shape": (length,),
        }
        np.lib.format.write_array_header_1_0(self._stream, header)

    def append(self, values: np.ndarray) -> None:
        self._stream.write(np.ascontiguousarray(values).data)

    def __enter__(self) -> _Column:
        return self

    def __exit__(self, *_: object) -> None:
        with self._stream as stream:
            stream.flush()
            os.fsync(stream.fileno())


def _params(k1: float, b: float, num_docs: int) -> dict[str, Any]:
    index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
    names = ("k1", "b", "delta", "method", "idf_method", "dtype", "int_dtype", "backend")
    values = {name: getattr(index, name) for name in names}
    return {**values, "num_docs": num_docs, "version": bm25s.__version__}


def _write_json(path: Path, record: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        json.dump(record, stream, ensure_ascii=False)
        stream.flush()
        os.fsync(stream.fileno())
