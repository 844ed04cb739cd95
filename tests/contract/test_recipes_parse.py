"""Every recipe parses with the script that runs it, and a misspelt key is an error.

The scripts themselves run, up to the moment when their parser has accepted the file.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from trl import TrlParser

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*/*/config*.yaml"))
SCRIPTS = {"grpo": "scripts/train.py", "sft": "scripts/sft.py"}


class Accepted(Exception):
    """Stops a script once its arguments are parsed; holds the dataclasses."""


def parse(recipe: Path, algorithm: str) -> tuple[Any, ...]:
    """Run a recipe's script until its arguments are parsed and give them.

    A recipe for a GPU asks for number formats that a CPU refuses, so those are switched off.
    """
    original = TrlParser.parse_args_and_config

    def stop(self: TrlParser, *args: Any, **kwargs: Any) -> None:
        raise Accepted(*original(self, *args, **kwargs))

    argv = [SCRIPTS[algorithm], "--config", str(recipe), "--use_cpu", "true"]
    values = yaml.safe_load(recipe.read_text())
    argv += [word for key in ("tf32", "bf16") if key in values for word in (f"--{key}", "false")]
    main = runpy.run_path(str(ROOT / SCRIPTS[algorithm]))["main"]
    with (
        mock.patch.object(TrlParser, "parse_args_and_config", stop),
        mock.patch.object(sys, "argv", argv),
        mock.patch.dict(os.environ),
        pytest.raises(Accepted) as accepted,
    ):
        main()
    return accepted.value.args


def test_there_are_recipes_and_each_algorithm_has_its_script() -> None:
    assert {path.parent.name for path in RECIPES} == set(SCRIPTS)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: "-".join(path.parts[-3:]))
def test_recipe_parses(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    parsed = parse(recipe, recipe.parent.name)
    values = {key: value for each in parsed for key, value in vars(each).items()}
    for key in set(yaml.safe_load(recipe.read_text())) - {"env"}:
        assert key in values


@pytest.mark.parametrize("algorithm", sorted(SCRIPTS))
def test_misspelt_key_is_refused_by_name(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    good = next(path for path in RECIPES if path.parent.name == algorithm)
    bad = tmp_path / "config.yaml"
    bad.write_text(good.read_text() + "\nlearning_rte: 1.0\n")
    with pytest.raises(ValueError, match="learning_rte"):
        parse(bad, algorithm)
