"""Compile Triton kernels for a Hopper GPU on a machine that has none.

Run in a process of its own, without TRITON_INTERPRET: inside `compiled_for_hopper` every launch
stops after compilation, so a function of `kernels` called on CPU tensors builds the very kernels
that it would launch, with their real strides and settings, and computes nothing.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_HOPPER = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Built:
    """One compiled kernel.

    Attributes:
        registers, stack_bytes: a thread; a stack means that registers were spilled.
        shared_bytes: of one program.
        ptx: its text.
    """

    name: str
    warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    ptx: str

    @property
    def before_wait(self) -> list[str] | None:
        """Kinds of the accesses to memory before it waits for the kernel before; None if never."""
        before, wait, _ = self.ptx.partition("griddepcontrol.wait")
        kinds = r"\b(ld|st|atom|red|cp)\.[a-z0-9_.:]*global"
        return re.findall(kinds, before) if wait else None


class _NoDevice:
    """As much of a driver as compilation asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return _HOPPER


@contextmanager
def compiled_for_hopper() -> Iterator[list[Built]]:
    """Collect every kernel that is launched inside, compiled for sm_90 and never run."""
    built: list[Built] = []
    seen: set[str] = set()
    run, active = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            built.append(_measure(kernel))
        return kernel

    JITFunction.run = compile_only
    driver.set_active(_NoDevice())
    try:
        yield built
    finally:
        JITFunction.run = run
        driver._active = active


def _measure(kernel: Any) -> Built:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = (int(re.findall(rf"{word}:(\d+)", usage)[-1]) for word in ("REG", "STACK"))
    return Built(
        kernel.metadata.name,
        kernel.metadata.num_warps,
        registers,
        stack,
        kernel.metadata.shared,
        kernel.asm["ptx"],
    )
