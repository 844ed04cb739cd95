"""Runs the commands of claims and reads their figures out of what they wrote."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octopus_trl.errors import ConfigError
from octopus_trl.eval.claims import Small

STDOUT = "stdout"


@dataclass(slots=True)
class Reproduction:
    """Runs each list of commands once, however many claims read from it.

    Args:
        root: the repository, where commands run.
        folder: gets a numbered folder a list of commands, with their output.
    """

    root: Path
    folder: Path
    done: dict[tuple[str, ...], Path] = field(default_factory=dict)
    failed: dict[tuple[str, ...], str] = field(default_factory=dict)

    def figure(self, small: Small) -> str:
        """Give the figures of a claim as its `show` writes them.

        Raises:
            ConfigError: a command failed, or a figure is not where the claim says.
        """
        out = self._run(small.commands)
        values = [read_figure(out / str(path[0]), path[1:]) for path in small.read]
        try:
            return small.show.format(*values)
        except (ValueError, TypeError, IndexError) as error:
            raise ConfigError(f"show {small.show!r} does not fit {values}: {error}") from error

    def _run(self, commands: tuple[str, ...]) -> Path:
        if commands in self.failed:
            raise ConfigError(self.failed[commands])
        if commands not in self.done:
            out = self.folder / f"{len(self.done) + len(self.failed) + 1:02d}"
            out.mkdir(parents=True, exist_ok=True)
            for command in commands:
                if fault := self._run_one(command, out):
                    self.failed[commands] = fault
                    raise ConfigError(fault)
            self.done[commands] = out
        return self.done[commands]

    def _run_one(self, command: str, out: Path) -> str | None:
        """Run a command; gives what went wrong."""
        words = [word.replace("{out}", str(out)) for word in shlex.split(command)]
        if words[0] == "python":
            words[0] = sys.executable
        # Where cores are shared, OpenMP threads that spin for work take it from each other.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        with (out / STDOUT).open("wb") as stdout, (out / "stderr").open("wb") as stderr:
            done = subprocess.run(
                words, cwd=self.root, env=environment, stdout=stdout, stderr=stderr, check=False
            )
        if done.returncode == 0:
            return None
        said = (out / "stderr").read_text(encoding="utf-8", errors="replace").strip()
        last = said.splitlines()[-1] if said else "nothing on stderr"
        return f"`{command}` ended with {done.returncode}: {last}; its output is in {out}"


def read_figure(path: Path, steps: Sequence[Any]) -> Any:
    """Go into a JSON file, or the JSON lines of one, to a figure.

    Args:
        steps: a key, an index, `{"where": {key: value}}` for the first record that has these, or
            `{"mean": key}` for the mean over the records that have this key.

    Raises:
        ConfigError: there is no such file or place.
    """
    value = _parse(path)
    for step in steps:
        try:
            value = _step(value, step)
        except (KeyError, IndexError, TypeError, AttributeError, StopIteration) as error:
            raise ConfigError(f"{path}: nothing at {step!r} of {list(steps)}") from error
    return value


def _parse(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    try:
        return json.loads(text)
    except ValueError:
        pass
    records = []
    for line in text.splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue  # what else a command printed
    if not records:
        raise ConfigError(f"{path}: holds no JSON")
    return records


def _step(value: Any, step: Any) -> Any:
    if not isinstance(step, Mapping):
        return value[step]
    ((how, what),) = step.items()
    if how == "where":
        return next(record for record in value if all(record.get(k) == v for k, v in what.items()))
    if how == "mean":
        found = [record[what] for record in value if record.get(what) is not None]
        if not found:
            raise KeyError(what)
        return sum(found) / len(found)
    raise KeyError(how)
