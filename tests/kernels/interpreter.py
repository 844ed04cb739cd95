"""Triton 3.6's interpreter beside NumPy 2.4: loops over bounds that were loaded."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any


def mend_loop_bounds() -> None:
    """Let `range` take scalars of the interpreter, which are arrays of one element.

    NumPy 2.4 converts only arrays without axes to int. Does nothing outside the interpreter.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    interpreter: Any = import_module("triton.runtime.interpreter")
    if getattr(interpreter._patch_lang_tensor, "mended", False):
        return
    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patch
