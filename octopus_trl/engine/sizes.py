"""How much memory the pools take when nobody says."""

from __future__ import annotations

import os

import torch

from octopus_trl.errors import ConfigError
from octopus_trl.models.paged import bytes_per_page, bytes_per_state
from octopus_trl.models.spec import ModelSpec

GPU_SHARE = 0.8  # of the device memory that is free when the engine is made
CPU_SHARE = 0.25  # of the free memory; pages cost nothing before their first use
CPU_LIMIT = 8 << 30  # bytes
STATE_SHARE = 0.25  # of what the pools get
MAX_PAGES = 1 << 20
MAX_STATES = 4096


def pool_sizes(
    spec: ModelSpec,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    num_pages: int | None,
    num_states: int | None,
) -> tuple[int, int]:
    """Settle the numbers of pages and state slots; given numbers are kept.

    Raises:
        ConfigError: the memory does not even hold one of each.
    """
    budget = _budget(device)
    if not spec.is_hybrid:
        num_states = 0
    elif num_states is None:
        share = budget * STATE_SHARE
        num_states = min(int(share // bytes_per_state(spec, dtype)), MAX_STATES)
    if num_pages is None:
        rest = budget - (num_states * bytes_per_state(spec, dtype) if num_states else 0)
        num_pages = min(int(rest // bytes_per_page(spec, page_size, dtype)), MAX_PAGES)
    if num_pages < 1 or (spec.is_hybrid and num_states < 1):
        raise ConfigError(
            f"{budget} bytes for the pools hold {num_pages} pages and {num_states} states: free "
            "memory, or give a smaller page_size, num_pages and num_states"
        )
    return num_pages, num_states


def _budget(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * CPU_SHARE), CPU_LIMIT)
