"""Files that are whole or not there, whatever stops their writer."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Give a stream that becomes the file at `path` when the block ends, in one step.

    The bytes go to a file with a name of its own in the same folder and are on the disk before
    the rename. A block that raises changes nothing and leaves nothing; a killed process may leave
    its `.NAME.*`. The mode is that of any new file. A link stays one: the file that it names is
    put in place. A pipe or a device gets the bytes as they come.

    Raises:
        OSError: the disk refused, or there is no such folder.
    """
    target = Path(path)
    if target.exists() and not (target.is_file() or target.is_dir()):
        with target.open("wb") as stream:  # a rename would remove it: /dev/null, for one
            yield stream
        return
    if target.is_symlink():
        target = Path(os.path.realpath(target))
    beside = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    with beside.open("xb") as stream:
        try:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            beside.replace(target)
        finally:
            beside.unlink(missing_ok=True)


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Put a file in place with this content, text as UTF-8; see `replacing`.

    Raises:
        OSError: the disk refused, or there is no such folder.
    """
    with replacing(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)
