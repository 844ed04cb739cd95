"""Two stages of grading as one TRL reward: exact match first, the judge for the rest."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octopus_trl.agent.reward import completion_text, is_exact_match
from octopus_trl.errors import ConfigError
from octopus_trl.eval.judge import Case, Judge

Stage = Literal["no_gold", "no_answer", "exact", "judge", "judge_unparsed", "judge_down"]
STAGES: tuple[Stage, ...] = (
    "exact",
    "judge",
    "judge_unparsed",
    "judge_down",
    "no_answer",
    "no_gold",
)
_EXACT_ANSWER = re.compile(
    r"^[\s*_#>-]*exact answer[\s*_]*:[\s*_]*(.*)$", re.IGNORECASE | re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Grade:
    """Score of an answer, None where nothing could judge it, and the stage that decided."""

    score: float | None
    stage: Stage


def exact_answer(text: str) -> str:
    """Give what follows the last label `Exact Answer:`, else the whole text.

    >>> exact_answer("Explanation: see [3]\\n**Exact Answer:** 1907\\nConfidence: 80%")
    '1907'
    """
    found = _EXACT_ANSWER.findall(text)
    return (found[-1] if found else text).strip().strip("*_").strip()


class AnswerReward:
    """Grades answers, as a TRL reward function.

    An exact match is right without a judge. A missing answer is wrong without one. For the rest
    the judge decides: a reply without a verdict is a no, and a judge that cannot be reached gives
    no reward, so that the row leaves its group and is not taken for wrong.

    Args:
        judge: None grades by exact match alone.
        exact_first: False asks the judge about every answer.
        name: under which TRL logs it.
    """

    def __init__(
        self, judge: Judge | None = None, *, exact_first: bool = True, name: str = "answer"
    ) -> None:
        if judge is None and not exact_first:
            raise ConfigError("exact_first=False without a judge grades nothing: give a judge")
        self._judge, self._exact_first = judge, exact_first
        self.__name__ = name
        self._decided: Counter[Stage] = Counter()

    @property
    def identity(self) -> dict[str, Any]:
        """What a grade depends on; belongs in the record of a result."""
        judge = None if self._judge is None else self._judge.identity
        return {"exact_first": self._exact_first, "judge": judge}

    def shares(self) -> dict[str, float]:
        """Give the share of all answers so far that each stage decided; sums to 1."""
        total = self._decided.total()
        return {stage: self._decided[stage] / total if total else 0.0 for stage in STAGES}

    def grade(
        self,
        questions: Sequence[str],
        answers: Sequence[str | Sequence[str] | None],
        responses: Sequence[str | None],
    ) -> list[Grade]:
        """Grade each response to its question.

        Raises:
            ConfigError: other lengths, or the judge refuses to serve.
        """
        if not len(questions) == len(answers) == len(responses):
            raise ConfigError(
                f"{len(questions)} questions, {len(answers)} answers, {len(responses)} responses: "
                "one each"
            )
        grades: list[Grade | None] = []
        open_cases: dict[int, Case] = {}
        for row, (question, gold, response) in enumerate(
            zip(questions, answers, responses, strict=True)
        ):
            golds = (gold,) if isinstance(gold, str) else tuple(gold or ())
            grade = self._without_judge(golds, response)
            grades.append(grade)
            if grade is None:
                open_cases[row] = Case(question, golds, str(response).strip())
        if open_cases:
            assert self._judge is not None, "without a judge no case stays open"
            verdicts = self._judge.judge(list(open_cases.values()))
            for row, verdict in zip(open_cases, verdicts, strict=True):
                if verdict is None:
                    grades[row] = Grade(None, "judge_down")
                else:
                    stage: Stage = "judge" if verdict.parsed else "judge_unparsed"
                    grades[row] = Grade(float(verdict.correct), stage)
        done = [grade for grade in grades if grade is not None]
        self._decided.update(grade.stage for grade in done)
        return done

    def __call__(
        self,
        completions: Sequence[Any],
        prompts: Sequence[Any] | None = None,
        question: Sequence[str] | None = None,
        answer: Sequence[Any] | None = None,
        answers: Sequence[Any] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Score committed answers as TRL calls it; logs the share that each stage decided.

        Args:
            completions: commit text of each episode, or a message list that ends with it.
            prompts: what was asked, where the data set has no column `question`.
            question, answer, answers: columns of the data set.
            log_metric: TRL's hook.
        Raises:
            ConfigError: no gold column, no question, other lengths, or a judge that refuses.
        """
        gold = answers if answers is not None else answer
        if gold is None:
            raise ConfigError(
                f"reward {self.__name__} needs the column answer (text) or answers (list of "
                "texts): add one to the questions"
            )
        asked = question if question is not None else prompts
        if asked is None:
            raise ConfigError(
                f"reward {self.__name__} needs the column question or prompt: a judge reads it"
            )
        grades = self.grade(
            [_text(one) for one in asked], list(gold), [completion_text(one) for one in completions]
        )
        if log_metric is not None and grades:
            counts = Counter(grade.stage for grade in grades)
            for stage in STAGES:
                log_metric(f"grader/{stage}", counts[stage] / len(grades))
        return [grade.score for grade in grades]

    def _without_judge(self, golds: tuple[str, ...], response: str | None) -> Grade | None:
        if not golds:
            return Grade(None, "no_gold")
        if response is None or not response.strip():
            return Grade(0.0, "no_answer")
        if self._exact_first:
            if is_exact_match(exact_answer(response), golds) or is_exact_match(response, golds):
                return Grade(1.0, "exact")
        return None if self._judge is not None else Grade(0.0, "exact")


def _text(prompt: Any) -> str:
    """Give the question of a prompt: its text, or the last message of a user."""
    if isinstance(prompt, str):
        return prompt
    users = [m for m in prompt if isinstance(m, Mapping) and m.get("role") == "user"]
    return str(users[-1].get("content") or "") if users else ""
