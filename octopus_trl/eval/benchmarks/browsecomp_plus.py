"""BrowseComp-Plus: 830 questions over a fixed corpus of 100,195 documents.

Questions and answers are published encoded, so that no crawler learns them: base64 over the XOR
of the UTF-8 text with SHA-256 of a canary. The canary is the operator's; it is neither shipped
nor stored, and what it decodes is held in memory only: no message, record or file of ours has it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import unicodedata
from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from octopus_trl.agent.corpus import CORPUS_FILE
from octopus_trl.agent.postings import Progress
from octopus_trl.errors import ConfigError
from octopus_trl.eval.benchmarks.benchmark import Benchmark, check_count
from octopus_trl.eval.benchmarks.tables import read_rows
from octopus_trl.files import replacing

QUESTIONS = "Tevatron/browsecomp-plus"
CORPUS = "Tevatron/browsecomp-plus-corpus"
CANARY_VARIABLE = "BROWSECOMP_PLUS_CANARY"
NUM_QUESTIONS = 830
NUM_DOCUMENTS = 100_195
_NAME = "browsecomp-plus"


def decode(text: str, canary: str) -> str:
    """Decode one encoded text.

    Raises:
        UnicodeDecodeError: the canary is another one, or the text is damaged.
        ValueError: it is no base64.
    """
    data = base64.b64decode(text, validate=True)
    key = hashlib.sha256(canary.encode()).digest()
    return bytes(a ^ b for a, b in zip(data, cycle(key), strict=False)).decode("utf-8")


def encode(text: str, canary: str) -> str:
    """Encode one text: the inverse of `decode`."""
    key = hashlib.sha256(canary.encode()).digest()
    data = bytes(a ^ b for a, b in zip(text.encode(), cycle(key), strict=False))
    return base64.b64encode(data).decode("ascii")


def load_browsecomp_plus(
    source: str | Path = QUESTIONS,
    *,
    canary: str | None = None,
    evidence: str | Path | None = None,
    gold: str | Path | None = None,
    revision: str | None = None,
    expected: int | None = NUM_QUESTIONS,
) -> Benchmark:
    """Load and decode the questions; of the 2.8 GB only three columns are read.

    Args:
        source: hub name, its download, or a file of the same columns.
        canary: by default that of the environment variable `BROWSECOMP_PLUS_CANARY`.
        evidence, gold: files of relevant documents in TREC's four columns; None leaves them out.
        expected: number of questions; None takes any.
    Raises:
        ConfigError: no or a wrong canary, damaged text, missing columns, another number of
            questions, a repeated id, or documents of unknown questions.
    """
    canary = str(canary) if canary is not None else os.environ.get(CANARY_VARIABLE)
    if not canary:
        raise ConfigError(
            f"{_NAME}: no canary; its questions are encoded with the string that its authors "
            f"publish for operators; set {CANARY_VARIABLE} to it"
        )
    columns = ("query_id", "query", "answer")
    rows = list(read_rows(source, columns, split="test", revision=revision))
    check_count(_NAME, len(rows), expected)
    questions = _decoded(rows, canary)
    for name, path in (("evidence_docs", evidence), ("gold_docs", gold)):
        if path is not None:
            _add_documents(questions, name, path)
    return Benchmark(_NAME, tuple(questions), secret=True)


def read_qrels(path: str | Path) -> dict[str, list[str]]:
    """Read relevant docids by question from lines `qid Q0 docid relevance`; 0 is not relevant.

    Raises:
        ConfigError: no such file, or a line of another form.
    """
    path = Path(path)
    found: dict[str, list[str]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: no readable file of relevant documents ({type(error).__name__}); the "
            "repository of the benchmark has them in topics-qrels/"
        ) from None
    for number, line in enumerate(lines, start=1):
        parts = line.split()
        if not parts:
            continue
        if len(parts) != 4 or not parts[3].isdigit():
            raise ConfigError(
                f"{path}:{number}: {len(parts)} columns; a line is `qid Q0 docid relevance`; "
                "correct or remove it"
            )
        documents = found.setdefault(parts[0], [])
        if int(parts[3]) > 0 and parts[2] not in documents:
            documents.append(parts[2])
    return found


def write_corpus(
    folder: str | Path,
    source: str | Path = CORPUS,
    *,
    split: str = "train",
    revision: str | None = None,
    expected: int | None = NUM_DOCUMENTS,
    progress: Progress | None = None,
) -> Path:
    """Write `corpus.jsonl` of a folder from a table with `docid`, `text` and perhaps `url`.

    It is written beside its place and renamed, so that a stopped download leaves no half corpus.

    Args:
        expected: number of documents; None takes any.
        progress: called with "download", documents so far and `expected`.
    Returns:
        The file.
    Raises:
        ConfigError: the table cannot be read, lacks a column, repeats a docid or has another size.
        OSError: the disk refused.
    """
    target = Path(folder) / CORPUS_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    with replacing(target) as stream:
        columns = ("docid", "text")
        for row in read_rows(
            source, columns, split=split, revision=revision, optional=("url", "title")
        ):
            docid = str(row["docid"])
            if docid in seen:
                raise ConfigError(
                    f"{source}: docid {docid!r} is there twice; docids are unique; get it again"
                )
            seen.add(docid)
            record = {**{k: v for k, v in row.items() if v is not None}, "docid": docid}
            stream.write(f"{json.dumps(record, ensure_ascii=False)}\n".encode())
            if progress is not None and len(seen) % 256 == 0:
                progress("download", len(seen), expected or len(seen))
        check_count(str(source), len(seen), expected)
    return target


def _decoded(rows: Iterable[Mapping[str, Any]], canary: str) -> list[dict[str, Any]]:
    questions, wrong = [], []
    for row in rows:
        identifier = str(row["query_id"])
        texts = {}
        for column in ("query", "answer"):
            try:
                text = decode(str(row[column] or ""), canary)
            except UnicodeDecodeError:
                text = ""
            except ValueError:
                raise ConfigError(
                    f"{_NAME}: {column} of query_id {identifier!r} is no base64: the file is "
                    "damaged, or decoded already; download it again"
                ) from None
            if not text or any(unicodedata.category(c) == "Cc" and c not in "\n\r\t" for c in text):
                wrong.append(identifier)
                break
            texts[column] = text
        else:
            question = {"question": texts["query"], "answers": [texts["answer"]]}
            questions.append({"id": identifier, **question})
    if wrong and not questions:
        raise ConfigError(
            f"{_NAME}: not one of {len(wrong)} questions decodes: the canary is a wrong one; check "
            f"{CANARY_VARIABLE} for blanks and quotes"
        )
    if wrong:
        raise ConfigError(
            f"{_NAME}: {len(wrong)} of {len(wrong) + len(questions)} questions do not decode, "
            f"query_id {wrong[0]!r} first: the file is damaged, or the canary is a wrong one; "
            "download it again"
        )
    return questions


def _add_documents(questions: list[dict[str, Any]], name: str, path: str | Path) -> None:
    relevant = read_qrels(path)
    known = {row["id"] for row in questions}
    if unknown := sorted(set(relevant) - known):
        raise ConfigError(
            f"{path}: {len(unknown)} of its questions are not among the {len(known)} loaded, qid "
            f"{unknown[0]!r} first; take the files of one release"
        )
    if bare := sorted(known - {qid for qid, documents in relevant.items() if documents}):
        raise ConfigError(
            f"{path}: no relevant document for {len(bare)} questions, id {bare[0]!r} first; the "
            "file is cut; download it again"
        )
    for row in questions:
        row[name] = relevant[row["id"]]
