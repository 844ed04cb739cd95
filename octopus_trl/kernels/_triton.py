"""Triton, or an error that says how to get it."""

from __future__ import annotations

from octopus_trl.errors import ConfigError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ConfigError(
        "the kernels on CUDA need Triton: pip install 'triton>=3.6,<3.8'; "
        "OCTOPUS_KERNELS=maths runs the slow references"
    ) from error

__all__ = ["tl", "triton"]
