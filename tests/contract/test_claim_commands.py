"""Every command of `data/claims.yaml` is one that its script accepts, and finds what it reads.

The scripts themselves run, up to the moment when their parser has accepted the command line.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import os
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from trl import TrlParser

from octopus_trl.agent.config import RolloutConfig
from octopus_trl.eval.benchmarks.choice import BENCHMARKS
from octopus_trl.eval.claims import Claim, load_claims
from octopus_trl.eval.policy_settings import rollout_settings

ROOT = Path(__file__).parents[2]
CLAIMS = load_claims(ROOT / "data" / "claims.yaml")
CHAIN = " && "  # between commands that run one after another
LAUNCHERS = (["accelerate", "launch"], ["python", "-m", "accelerate.commands.launch"])
ON_A_CPU = ["--use_cpu", "true", "--bf16", "false", "--tf32", "false"]


class Accepted(Exception):
    """Stops a script once its arguments are parsed; holds them."""


def commands(claim: Claim) -> Iterator[list[list[str]]]:
    """Give the chains of a claim, each a list of split commands."""
    if claim.command:
        yield [shlex.split(command) for command in claim.command.split(CHAIN)]
    if claim.small:
        yield [
            shlex.split(command.replace("{out}", "runs/out")) for command in claim.small.commands
        ]


ALL = sorted({tuple(words) for c in CLAIMS for chain in commands(c) for words in chain})


def parsed(words: list[str]) -> Any:
    """Run a script until its parser has accepted `words`, and give what it made of them."""
    parse, configured = argparse.ArgumentParser.parse_args, TrlParser.parse_args_and_config

    def stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        raise Accepted(parse(self, *args, **kwargs))

    def stop_recipe(self: TrlParser, *args: Any, **kwargs: Any) -> None:
        raise Accepted(*configured(self, *args, **kwargs))

    recipe = words[0] == "scripts/train.py"
    here = sys.path[:]
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        with (
            mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
            mock.patch.object(TrlParser, "parse_args_and_config", stop_recipe),
            mock.patch.object(sys, "argv", [*words, *(ON_A_CPU if recipe else [])]),
            mock.patch.dict(os.environ),
            pytest.raises(Accepted) as accepted,
        ):
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    finally:
        sys.path[:] = here
    return accepted.value.args


def script_of(words: list[str]) -> list[str]:
    """Give script and arguments of a command; a launcher's own options are checked here."""
    for launcher in LAUNCHERS:
        if words[: len(launcher)] == launcher:
            asked = launch_command_parser().parse_args(words[len(launcher) :])
            assert (ROOT / asked.config_file).is_file()
            return [asked.training_script, *asked.training_script_args]
    assert words[0] == "python"
    return words[1:]


@pytest.mark.parametrize("command", ALL, ids=lambda words: " ".join(words)[:90])
def test_its_script_accepts_the_command(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = script_of(list(command))
    if words[:2] == ["-m", "pytest"]:
        assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))
        return
    (asked, *_) = parsed(words)
    if words[0] == "scripts/bench.py":
        assert set(asked.case) <= set(sys.modules["bench_cases"].CASES)
    if words[0] == "scripts/evaluate.py":
        assert asked.recipe is None or (ROOT / asked.recipe).is_file()
        world = asked.data == "data/seal_join"
        RolloutConfig(**rollout_settings(world=world, recipe=asked.recipe, given={}))
    if getattr(asked, "loader_options", None):
        loader = BENCHMARKS[getattr(asked, "benchmark", None) or asked.questions]
        names = {option.partition("=")[0] for option in asked.loader_options}
        assert names <= set(inspect.signature(loader).parameters)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_what_a_command_reads_of_a_run_an_earlier_one_of_the_chain_has_written(
    claim: Claim,
) -> None:
    for chain in commands(claim):
        written: set[str] = set()
        for words in chain:
            outputs = {b for a, b in itertools.pairwise(words) if a in ("--output", "--output_dir")}
            read = {
                word for word in words if word.startswith("runs/") and word not in outputs
            } - written
            assert all(any(path.startswith(f"{run}/") for run in written) for path in read), words
            written |= outputs
            if "scripts/train.py" in words and not outputs and "--plan" not in words:
                recipe = ROOT / words[words.index("--config") + 1]
                written.add(yaml.safe_load(recipe.read_text())["output_dir"])


def test_a_wrong_option_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for words in (
        ["scripts/stats.py"],
        ["scripts/evaluate.py", "--episode-count", "3"],
        ["scripts/bench.py", "--model", "none"],
        ["scripts/train.py", "--config", "recipes/none.yaml"],
    ):
        with pytest.raises((SystemExit, pytest.fail.Exception)):
            parsed(words)
