"""Scores of sets of layers on disk, so that a study that was stopped goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from octopus_trl.errors import ConfigError
from octopus_trl.files import write_whole


class LayerScores(MutableMapping[str, list[float]]):
    """Scores by reading and layers, one JSON object a line behind a line of settings.

    A line that was cut off by a kill is dropped; its set is scored again.

    Args:
        path: the file; made with its folder where there is none.
        settings: what the scores depend on: model, probes, dtype.
    Raises:
        ConfigError: the file belongs to other settings, or is none of ours.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._kept: dict[str, list[float]] = {}
        head = json.dumps(dict(settings), sort_keys=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if lines and lines[0] != head:
            raise ConfigError(
                f"{path}: holds scores of other settings ({lines[0][:200]}); remove it or choose "
                "another --out"
            )
        for line in lines[1:]:
            try:
                record = json.loads(line)
                self._kept[record["set"]] = [float(nll) for nll in record["nll"]]
            except (json.JSONDecodeError, KeyError, TypeError, ValueError):
                continue
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written anew: a line that was cut off must not run into the next one.
        lines = [_line(key, nll) for key, nll in self._kept.items()]
        write_whole(path, "".join([head + "\n", *lines]))

    def __getitem__(self, key: str) -> list[float]:
        return self._kept[key]

    def __setitem__(self, key: str, nll: list[float]) -> None:
        self._kept[key] = nll
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(_line(key, nll))

    def __delitem__(self, key: str) -> None:
        raise ConfigError(f"{self._path}: scores are only added")

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def _line(key: str, nll: list[float]) -> str:
    return json.dumps({"set": key, "nll": nll}) + "\n"
