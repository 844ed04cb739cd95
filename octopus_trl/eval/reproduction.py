"""Runs the commands of claims and reads their figures out of what they wrote."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octopus_trl.errors import ConfigError
from octopus_trl.eval.claims import Small
from octopus_trl.files import write_whole

STDOUT, DONE = "stdout", "done.json"


@dataclass(frozen=True, slots=True)
class Finished:
    """A list of commands that ended well: where its output is, seconds, commit and date."""

    folder: Path
    seconds: float
    commit: str
    date: str


@dataclass(slots=True)
class Reproduction:
    """Runs each list of commands once, however many claims read from it, and never twice.

    A list that ended well leaves `done.json` in its folder; the same list asked again, by another
    process too, is read from there. One that was cut short starts anew in an empty folder.

    Args:
        root: the repository, where commands run.
        folder: gets a folder a list of commands, with their output.
        tell: called with a line when a list begins and ends.
    """

    root: Path
    folder: Path
    tell: Callable[[str], None] = field(default=lambda line: None)
    finished: dict[tuple[str, ...], Finished] = field(default_factory=dict)
    failed: dict[tuple[str, ...], str] = field(default_factory=dict)

    def figure(self, small: Small) -> str:
        """Give the figures of a claim as its `show` writes them.

        Raises:
            ConfigError: a command failed, or a figure is not where the claim says.
        """
        out = self.run(small.commands).folder
        return shown(small.read, small.show, out)

    def run(self, commands: tuple[str, ...]) -> Finished:
        """Run a list of commands, unless it has ended well before.

        Raises:
            ConfigError: one of them failed.
        """
        if commands in self.failed:
            raise ConfigError(self.failed[commands])
        if commands not in self.finished:
            out = self.folder / hashlib.sha256("\n".join(commands).encode()).hexdigest()[:10]
            kept = _read_done(out)
            if kept is None:
                kept = self._run_all(commands, out)
            else:
                self.tell(f"{out.name}: done before, at {kept.commit[:7]}, {kept.date}")
            self.finished[commands] = kept
        return self.finished[commands]

    def _run_all(self, commands: tuple[str, ...], out: Path) -> Finished:
        begun = time.monotonic()
        commit = _commit(self.root)
        try:
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            for command in commands:
                self.tell(f"{out.name}: {command}")
                self._run_one(command, out)
            seconds = time.monotonic() - begun
            date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
            record = {"commands": commands, "seconds": seconds, "commit": commit, "date": date}
            write_whole(out / DONE, json.dumps(record))
        except (ConfigError, OSError) as error:
            self.failed[commands] = str(error)
            raise ConfigError(str(error)) from None
        self.tell(f"{out.name}: done in {seconds:.0f} s")
        return Finished(out, seconds, commit, date)

    def _run_one(self, command: str, out: Path) -> None:
        """Run a command.

        Raises:
            ConfigError: it did not end with 0.
        """
        words = [word.replace("{out}", str(out)) for word in shlex.split(command)]
        if words[0] == "python":
            words[0] = sys.executable
        # Where cores are shared, OpenMP threads that spin for work take it from each other.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        with (out / STDOUT).open("wb") as stdout, (out / "stderr").open("wb") as stderr:
            # A session of its own, so that a launcher and what it launched end together.
            process = subprocess.Popen(
                words,
                cwd=self.root,
                env=environment,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                code = process.wait()
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
        if code != 0:
            said = (out / "stderr").read_text(encoding="utf-8", errors="replace").strip()
            last = said.splitlines()[-1] if said else "nothing on stderr"
            raise ConfigError(f"`{command}` ended with {code}: {last}; its output is in {out}")


def shown(read: Sequence[Sequence[Any]], show: str, folder: Path) -> str:
    """Write the figures that lie at some places of a folder's files.

    Raises:
        ConfigError: a figure is not there, or the format does not fit.
    """
    values = [read_figure(folder / str(path[0]), path[1:]) for path in read]
    try:
        return show.format(*values)
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise ConfigError(f"show {show!r} does not fit {values}: {error}") from error


def read_figure(path: Path, steps: Sequence[Any]) -> Any:
    """Go into a JSON file, or the JSON lines of one, to a figure.

    Args:
        steps: a key, an index, `{"where": {key: value}}` for the first record that has these, or
            `{"mean": key}` and `{"max": key}` over the records that have this key.

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
    if how not in ("mean", "max"):
        raise KeyError(how)
    found = [record[what] for record in value if record.get(what) is not None]
    if not found:
        raise KeyError(what)
    return max(found) if how == "max" else sum(found) / len(found)


def _read_done(out: Path) -> Finished | None:
    try:
        record = json.loads((out / DONE).read_text(encoding="utf-8"))
        return Finished(out, float(record["seconds"]), record["commit"], record["date"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _commit(root: Path) -> str:
    """Give the commit of a checkout, with a mark where files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--dirty", "--match", "no tag"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
