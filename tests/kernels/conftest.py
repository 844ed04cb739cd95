"""Triton kernels run compiled where there is a CUDA device, and in Triton's interpreter elsewhere.

The interpreter is chosen when a kernel is defined, so the choice is made here, while tests are
collected and before any of them loads a module of kernels.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def device() -> torch.device:
    """Where a kernel can run on this machine: the CUDA device, or a CPU through the interpreter."""
    pytest.importorskip("triton", reason="needs Triton: pip install 'triton>=3.6,<3.8'")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
