"""Graders by name, with the judge that a command line or a recipe asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octopus_trl.agent.reward import exact_match
from octopus_trl.errors import ConfigError
from octopus_trl.eval.grader import AnswerReward
from octopus_trl.eval.judge import Judge
from octopus_trl.eval.judge_models import LocalModel, ServerModel

REWARDS = {
    "exact_match": "1 for an exact match after normalisation, 0 for any other answer",
    "answer": "exact match first, a judge for the rest",
    "judge": "a judge for every answer",
}


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """Which model judges.

    Args:
        url: address of an OpenAI-compatible server; None loads `model` into this process.
        model: name that the server knows, or hub name or folder of a local model.
        revision: commit of a local model from the hub.
        device: where a local model runs.
        max_tokens: most tokens of a reply.
    """

    url: str | None = None
    model: str | None = None
    revision: str | None = None
    device: str = "cpu"
    max_tokens: int = 512

    def judge(self, cache: str | Path | None) -> Judge | None:
        """Make the judge; None where none is asked for.

        Args:
            cache: file of its verdicts.
        Raises:
            ConfigError: an address without a model's name, or what the judge refuses.
        """
        if self.model is None:
            if self.url is not None:
                raise ConfigError(
                    f"judge_url={self.url} without judge_model: name the model that the server runs"
                )
            return None
        if self.url is not None:
            return Judge(ServerModel(self.url, self.model, max_tokens=self.max_tokens), cache=cache)
        local = LocalModel(
            self.model, revision=self.revision, device=self.device, max_tokens=self.max_tokens
        )
        return Judge(local, cache=cache)


def reward_functions(
    names: Sequence[str], settings: JudgeSettings, *, cache: str | Path | None = None
) -> list[Callable[..., Any]]:
    """Give TRL reward functions by name, in order.

    Args:
        cache: file of the judge's verdicts, shared by all processes of a run.
    Raises:
        ConfigError: no name, an unknown or repeated one, both graders that ask a judge, one without
            a judge, or a judge that no grader asks.
    """
    if unknown := [name for name in names if name not in REWARDS]:
        raise ConfigError(
            f"reward_funcs: {unknown[0]!r} is unknown; there are "
            + ", ".join(f"{name} ({text})" for name, text in REWARDS.items())
        )
    asking = [name for name in names if name != "exact_match"]
    if not names or len(set(names)) < len(names) or len(asking) > 1:
        raise ConfigError(
            f"reward_funcs={list(names)}: name at least one, each once, and one of answer and "
            "judge: both ask the same judge and log the same shares"
        )
    judge = settings.judge(cache)
    if asking and judge is None:
        raise ConfigError(
            f"reward_funcs: {asking[0]} without a judge; set judge_model (and judge_url where a "
            "server runs it)"
        )
    if judge is not None and not asking:
        raise ConfigError(
            f"judge_model={settings.model} and reward_funcs={list(names)}: nothing asks it; take "
            "answer or judge, or drop it"
        )
    made: dict[str, Callable[..., Any]] = {
        "exact_match": exact_match,
        **{name: AnswerReward(judge, exact_first=name == "answer", name=name) for name in asking},
    }
    return [made[name] for name in names]
