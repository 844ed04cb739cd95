"""bm25s as this package imports it: without jax.

Where jax is installed, `import bm25s` runs one of its operations, and with that jax takes the GPU:
three quarters of its memory from the model that trains there, or a RuntimeError where it finds no
device. Nothing here ranks by jax, so that it is hidden while bm25s is imported (bm25s then takes
its NumPy path).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _hidden(*names: str) -> Iterator[None]:
    """Make `import` of modules raise ImportError inside, whether they were imported or not."""
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


with _hidden("jax", "jax.lax"):
    import bm25s

__all__ = ["bm25s"]
