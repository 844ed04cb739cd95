"""One line of a recipe, put in place without touching the rest of the file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from octopus_trl.errors import ConfigError
from octopus_trl.files import write_whole

NAME = "mount_layers"


def mount_line(layers: Sequence[int]) -> str:
    """Give the line of a recipe.

    >>> mount_line([3, 7])
    'mount_layers: [3, 7]'
    """
    return f"{NAME}: [{', '.join(map(str, layers))}]"


def with_mount_layers(text: str, layers: Sequence[int]) -> str:
    """Give a recipe's text with these mount layers; comments and order stay.

    A line that sets them already is replaced, what spans several lines too; else the line goes
    behind `model_name_or_path`, or to the end.

    Raises:
        ConfigError: the text is no recipe, or would say anything else than before besides.
    """
    before = _parsed(text)
    line = mount_line(layers)
    # A value goes on over lines that are indented or begin a list item or a closing bracket.
    old = re.compile(rf"^{NAME}[ \t]*:.*(?:\n(?:[ \t]+\S.*|[-\]].*))*", re.MULTILINE)
    model = re.compile(r"^model_name_or_path[ \t]*:.*", re.MULTILINE)
    if NAME in before:
        new = old.sub(line, text, count=1)
    elif model.search(text):
        new = model.sub(lambda found: f"{found.group()}\n{line}", text, count=1)
    else:
        new = text + ("" if text.endswith("\n") or not text else "\n") + line + "\n"
    if _parsed(new) != {**before, NAME: list(layers)}:
        raise ConfigError(f"{NAME} stands in no line of its own there: put {line!r} in by hand")
    return new


def write_mount_layers(path: Path, layers: Sequence[int]) -> None:
    """Set the mount layers of a recipe file, all at once or not at all.

    Raises:
        ConfigError: see `with_mount_layers`; names the file.
    """
    write_whole(path, _with_path(path, layers))


def check_recipe(path: Path) -> None:
    """See that a recipe could be written to, before a long run ends with it.

    Raises:
        ConfigError: see `write_mount_layers`.
    """
    _with_path(path, [0])
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{path}: may not be written")


def _with_path(path: Path, layers: Sequence[int]) -> str:
    try:
        return with_mount_layers(path.read_text(encoding="utf-8"), layers)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _parsed(text: str) -> dict[str, Any]:
    try:
        read = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"is no YAML ({str(error).splitlines()[0]})") from error
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise ConfigError("holds no mapping; give a file of recipes/")
    return read
