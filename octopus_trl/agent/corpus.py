"""The folder format of anyone's corpus and questions, checked line by line.

`corpus.jsonl` holds one document a line: `docid` and `text`, optionally `title` and `url`.
`questions.jsonl` holds one question a line: `id`, `question`, `answers`; other columns pass
through. Every fault is one `ConfigError` that names file, line, rule and fix.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octopus_trl.errors import ConfigError
from octopus_trl.files import write_whole

CORPUS_FILE = "corpus.jsonl"
QUESTIONS_FILE = "questions.jsonl"
_TITLE_CHARS = 80
_TELL_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Document:
    """One line of `corpus.jsonl`."""

    docid: str
    text: str
    title: str
    url: str = ""


class Corpus:
    """Random access to the documents of a `corpus.jsonl`, read through a memory map.

    The whole file is checked once; afterwards only byte offsets, docids and titles are held, and
    processes that map the same file share its pages. Reads are safe from several threads.

    Args:
        path: the file, or a folder that holds `corpus.jsonl`.
        progress: called with "check", bytes read and bytes in all, after every 16 MB or so.
    Raises:
        ConfigError: no such file, no document in it, or a line that breaks a rule.
    """

    def __init__(
        self, path: str | Path, *, progress: Callable[[str, int, int], None] | None = None
    ) -> None:
        self.path = _file(path, CORPUS_FILE)
        self.docids: list[str] = []
        self.titles: list[str] = []
        self._index: dict[str, int] = {}
        end, told, size = 0, 0, self.path.stat().st_size
        first_lines: list[int] = []
        digest = hashlib.sha256()
        starts: list[int] = []
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                digest.update(line)
                start, end = end, end + len(line)
                if progress is not None and (end - told >= _TELL_BYTES or end == size):
                    told = end
                    progress("check", end, size)
                if not line.strip():
                    continue
                document = _document(line, f"{self.path}:{number}")
                if document.docid in self._index:
                    first = first_lines[self._index[document.docid]]
                    raise ConfigError(
                        f"{self.path}:{number}: docid {document.docid!r} is already on line "
                        f"{first}; docids are unique; rename or remove one of the two"
                    )
                self._index[document.docid] = len(self.docids)
                self.docids.append(document.docid)
                self.titles.append(document.title)
                first_lines.append(number)
                starts.append(start)
        if not self.docids:
            raise ConfigError(
                f"{self.path}: 0 documents; a corpus holds at least one line such as "
                '{"docid": "1", "text": "..."}'
            )
        self.sha256 = digest.hexdigest()
        self._starts = np.asarray(starts, dtype=np.int64)
        with self.path.open("rb") as stream:
            self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self.docids)

    def __getitem__(self, index: int) -> Document:
        start = int(self._starts[index])
        end = self._bytes.find(b"\n", start)
        line = self._bytes[start:] if end < 0 else self._bytes[start:end]
        return _document(line, str(self.path))

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))

    def find(self, docid: str) -> Document | None:
        """Return the document of this docid, None where there is none."""
        index = self._index.get(docid)
        return None if index is None else self[index]


def read_questions(path: str | Path) -> list[dict[str, Any]]:
    """Read a `questions.jsonl`, or the one in a folder.

    Each row has `id`, `question` and `answers` (a list of texts, also where the file has one
    `answer`); other columns are passed on unchanged.

    Raises:
        ConfigError: no such file, no question, broken JSON, a missing field, a repeated id.
    """
    path = _file(path, QUESTIONS_FILE)
    rows: list[dict[str, Any]] = []
    seen: dict[str, int] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            row = parse_record(line, place)
            row["id"] = _identifier(row, "id", place)
            if row["id"] in seen:
                raise ConfigError(
                    f"{place}: id {row['id']!r} is already on line {seen[row['id']]}; ids are "
                    "unique; rename one of the two"
                )
            if not isinstance(row.get("question"), str) or not row["question"].strip():
                raise ConfigError(
                    f"{place}: question is {row.get('question')!r}; it must be a text that is not "
                    'empty; add "question": "..."'
                )
            row["answers"] = _answers(row, place)
            seen[row["id"]] = number
            rows.append(row)
    if not rows:
        raise ConfigError(
            f"{path}: 0 questions; it holds at least one line such as "
            '{"id": "1", "question": "...", "answers": ["..."]}'
        )
    return rows


def write_questions(folder: str | Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write `questions.jsonl` of a folder, whole or not at all; `read_questions` gives the rows.

    Returns:
        The file.
    Raises:
        OSError: the disk refused.
    """
    target = Path(folder) / QUESTIONS_FILE
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
    write_whole(target, "".join(lines))
    return target


def _answers(row: dict[str, Any], place: str) -> list[str]:
    answers = row.get("answers", row.pop("answer", None))
    if isinstance(answers, str):
        answers = [answers]
    if (
        not isinstance(answers, Sequence)
        or not answers
        or not all(isinstance(answer, str) and answer.strip() for answer in answers)
    ):
        raise ConfigError(
            f"{place}: answers is {answers!r}; a question has at least one accepted answer, each "
            'a text that is not empty; add "answers": ["..."] or remove the line'
        )
    return list(answers)


def _file(path: str | Path, name: str) -> Path:
    path = Path(path)
    if path.is_dir():
        path = path / name
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file; a corpus folder holds {CORPUS_FILE} and {QUESTIONS_FILE}; "
            "check the path (data/README.md has the format)"
        )
    return path


def parse_record(line: bytes, place: str) -> dict[str, Any]:
    """Read a line as a JSON object; no message quotes its text.

    Raises:
        ConfigError: it is not UTF-8, not JSON or no object.
    """
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{place}: byte {error.start} is not UTF-8; lines are UTF-8; convert the file"
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{place}: broken JSON ({error.msg} at column {error.colno}); each line is one JSON "
            "object; correct or remove this line"
        ) from None
    if not isinstance(record, dict):
        raise ConfigError(
            f"{place}: the line holds {type(record).__name__}; each line is one JSON object; "
            "correct or remove this line"
        )
    return record


def _identifier(record: dict[str, Any], name: str, place: str) -> str:
    value = record.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(
            f"{place}: {name} is {value!r}; every line has a {name}, a text or an integer; "
            f'add "{name}": "..."'
        )
    return value


def _document(line: bytes, place: str) -> Document:
    record = parse_record(line, place)
    docid = _identifier(record, "docid", place)
    text = record.get("text")
    if not isinstance(text, str):
        raise ConfigError(
            f'{place}: text of docid {docid!r} is {text!r}; it must be a text; add "text": "..."'
        )
    for name in ("title", "url"):
        if not isinstance(record.get(name) or "", str):
            raise ConfigError(
                f"{place}: {name} of docid {docid!r} is {record[name]!r}; it must be a text; "
                "quote it or leave it out"
            )
    return Document(docid, text, record.get("title") or title_of(text), record.get("url") or "")


def title_of(text: str) -> str:
    """Give the title of a front-matter block, else the first line that is not empty."""
    lines = text.lstrip()[:4096].splitlines()
    if lines and lines[0].strip() == "---":
        for line in lines[1:]:
            key, _, value = line.partition(":")
            if line.strip() == "---":
                break
            if key.strip().lower() == "title" and value.strip():
                return value.strip().strip("\"'")[:_TITLE_CHARS]
        return ""
    return lines[0].strip()[:_TITLE_CHARS] if lines else ""
