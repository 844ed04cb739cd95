"""Rollout settings of an evaluation: the world's, a recipe's, and those given by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from octopus_trl.agent.config import RolloutConfig
from octopus_trl.errors import ConfigError
from octopus_trl.eval.seal_join_studio import WORLD_ROLLOUT


def rollout_settings(
    *, world: bool, recipe: str | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Merge rollout settings; later ones win: the small world's, the recipe's, those given.

    Of a recipe only the fields of `RolloutConfig` count, the rest is about training.

    Raises:
        ConfigError: no such recipe, or it is no mapping.
    """
    known = {field.name for field in fields(RolloutConfig)}
    merged: dict[str, Any] = dict(WORLD_ROLLOUT) if world else {}
    if recipe is not None:
        try:
            read = yaml.safe_load(Path(recipe).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"--recipe {recipe}: cannot be read ({error})") from error
        if not isinstance(read, dict):
            raise ConfigError(f"--recipe {recipe}: holds no mapping; give a file of recipes/")
        merged |= {name: value for name, value in read.items() if name in known}
    merged |= {name: value for name, value in given.items() if value is not None}
    if isinstance(merged.get("disabled_tools"), list):
        merged["disabled_tools"] = tuple(merged["disabled_tools"])
    return merged
