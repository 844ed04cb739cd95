"""A set of questions with gold answers, whatever it was loaded from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octopus_trl.errors import ConfigError


@dataclass(frozen=True, repr=False)
class Benchmark:
    """Questions that an evaluation runs over.

    Args:
        name: of the benchmark and its part, such as `open-researcher/validation`.
        questions: rows with `id` (text, unique), `question`, `answers` (list of texts), and where
            they are known `gold_docs` and `evidence_docs` (docids); others pass through.
        secret: question and answer must not be written in clear: no log, no report, no repository.
        notes: what was left out and why, in words, for the record of a result.
    Raises:
        ConfigError: no question, a repeated id, or a row without question or answer.
    """

    name: str
    questions: tuple[dict[str, Any], ...]
    secret: bool = False
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.questions:
            raise ConfigError(f"{self.name}: 0 questions are left; {'; '.join(self.notes)}")
        seen: dict[str, int] = {}
        for number, row in enumerate(self.questions):
            identifier = row.get("id")
            if not isinstance(identifier, str) or not identifier.strip():
                raise ConfigError(
                    f"{self.name}: row {number} has id {identifier!r}; every question has one, a "
                    "text that is not empty"
                )
            if identifier in seen:
                raise ConfigError(
                    f"{self.name}: id {identifier!r} is in rows {seen[identifier]} and {number}; "
                    "ids are unique, a result would count one question twice; remove one of the two"
                )
            seen[identifier] = number
            answers = row.get("answers")
            # Values are not quoted here: they may be secret.
            for column, good in (
                ("question", _is_text(row.get("question"))),
                ("answers", isinstance(answers, list) and answers and all(map(_is_text, answers))),
            ):
                if not good:
                    raise ConfigError(
                        f"{self.name}: {column} of id {identifier!r} is missing or empty; correct "
                        "or remove the row"
                    )

    def __repr__(self) -> str:
        return f"Benchmark({self.name!r}, {len(self.questions)} questions)"

    def __len__(self) -> int:
        return len(self.questions)

    def fingerprint(self) -> str:
        """Hash of ids, questions and answers, in order: two results compare if it is the same."""
        return fingerprint_of(self.questions)


def fingerprint_of(questions: Iterable[Mapping[str, Any]]) -> str:
    """Hash of ids, questions and answers, in order."""
    digest = hashlib.sha256()
    for row in questions:
        record = [row["id"], row["question"], row["answers"]]
        digest.update(json.dumps(record).encode() + b"\n")
    return digest.hexdigest()


def as_answers(value: Any) -> list[str]:
    """Give a gold answer, or a list of them, as a list; numbers become texts."""
    values = value if isinstance(value, list | tuple) else [value]
    return [str(one) for one in values if one is not None and str(one).strip()]


def check_count(name: str, found: int, expected: int | None) -> None:
    """Refuse another number of rows than a published set has; None takes any.

    Raises:
        ConfigError: the numbers differ.
    """
    if expected is not None and found != expected:
        raise ConfigError(
            f"{name}: {found} rows, the published set has {expected}; a share of another number is "
            "another result; download it again, or pass expected=None for a part of it"
        )


def check_docids(name: str, wanted: Iterable[str], corpus: Sequence[str]) -> None:
    """Refuse gold documents that a corpus lacks: their questions could not be answered.

    Raises:
        ConfigError: says how many and the first.
    """
    known = set(corpus)
    if missing := sorted(set(wanted) - known):
        raise ConfigError(
            f"{name}: {len(missing)} gold documents are not in the corpus of {len(known)} "
            f"documents, docid {missing[0]!r} first; take the corpus of these questions"
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
