"""OpenResearcher's questions: training on those of middling difficulty, 500 held out by a rule.

The set has no official validation part. Ours follows from the ids alone (`VALIDATION_RULE`), so
that anyone can draw it again and nobody had to choose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from octopus_trl.errors import ConfigError
from octopus_trl.eval.benchmarks.benchmark import Benchmark, as_answers
from octopus_trl.eval.benchmarks.overlap import find_overlap
from octopus_trl.eval.benchmarks.tables import read_rows

QUESTIONS = "OpenResearcher/OpenResearcher-Dataset"
CONFIGS = tuple(f"seed_{number}" for number in range(42, 58))
NUM_VALIDATION = 500
_SALT = "octopus_trl open-researcher validation 1:"
VALIDATION_RULE = (
    f"the {NUM_VALIDATION} qids with the smallest sha256('{_SALT}' + qid) in hexadecimal, qid in "
    "decimal digits"
)
Part = Literal["train", "validation", "all"]


def validation_ids(qids: Iterable[str], count: int = NUM_VALIDATION) -> list[str]:
    """Give the held-out ids, smallest hash first. The order of `qids` does not matter."""
    return sorted(set(qids), key=_mark)[:count]


def load_open_researcher(
    source: str | Path = QUESTIONS,
    *,
    part: Part = "train",
    config: str = CONFIGS[0],
    labels: str | Path | None = None,
    min_passes: int = 1,
    max_passes: int = 14,
    attempts: int = len(CONFIGS),
    num_validation: int = NUM_VALIDATION,
    revision: str | None = None,
) -> Benchmark:
    """Load one configuration; each has every question, and they differ in their trajectories.

    Args:
        source: hub name, its download, or a file with `qid`, `question` and `answer`.
        part: `train` is all but the validation ids and within the difficulty filter;
            `validation` is never filtered.
        labels: a table with `qid` and `correct` (0 or 1), a row an attempt of a teacher; None
            filters nothing.
        min_passes, max_passes: right attempts that a question to train on has, both ends included.
        attempts: attempts of each question in `labels`.
    Raises:
        ConfigError: the tables cannot be read, an id is there twice, a value out of range, or
            another number of attempts.
    """
    if part not in ("train", "validation", "all"):
        raise ConfigError(f"part={part!r}: must be train, validation or all")
    if not 0 <= min_passes <= max_passes <= attempts:
        raise ConfigError(
            f"min_passes={min_passes}, max_passes={max_passes}: must satisfy 0 <= min <= max <= "
            f"{attempts}, the attempts of a question"
        )
    rows = [
        {"id": str(row["qid"]), "question": row["question"], "answers": as_answers(row["answer"])}
        for row in read_rows(
            source,
            ("qid", "question", "answer"),
            split="train",
            config=config,
            revision=revision,
        )
    ]
    whole = Benchmark("open-researcher/all", tuple(rows))  # checks ids before they are drawn from
    if part == "all":
        return whole
    held_out = set(validation_ids((row["id"] for row in rows), num_validation))
    if part == "validation":
        kept = [row for row in rows if row["id"] in held_out]
        return Benchmark("open-researcher/validation", tuple(kept), notes=(VALIDATION_RULE,))
    kept = [row for row in rows if row["id"] not in held_out]
    notes = [f"{len(held_out)} validation questions held out: {VALIDATION_RULE}"]
    if labels is not None:
        passes = read_passes(labels, attempts)
        unknown = sum(row["id"] not in passes for row in kept)
        easy = sum(passes.get(row["id"], 0) > max_passes for row in kept)
        hard = sum(passes.get(row["id"], min_passes) < min_passes for row in kept)
        kept = [r for r in kept if min_passes <= passes.get(r["id"], -1) <= max_passes]
        notes.append(
            f"of {attempts} attempts {min_passes} to {max_passes} are right: {hard} questions are "
            f"harder, {easy} easier, {unknown} without a label; these are left out"
        )
    return Benchmark("open-researcher/train", tuple(kept), notes=tuple(notes))


def read_passes(labels: str | Path, attempts: int) -> dict[str, int]:
    """Count the right attempts of each question.

    Raises:
        ConfigError: a label is not 0 or 1, or a question has more attempts than `attempts`.
    """
    right: dict[str, int] = {}
    tried: dict[str, int] = {}
    for row in read_rows(labels, ("qid", "correct"), split="train"):
        qid, correct = str(row["qid"]), row["correct"]
        if correct not in (0, 1):
            raise ConfigError(
                f"{labels}: correct of qid {qid!r} is {correct!r}; a row is one attempt, right (1, "
                "true) or wrong (0, false)"
            )
        right[qid] = right.get(qid, 0) + int(correct)
        tried[qid] = tried.get(qid, 0) + 1
    if too_many := [qid for qid, count in tried.items() if count > attempts]:
        raise ConfigError(
            f"{labels}: qid {too_many[0]!r} has {tried[too_many[0]]} attempts, at most {attempts} "
            "were made of a question; pass attempts=, or remove rows that are there twice"
        )
    return right


def validation_record(
    whole: Benchmark, held_out: Benchmark | None = None, count: int = NUM_VALIDATION
) -> dict[str, Any]:
    """Give what is published of the split: rule, ids, and what they share with another benchmark.

    Holds ids and counts alone, no question and no answer.

    Args:
        whole: all questions of one configuration (`part="all"`).
        held_out: questions that nobody may train on; None compares with nothing.
    Raises:
        ConfigError: fewer questions than `count`, so that nothing would be left to train on.
    """
    if len(whole) <= count:
        raise ConfigError(
            f"{whole.name}: {len(whole)} questions, {count} are to be held out of them: take a "
            "whole configuration"
        )
    qids = validation_ids((row["id"] for row in whole.questions), count)
    record: dict[str, Any] = {
        "rule": VALIDATION_RULE,
        "num_questions": len(whole),
        "questions_sha256": whole.fingerprint(),
        "qids": qids,
    }
    if held_out is not None:
        shared = find_overlap(whole.questions, held_out.questions)
        held = set(qids)
        record["overlap"] = {
            "with": held_out.name,
            "with_sha256": held_out.fingerprint(),
            **{
                name: {"train": sorted(set(found) - held), "validation": sorted(set(found) & held)}
                for name, found in (
                    ("same_question", shared.same),
                    ("shared_words", shared.shared),
                    ("gold_documents", shared.documents),
                )
            },
        }
    return record


def _mark(qid: str) -> str:
    return hashlib.sha256(f"{_SALT}{qid}".encode()).hexdigest()
