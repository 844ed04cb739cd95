"""Rollout settings of an evaluation: the world's, a recipe's, and those given by hand."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from octopus_trl.agent.config import RolloutConfig
from octopus_trl.errors import ConfigError
from octopus_trl.eval.seal_join_studio import WORLD_ROLLOUT

SYSTEMS = ("agent", "exchange", "position")
LIMITS = (
    *("window", "max_depth", "max_children", "max_threads", "max_turns", "max_new_tokens"),
    "search_k",
)
TRUTH = {"true": True, "false": False}


def add_rollout_flags(parser: argparse.ArgumentParser) -> None:
    """Let a command line name the system that runs, its limits and the tools that it lacks."""
    helps = {field.name: field.metadata.get("help", "") for field in fields(RolloutConfig)}
    for name in (*SYSTEMS, *LIMITS):
        kind = int if name in LIMITS else str
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, help=helps[name].replace("%", "%%"))
    parser.add_argument("--tools-exposed", choices=list(TRUTH), help=helps["tools_exposed"])
    parser.add_argument("--disable", nargs="*", default=[], help=helps["disabled_tools"])


def given_settings(asked: argparse.Namespace) -> dict[str, Any]:
    """Give what was said through `add_rollout_flags`; None where nothing was."""
    return {
        **{name: getattr(asked, name) for name in (*SYSTEMS, *LIMITS)},
        "tools_exposed": TRUTH.get(asked.tools_exposed),
        "disabled_tools": tuple(asked.disable) or None,
    }


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
