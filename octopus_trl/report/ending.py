"""How a script ends: what a user can put right is one line on stderr and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from octopus_trl.errors import OctopusError


@contextmanager
def ending(*, disk: str | None = None, stopped: str | None = None) -> Iterator[None]:
    """Run a script's main; where it fails for a known reason, say it and end the process.

    Exit codes: 2 a setting or a file is wrong (`OctopusError`); 1 the disk refused (`OSError`);
    130 interrupted. Any other exception is a fault of ours and keeps its traceback.

    Args:
        disk: what a disk that refuses leaves, said behind its reason; without it the traceback
            stays.
        stopped: what an interrupted run leaves; without it nothing is said.
    """
    try:
        yield
    except OctopusError as error:
        _end(2, f"error: {error}")
    except OSError as error:
        if disk is None:
            raise
        _end(1, f"error: {error}; {disk}")
    except KeyboardInterrupt:
        _end(130, None if stopped is None else f"stopped; {stopped}")


def _end(code: int, line: str | None) -> NoReturn:
    if line is not None:
        sys.stderr.write(f"{line}\n")
    raise SystemExit(code)
