"""What the paper claims and what was measured here: `data/claims.yaml`, its rules, its tables."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from octopus_trl.errors import ConfigError

SCALES = ("small", "full")
TABLES = ("accuracy", "exchange", "storage", "training", "behaviour")
FIELDS = ("id", "table", "claim", "paper", "source", "recipe", "command", "hardware", "hours")
MEASURED = ("value", "interval", "n", "scale", "date", "hardware", "commit")
SMALL = ("commands", "read", "show")
RECORD = ("read", "show")
BEGIN, END = "<!-- claims: begin -->", "<!-- claims: end -->"

Figure = float | int | str


@dataclass(frozen=True, slots=True)
class Measured:
    """A figure of ours.

    Attributes:
        value: a number, or the text of several.
        interval: its 95 % interval, where it has one.
        n: episodes, steps or repetitions behind it.
        scale: "small" is a stand-in on other data, model or hardware than the paper's.
    """

    value: Figure
    interval: tuple[float, float] | None
    n: int
    scale: str
    date: str
    hardware: str
    commit: str


@dataclass(frozen=True, slots=True)
class Small:
    """How a machine without accelerator measures a stand-in of a claim.

    Attributes:
        commands: run one after another; `{out}` is a folder for what they write.
        read: for each figure the file under it (or "stdout", of the last command) and the steps
            to the figure inside: keys, indices, `{"where": {key: value}}`, `{"mean": key}`.
        show: format of the figures.
    """

    commands: tuple[str, ...]
    read: tuple[tuple[Any, ...], ...]
    show: str


@dataclass(frozen=True, slots=True)
class Record:
    """Where the repository keeps what a measured value was read from.

    Attributes:
        read: as of `Small`, files from the repository's root.
        show: format of the figures; gives the very text of the value.
    """

    read: tuple[tuple[Any, ...], ...]
    show: str


@dataclass(frozen=True, slots=True)
class Claim:
    """One row of the table of claims; either `measured` or `not_run` is set."""

    id: str
    table: str
    claim: str
    paper: str | None
    source: str
    recipe: str | None
    command: str | None
    hardware: str
    hours: float | None
    note: str | None
    small: Small | None
    measured: Measured | None
    record: Record | None
    not_run: str | None


def load_claims(path: Path) -> list[Claim]:
    """Read the table of claims and check every row.

    Raises:
        ConfigError: a row breaks a rule; names file, row, field, value and rule.
    """
    try:
        rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{path}: holds {type(rows).__name__}, must be a list of claims")
    claims = [_claim(row, f"{path} row {number}") for number, row in enumerate(rows, start=1)]
    seen: set[str] = set()
    for claim in claims:
        if claim.id in seen:
            raise ConfigError(f"{path}: id {claim.id!r} comes twice; ids are unique")
        seen.add(claim.id)
    return claims


def claims_table(claims: Sequence[Claim], *, whole: bool = True) -> str:
    """Lay claims out as a table in Markdown, a row each, with what was measured or why not.

    Args:
        whole: show where and when each figure was measured, its whole note and its command; else
            the figure, its n and scale, and the first clause of its note.
    """
    heads = ("claim", "paper", "here", "how") if whole else ("claim", "paper", "here")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for claim in claims:
        cells = [f"`{claim.id}`: {claim.claim}", claim.paper or "–", _ours(claim, whole=whole)]
        if whole:
            cells.append(f"`{claim.command}`" if claim.command else "–")
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def readme_block(claims: Sequence[Claim]) -> str:
    """Give the block of the README: the rows that were measured, and how many were not."""
    done = [claim for claim in claims if claim.measured is not None]
    left = len(claims) - len(done)
    tail = (
        "*Small* is a stand-in: a small model, made-up questions and a CPU, not the paper's; "
        "the shipped policy was warm-started on such questions. "
        "`docs/claims.md` has hardware, date, commit, command and whole note of each, and the "
        f"reason why {left} further claims are not measured. "
        "`python scripts/reproduce.py --all` runs what this machine can."
    )
    return f"{claims_table(done, whole=False)}\n\n{tail}"


def document(claims: Sequence[Claim]) -> str:
    """Give the page of all claims, by table."""
    head = (
        "# Claims\n\nWritten by `python scripts/reproduce.py --write` from `data/claims.yaml`; "
        "edit that. Paper figures are those of the Octopus report (arXiv 2611.06956) or its card."
    )
    parts = [head]
    for table in TABLES:
        rows = [claim for claim in claims if claim.table == table]
        if rows:
            parts.append(f"## {table.capitalize()}\n\n{claims_table(rows)}")
    return "\n\n".join(parts) + "\n"


def with_block(text: str, block: str) -> str:
    """Put a block between the two marks of a text.

    Raises:
        ConfigError: the marks are not there, once each and in order.
    """
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in tail or END in tail:
        raise ConfigError(f"the text needs {BEGIN} and {END} once each, in this order")
    return f"{head}{BEGIN}\n{block}\n{END}{tail}"


def _ours(claim: Claim, *, whole: bool) -> str:
    if claim.measured is None:
        return f"not run: {claim.not_run}"
    ours = claim.measured
    value = f"{ours.value:g}" if isinstance(ours.value, int | float) else ours.value
    if ours.interval is not None:
        value += f" ({ours.interval[0]:g} to {ours.interval[1]:g})"
    small = "**small**" if ours.scale == "small" else ""
    note = claim.note or ""
    if whole:
        place = f"{ours.hardware}, {ours.date}, {ours.commit}"
        small = f" ({small}: {place})" if small else f" ({place})"
    else:
        small = f", {small}" if small else ""
        note = re.split(r"; |\. ", note)[0]
    return f"{value}, n = {ours.n}{small}{'; ' if note else ''}{note}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _claim(row: Any, place: str) -> Claim:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{place}: is {row!r}, must be a mapping")
    place = f"{place} ({row.get('id')})"
    _keys(row, FIELDS, ("note", "small", "measured", "record", "not_run"), place)
    if not isinstance(row["id"], str) or not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row["id"]):
        raise ConfigError(f"{place}: id {row['id']!r} must be lower-case words joined by hyphens")
    _one_of(row, "table", TABLES, place)
    for name in ("claim", "source", "hardware"):
        _text(row, name, place)
    for name in ("paper", "recipe", "command", "note", "not_run"):
        if row.get(name) is not None:
            _text(row, name, place)
    hours = row["hours"]
    if hours is not None and (not _is_number(hours) or hours < 0):
        raise ConfigError(f"{place}: hours is {hours!r}, must be a number of at least 0 or null")
    if (row.get("measured") is None) == (row.get("not_run") is None):
        raise ConfigError(f"{place}: give either measured or not_run, and not both")
    fields = {name: row.get(name) for name in (*FIELDS, "note", "not_run")}
    small, measured, record = row.get("small"), row.get("measured"), row.get("record")
    if record is not None and measured is None:
        raise ConfigError(f"{place}: record is there and measured is not; it is where that is from")
    return Claim(
        **fields,  # type: ignore[arg-type]  # each was checked above
        small=None if small is None else _small(small, f"{place} small"),
        measured=None if measured is None else _measured(measured, f"{place} measured"),
        record=None if record is None else _record(record, f"{place} record"),
    )


def _measured(row: Any, place: str) -> Measured:
    _keys(row, MEASURED, (), place)
    value, interval = row["value"], row["interval"]
    if not (_is_number(value) or (isinstance(value, str) and value.strip())):
        raise ConfigError(f"{place}: value is {value!r}, must be a number or a text")
    if interval is not None and (
        not isinstance(interval, list)
        or len(interval) != 2
        or not all(map(_is_number, interval))
        or interval[0] > interval[1]
        or (_is_number(value) and not interval[0] <= value <= interval[1])
    ):
        raise ConfigError(
            f"{place}: interval is {interval!r}, must be null or [low, high] around the value"
        )
    if isinstance(row["n"], bool) or not isinstance(row["n"], int) or row["n"] < 1:
        raise ConfigError(f"{place}: n is {row['n']!r}, must be an integer of at least 1")
    _one_of(row, "scale", SCALES, place)
    _text(row, "hardware", place)
    date, commit = str(row["date"]), str(row["commit"])
    try:
        datetime.date.fromisoformat(date)
    except ValueError as error:
        raise ConfigError(f"{place}: date is {date!r}, must be YYYY-MM-DD") from error
    if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
        raise ConfigError(f"{place}: commit is {commit!r}, must be 7 to 40 hex digits; quote it")
    pair = None if interval is None else (float(interval[0]), float(interval[1]))
    return Measured(value, pair, row["n"], row["scale"], date, row["hardware"], commit)


def _small(row: Any, place: str) -> Small:
    _keys(row, SMALL, (), place)
    commands = row["commands"]
    if not isinstance(commands, list) or not commands:
        raise ConfigError(f"{place}: commands is {commands!r}, must be a list")
    if not all(isinstance(command, str) and command.strip() for command in commands):
        raise ConfigError(f"{place}: commands are {commands!r}, each must be a text")
    return Small(tuple(commands), _places(row, place), row["show"])


def _record(row: Any, place: str) -> Record:
    _keys(row, RECORD, (), place)
    return Record(_places(row, place), row["show"])


def _places(row: Mapping[str, Any], place: str) -> tuple[tuple[Any, ...], ...]:
    _text(row, "show", place)
    if not isinstance(row["read"], list) or not row["read"]:
        raise ConfigError(f"{place}: read is {row['read']!r}, must be a list")
    if not all(isinstance(path, list) and len(path) > 1 for path in row["read"]):
        raise ConfigError(f"{place}: read is {row['read']!r}, each must be [file, step, ...]")
    return tuple(map(tuple, row["read"]))


def _keys(row: Any, needed: Sequence[str], optional: Sequence[str], place: str) -> None:
    if not isinstance(row, Mapping):
        raise ConfigError(f"{place}: is {row!r}, must be a mapping")
    if missing := [name for name in needed if name not in row]:
        raise ConfigError(f"{place}: fields {missing} are missing")
    if unknown := sorted(set(row) - {*needed, *optional}):
        raise ConfigError(f"{place}: unknown fields {unknown}; it has {[*needed, *optional]}")


def _text(row: Mapping[str, Any], name: str, place: str) -> None:
    if not isinstance(row[name], str) or not row[name].strip():
        raise ConfigError(f"{place}: {name} is {row[name]!r}, must be a text that is not empty")


def _one_of(row: Mapping[str, Any], name: str, allowed: Sequence[str], place: str) -> None:
    if row[name] not in allowed:
        raise ConfigError(f"{place}: {name} is {row[name]!r}, must be one of {list(allowed)}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
