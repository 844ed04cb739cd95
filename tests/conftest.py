"""Shared set-up: no network, one OpenMP thread a worker, fixed seeds, markers with a reason."""

from __future__ import annotations

import os
import random
import signal
import sys

import pytest

# Before anything imports torch or transformers: OpenMP and the hub client read these only once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["WANDB_MODE"] = "offline"

import torch

# Triton chooses its interpreter when a kernel is defined, so before any test module loads one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


# A shell starts what runs behind it with Ctrl-C ignored, and children would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, or was not asked to, and say which."""
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: give --slow to run it"))
    wanted = [
        (item, 2 if item.get_closest_marker("multi_gpu") else 1)
        for item in items
        if item.get_closest_marker("gpu") or item.get_closest_marker("multi_gpu")
    ]
    if not wanted:
        return
    found = torch.cuda.device_count()
    for item, needed in wanted:
        # Kernel packages warn while they compile, each release about something else.
        item.add_marker(pytest.mark.filterwarnings("default"))
        if found < needed:
            reason = f"needs {needed} CUDA device(s), this machine has {found}"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
