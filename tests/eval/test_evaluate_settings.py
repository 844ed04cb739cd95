"""One set of weights is evaluated under every system: recipe first, then what is given by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from octopus_trl.errors import ConfigError

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "tiny-hybrid" / "grpo"


def config_of(monkeypatch: pytest.MonkeyPatch, *given: str) -> Any:
    spec = importlib.util.spec_from_file_location("evaluate", ROOT / "scripts" / "evaluate.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *given])
    return script.settings_of(script.arguments(), world=True)


@pytest.mark.parametrize(
    "setting",
    [
        {"exchange": "splice", "position": "rerotate"},
        {"exchange": "transcript"},
        {"position": "reencode"},
        {"agent": "flat", "window": 1024},
        {"tools_exposed": False},
    ],
    ids=str,
)
def test_what_is_given_by_hand_wins_over_the_recipe(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any]
) -> None:
    given: list[str] = []
    for name, value in setting.items():
        given += [f"--{name.replace('_', '-')}", str(value).lower()]
    config = config_of(monkeypatch, "--recipe", str(RECIPES / "config_learn.yaml"), *given)
    assert {name: getattr(config, name) for name in setting} == setting
    assert config.search_k == 3, "the rest is the recipe's"


def test_a_recipes_system_stays_where_nothing_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(monkeypatch, "--recipe", str(RECIPES / "config_splice.yaml"))
    assert (config.exchange, config.position, config.tools_exposed) == ("splice", "jump", True)
    forkless = config_of(monkeypatch, "--disable", "fork")
    assert (forkless.disabled_tools, forkless.exchange) == (("fork",), "mount")


def test_a_recipes_temperature_stays_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("temperature: 0.5\n")
    assert config_of(monkeypatch, "--recipe", str(recipe)).temperature == 0.5
    given = ("--temperature", "0")
    assert config_of(monkeypatch, "--recipe", str(recipe), *given).temperature == 0.0
    assert config_of(monkeypatch).temperature == 1.0


def test_a_combination_without_meaning_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="nothing is mounted"):
        config_of(monkeypatch, "--exchange", "summary", "--position", "rerotate")
    with pytest.raises(ConfigError, match="nothing of its to step through"):
        config_of(monkeypatch, "--exchange", "splice", "--position", "reencode")
