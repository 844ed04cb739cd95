"""Files of a report: whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

from octopus_trl.errors import ConfigError


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file beside its place and rename it, so that a full disk or a kill leaves no half.

    Returns:
        The path.
    Raises:
        ConfigError: it cannot be written there.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error}); give another path") from error
    finally:
        if beside.is_file():
            beside.unlink()
    return path
