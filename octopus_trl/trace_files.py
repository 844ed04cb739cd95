"""Traces on disk: one JSON object a line, whole lines only, whatever happens to the writer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from octopus_trl.errors import ConfigError, TraceError
from octopus_trl.files import replacing
from octopus_trl.trace import Trace


def read_traces(path: str | Path, *, check: bool = True) -> Iterator[Trace]:
    """Read a JSONL file of traces one by one.

    A last line without its newline is what an interrupted writer leaves; it is skipped.

    Raises:
        TraceError: a line is broken; names the file and the line number.
        ConfigError: there is no such file.
    """
    if not Path(path).exists() or Path(path).is_dir():
        raise ConfigError(f"{path}: no such file; name one of traces, a run keeps them in traces/")
    with Path(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n") and not _parses(line):
                return
            if line.strip():
                yield _load(line, path, number, check)


class TraceWriter:
    """Append traces to a JSONL file so that a killed process leaves only whole lines behind.

    Opening a file that ends in half a line cuts that line off; `episode_ids` then says what is
    already there, so a run can go on where it stopped. Each line goes out in one write and is
    flushed to the disk.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.episode_ids: set[str] = set()
        if self.path.exists():
            self._recover()
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, trace: Trace) -> None:
        """Write one trace as one line."""
        data = _line(trace)
        written = os.write(self._descriptor, data)
        while written < len(data):
            written += os.write(self._descriptor, data[written:])
        os.fsync(self._descriptor)
        self.episode_ids.add(trace.episode_id)

    def close(self) -> None:
        """Close the file; further appends fail."""
        os.close(self._descriptor)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _recover(self) -> None:
        data = self.path.read_bytes()
        tail = data[data.rfind(b"\n") + 1 :]
        for trace in read_traces(self.path, check=False):
            self.episode_ids.add(trace.episode_id)
        if tail and _parses(tail):
            with self.path.open("ab") as stream:
                stream.write(b"\n")
        elif tail:
            os.truncate(self.path, len(data) - len(tail))


def write_traces(path: str | Path, traces: Sequence[Trace]) -> None:
    """Write a file of traces, whole or not at all."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as stream:
        for trace in traces:
            stream.write(_line(trace))


def _line(trace: Trace) -> bytes:
    text = json.dumps(trace.to_dict(), separators=(",", ":"), allow_nan=False)
    return text.encode("ascii") + b"\n"


def _load(line: bytes, path: str | Path, number: int, check: bool) -> Trace:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} line {number}: no JSON object ({error})") from error
    try:
        trace = Trace.from_dict(record)
        return trace.check() if check else trace
    except TraceError as error:
        raise TraceError(f"{path} line {number}: {error}") from error


def _parses(line: bytes) -> bool:
    try:
        json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return False
    return True
