"""Keeps freed memory of the process for its next allocation, where the C library can be asked to.

By default glibc hands a freed block of some megabytes back to the system, and the next pass waits
for zeroed pages again: on a CPU half of a decode step went there.
"""

from __future__ import annotations

import ctypes
import sys

KEPT_BYTES = 1 << 30  # free memory at the top of the heap that is kept
MAPPED_BYTES = 1 << 28  # larger blocks are still mapped and handed back one by one
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Ask the C library to keep freed memory; returns whether it could be asked."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_TRIM_THRESHOLD, KEPT_BYTES), (_M_MMAP_THRESHOLD, MAPPED_BYTES))
    return sum(mallopt(name, value) for name, value in settings) == len(settings)
