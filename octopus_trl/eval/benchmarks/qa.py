"""Question answering as Search-R1 uses it: FlashRAG's columns, or the rows prepared for verl."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octopus_trl.errors import ConfigError
from octopus_trl.eval.benchmarks.benchmark import Benchmark, as_answers
from octopus_trl.eval.benchmarks.tables import read_rows

QUESTIONS = "RUC-NLPIR/FlashRAG_datasets"
_OPTIONAL = (
    "id",
    "question",
    "golden_answers",
    "answer",
    "answers",
    "data_source",
    "prompt",
    "reward_model",
    "extra_info",
)
_QUESTION = re.compile(r".*\bQuestion:\s*", re.DOTALL)


def load_qa(
    source: str | Path = QUESTIONS,
    *,
    split: str = "test",
    config: str | None = None,
    revision: str | None = None,
    limit: int | None = None,
) -> Benchmark:
    """Load questions with short gold answers.

    Rows have `question` and `golden_answers` (or `answer`, `answers`), with an `id` or one made of
    source, split and index; or they are verl's, with `prompt`, `reward_model.ground_truth.target`
    and `extra_info`, whose question follows the last `Question:` of the prompt.

    Args:
        source: hub name, its download, or a file.
        config: part of a hub data set, such as `hotpotqa`.
        limit: most questions, the first ones.
    Raises:
        ConfigError: nothing there, offline, or a row without question or answer.
    """
    questions: list[dict[str, Any]] = []
    rows = read_rows(source, (), split=split, config=config, revision=revision, optional=_OPTIONAL)
    for number, row in enumerate(rows):
        if limit is not None and number >= limit:
            break
        questions.append(_question(row, f"{source}, row {number}", f"{config or split}-{number}"))
    return Benchmark(f"qa/{config or Path(source).stem}/{split}", tuple(questions))


def _question(row: Mapping[str, Any], place: str, default_id: str) -> dict[str, Any]:
    extra = row.get("extra_info") or {}
    identifier = row.get("id")
    if identifier is None and "index" in extra:
        parts = (row.get("data_source"), extra.get("split"), extra["index"])
        identifier = "-".join(str(part) for part in parts if part is not None)
    text = row.get("question") or _asked(row.get("prompt"))
    if text is None:
        raise ConfigError(
            f"{place}: no question; a row has a column question, or a prompt with `Question: ...`"
        )
    truth = (row.get("reward_model") or {}).get("ground_truth")
    target = truth.get("target") if isinstance(truth, Mapping) else truth
    gold = next(
        (
            value
            for value in (row.get("golden_answers"), row.get("answers"), row.get("answer"), target)
            if value is not None
        ),
        None,
    )
    if gold is None:
        raise ConfigError(
            f"{place}: no gold answer; a row has golden_answers, answers, answer, or "
            "reward_model.ground_truth.target"
        )
    return {
        "id": str(identifier if identifier is not None else default_id),
        "question": str(text),
        "answers": as_answers(gold),
        **({"source": str(row["data_source"])} if row.get("data_source") else {}),
    }


def _asked(prompt: Any) -> str | None:
    """Give what follows the last `Question:` of a prompt, else its whole text."""
    text = prompt if isinstance(prompt, str) else (prompt or [{}])[-1].get("content")
    return _QUESTION.sub("", text).strip() if isinstance(text, str) else None
