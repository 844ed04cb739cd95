"""Outcome of an episode: does its answer equal a gold answer.

Equality is SQuAD's: after normalisation, and with any one of the gold answers. Containment is
not a reward here, a long answer would earn it.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from octopus_trl.errors import ConfigError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """Lower-case, drop ASCII punctuation and articles, squeeze blanks (SQuAD).

    >>> normalise_answer("The  West-Gate!")
    'westgate'
    """
    bare = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def is_exact_match(answer: str | None, gold: str | Sequence[str]) -> bool:
    """Whether an answer equals one of the gold answers; no answer equals none."""
    if answer is None:
        return False
    golds = [gold] if isinstance(gold, str) else list(gold)
    return any(_equal(answer, one) for one in golds)


def exact_match(
    completions: Sequence[Any],
    answer: Sequence[Any] | None = None,
    answers: Sequence[Any] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Score committed answers, 1.0 for an exact match and 0.0 for any other, as TRL calls it.

    Args:
        completions: commit text of each episode, or a message list that ends with it; None where
            the root committed nothing.
        answer, answers: columns of the data set, one gold text or a list of them a row.

    Returns:
        One float a row; None where the row has no gold answer, which leaves it out of its group.

    Raises:
        ConfigError: the data set has neither column, or a column of another length.
    """
    column = answers if answers is not None else answer
    if column is None:
        raise ConfigError(
            "exact_match needs the column answer (text) or answers (list of texts): add one to "
            "the questions, or take another reward"
        )
    if len(column) != len(completions):
        raise ConfigError(
            f"exact_match got {len(completions)} completions and {len(column)} answers: one each"
        )
    return [
        None if not gold else float(is_exact_match(completion_text(completion), gold))
        for completion, gold in zip(completions, column, strict=True)
    ]


def completion_text(completion: Any) -> str | None:
    """Give the text of a completion, whether it is text or a list of messages."""
    if completion is None or isinstance(completion, str):
        return completion
    last = completion[-1] if completion else {}
    content = last.get("content")
    return content if isinstance(content, str) else None


def _equal(answer: str, gold: str) -> bool:
    wanted = normalise_answer(gold)
    if not wanted:  # all of the gold answer is punctuation or an article
        return answer.strip().lower() == gold.strip().lower()
    return normalise_answer(answer) == wanted
