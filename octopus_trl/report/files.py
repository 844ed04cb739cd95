"""Files of a report: whole or not there."""

from __future__ import annotations

from pathlib import Path

from octopus_trl.errors import ConfigError
from octopus_trl.files import write_whole


def write_file(path: Path, content: bytes) -> Path:
    """Write a file of a report, whole or not at all.

    Returns:
        The path.
    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error}); give another path") from error
    return path
