"""How a script ends: what a user can put right is one line on stderr and an exit code."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from octopus_trl.errors import OctopusError


@contextmanager
def ending(*, disk: str | None = None, stopped: str | None = None) -> Iterator[None]:
    """Run a script's main; where it fails for a known reason, say it and end the process.

    Exit codes: 2 a setting or a file is wrong (`OctopusError`); 1 the disk refused (`OSError`);
    130 interrupted; 141, without a word, nobody reads the output any more (`| head`). Any other
    exception is a fault of ours and keeps its traceback.

    Args:
        disk: what a disk that refuses leaves, said behind its reason; without it the traceback
            stays.
        stopped: what an interrupted run leaves; without it nothing is said.
    """
    try:
        with until_unread():
            yield
    except OctopusError as error:
        _end(2, f"error: {error}")
    except OSError as error:
        if disk is None:
            raise
        _end(1, f"error: {error}; {disk}")
    except KeyboardInterrupt:
        _end(130, None if stopped is None else f"stopped; {stopped}")


@contextmanager
def importing() -> Iterator[None]:
    """Import what takes seconds; Ctrl-C meanwhile is one line and code 130.

    The process ends where it stands: an exception would have to pass through the start of
    libraries, and some abort on one.
    """
    held = signal.getsignal(signal.SIGINT)
    alone = threading.current_thread() is threading.main_thread()
    if not alone or held is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, held)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(OSError):  # stderr may be closed
        os.write(2, b"interrupted\n")
    os._exit(130)


@contextmanager
def until_unread() -> Iterator[None]:
    """Run; where that fails because nobody reads stdout any more, end the process, code 141."""
    try:
        try:
            yield
        except SystemExit as end:
            if isinstance(end.__context__, BrokenPipeError):  # rich's way, with code 1
                _end(141, None)
            _flush_unread()
            raise
        _flush_unread()
    except BrokenPipeError:
        if not _is_unread():  # a server's or a child's, not stdout
            raise
        _end(141, None)


def _flush_unread() -> None:
    """Find out now what would fail when the process ends, with a traceback."""
    if _is_unread():
        sys.stdout.flush()


def _is_unread() -> bool:
    with suppress(AttributeError, OSError, ValueError):  # no stdout, or none with a descriptor
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


def _end(code: int, line: str | None) -> NoReturn:
    if line is not None:
        sys.stderr.write(f"{line}\n")
    if _is_unread():  # what still waits there goes nowhere
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    raise SystemExit(code)
