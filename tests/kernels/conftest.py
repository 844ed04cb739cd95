"""Triton kernels run compiled where there is a CUDA device, and in Triton's interpreter elsewhere.

`tests/conftest.py` chooses.
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where a kernel can run on this machine: the CUDA device, or a CPU through the interpreter."""
    pytest.importorskip("triton", reason="needs Triton: pip install 'triton>=3.6,<3.8'")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
