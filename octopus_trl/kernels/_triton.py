"""Triton, or an error that says how to get it; and launches that begin before their inputs exist.

An early launch (programmatic dependent launch, Hopper and later) lets a kernel start while the one
before it still runs: its programs take their places and wait for the inputs. Each
kernel of ours therefore begins with `begin` or `await_inputs`, before it reads what another kernel
wrote and before it writes anything; both are nothing where launches are not early.
"""

from __future__ import annotations

import functools
import os

import torch

from octopus_trl.errors import ConfigError

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


def early(device: torch.device) -> dict[str, bool]:
    """Give a launch's keywords that say whether it is early.

    Raises:
        ConfigError: OCTOPUS_EARLY_LAUNCH is neither 0 nor 1.
    """
    on = _is_early(device.type, os.environ.get("OCTOPUS_EARLY_LAUNCH", "0"))
    return {"EARLY": on, "launch_pdl": on}


def _is_early(device: str, setting: str) -> bool:
    if setting not in ("0", "1"):
        raise ConfigError(f"OCTOPUS_EARLY_LAUNCH is {setting!r}, must be '0' or '1'")
    return setting == "1" and device == "cuda" and _is_hopper()


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
