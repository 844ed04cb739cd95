"""Triton, or an error that says how to get it; and launches that begin before their inputs exist.

An early launch (programmatic dependent launch, Hopper and later) lets a kernel start while the one
before it still runs: its programs take their places and wait for the inputs. Each
kernel of ours therefore begins with `begin` or `await_inputs`, before it reads what another kernel
of the pass wrote and before it writes anything; both are nothing where launches are not early.
"""

from __future__ import annotations

import functools
import os

import torch

from octopus_trl.errors import ConfigError
from octopus_trl.kernels._pass_tuning import pass_tuning

try:
    import triton
    import triton.language as tl
    from triton.language.extra import cuda
except ImportError as error:
    raise ConfigError(
        "the kernels on CUDA need Triton: pip install 'triton>=3.6,<3.8'; "
        "OCTOPUS_KERNELS=maths runs the slow references"
    ) from error

__all__ = [
    "await_inputs",
    "begin",
    "early",
    "release_next",
    "tl",
    "triton",
]


def early(device: torch.device, rows: int) -> dict[str, bool]:
    """Give a launch's keywords that say whether it is early, by the rows of its pass.

    OCTOPUS_EARLY_LAUNCH=0 or 1 decides for all passes; without it `_pass_tuning` does.

    Raises:
        ConfigError: OCTOPUS_EARLY_LAUNCH is neither 0 nor 1.
    """
    # Kernels that are not early (of torch, of a BLAS library, attention) may stand anywhere between
    # early ones. One of them starts when all before it is done: every program of an early kernel
    # waits for its predecessor, so that the end of one is the end of all before it. An early one
    # after it starts when its programs have ended, and waits for their writes. What is read before
    # a wait (the rows' state slots) was written before such a kernel: the embedding, or
    # the choice of rows for the head.
    on = _is_early(device.type, os.environ.get("OCTOPUS_EARLY_LAUNCH"), rows)
    return {"EARLY": on, "launch_pdl": on}


def _is_early(device: str, setting: str | None, rows: int) -> bool:
    if setting not in (None, "0", "1"):
        raise ConfigError(
            f"OCTOPUS_EARLY_LAUNCH is {setting!r}, must be '0' or '1'; unset it for the default"
        )
    on = pass_tuning(rows).early if setting is None else setting == "1"
    return on and device == "cuda" and _is_hopper()


@functools.cache
def _is_hopper() -> bool:
    return torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def begin(EARLY: tl.constexpr) -> None:
    """Let the next kernel take its places, and wait for the one before to have written all."""
    if EARLY:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def release_next(EARLY: tl.constexpr) -> None:
    """Let the next kernel take its places, once every program of this one has come here."""
    if EARLY:
        cuda.gdc_launch_dependents()


@triton.jit
def await_inputs(EARLY: tl.constexpr) -> None:
    """Wait for the kernel before to have written all."""
    if EARLY:
        cuda.gdc_wait()
