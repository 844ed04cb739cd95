"""How much memory the pools take when nobody says, and what is refused when somebody does."""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

import torch

from octopus_trl.errors import ConfigError
from octopus_trl.models.paged import bytes_per_page, bytes_per_state
from octopus_trl.models.spec import ModelSpec

GPU_SHARE = 0.8  # of what is free when the engine is made; an optimizer may want the rest later
CPU_SHARE = 0.25  # of the free memory; pages cost nothing before their first use
CPU_LIMIT = 8 << 30  # bytes
PARKING_SHARE = 0.5  # of the free host memory, over all GPUs of the host
GRAPH_BYTES = 1 << 30  # captured graphs and what kernels keep
ROW_ACTIVATIONS = 64  # hidden widths that a row of a prefill pass keeps at its widest layer
LOGIT_BYTES = 32  # of one logit while it is drawn from
# What memory is balanced for: a thread that owns so many tokens and two states, its boundary's and
# its growing node's.
OWN_TOKENS = 8192
OWN_STATES = 2
MAX_PAGES = 1 << 20
MAX_STATES = 4096
MAX_PLACES = 1 << 14

logger = logging.getLogger(__name__)


class Sizes(NamedTuple):
    """Numbers of pages, of state slots, and of places for parked states in host memory."""

    pages: int
    states: int
    places: int


class Budget(NamedTuple):
    """Bytes that pools may take by themselves, that they can take at most, and for parking."""

    pools: int
    limit: int
    host: int


def settle(
    spec: ModelSpec,
    budget: Budget,
    *,
    page_size: int,
    dtype: torch.dtype,
    num_pages: int | None = None,
    num_states: int | None = None,
    park_bytes: int | None = None,
) -> Sizes:
    """Settle the numbers; given ones are kept, the others share what is left of the budget.

    Raises:
        ConfigError: the memory does not hold one page and one state, or not what was asked for.
    """
    page, state = bytes_per_page(spec, page_size, dtype), bytes_per_state(spec, dtype)
    asked = (num_pages or 0) * page + ((num_states or 0) + 1) * state  # the zero state too
    if (num_pages or num_states) and asked > budget.limit:
        raise ConfigError(
            f"num_pages={num_pages}, num_states={num_states}: the pools would take {asked} bytes "
            f"and {budget.limit} are there: give smaller numbers or none"
        )
    rest = max(0, budget.pools - asked)
    states, places = 0, 0
    if spec.is_hybrid:
        states = num_states or min(int(rest * _state_share(spec, dtype) // state), MAX_STATES)
        host = budget.host if park_bytes is None else park_bytes
        places = min(host // state, MAX_PLACES)
        if park_bytes and not places:
            raise ConfigError(
                f"park_bytes={park_bytes}: a state takes {state} bytes; give that many or 0"
            )
        if num_states is None:
            rest -= states * state
    sizes = Sizes(num_pages or min(int(rest // page), MAX_PAGES), states, places)
    if sizes.pages < 1 or (spec.is_hybrid and sizes.states < 1):
        raise ConfigError(
            f"{budget.pools} bytes for the pools hold {sizes.pages} pages and {sizes.states} "
            f"states, a step needs one of each: free memory, or give a smaller page_size, "
            f"num_pages and num_states"
        )
    return sizes


def budget_of(
    device: torch.device, spec: ModelSpec, dtype: torch.dtype, *, prefill_chunk: int, rows: int
) -> Budget:
    """Measure what is free, less what one step needs beside the pools.

    Args:
        rows: most rows of a decode pass.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type != "cuda":
        return Budget(min(int(free * CPU_SHARE), CPU_LIMIT), total, 0)
    torch.cuda.empty_cache()  # what is cached and unused would count as taken
    left = torch.cuda.mem_get_info(device)[0]
    step = step_bytes(spec, dtype, prefill_chunk=prefill_chunk, rows=rows)
    parking = int(free * PARKING_SHARE) // max(1, torch.cuda.device_count())
    return Budget(max(0, int((left - step) * GPU_SHARE)), left, parking)


def step_bytes(spec: ModelSpec, dtype: torch.dtype, *, prefill_chunk: int, rows: int) -> int:
    """Estimate what the widest pass takes beside the pools: activations, logits, graphs."""
    activations = prefill_chunk * ROW_ACTIVATIONS * spec.hidden_size * dtype.itemsize
    return activations + rows * spec.vocab_size * LOGIT_BYTES + GRAPH_BYTES


def bytes_of(spec: ModelSpec, sizes: Sizes, page_size: int, dtype: torch.dtype) -> int:
    """Bytes that the pools take on the device; the zero state counts."""
    states = sizes.states + 1 if spec.is_hybrid else 0
    return sizes.pages * bytes_per_page(spec, page_size, dtype) + states * bytes_per_state(
        spec, dtype
    )


def warn_of_thrash(spec: ModelSpec, sizes: Sizes, max_snapshots: int) -> None:
    """Say so where not even one thread keeps the states that it may go back to."""
    if spec.is_hybrid and sizes.states + sizes.places <= max_snapshots:
        logger.warning(
            "num_states=%d: a thread keeps %d snapshots and steps in one more, so states will be "
            "dropped and computed again (stats: evicted_states, replayed); give num_states or "
            "park_bytes for %d a thread",
            sizes.states,
            max_snapshots,
            max_snapshots + 1,
        )


def _state_share(spec: ModelSpec, dtype: torch.dtype) -> float:
    """Share of the pools that goes to states, so that both run out at once."""
    states = OWN_STATES * bytes_per_state(spec, dtype)
    return states / (states + OWN_TOKENS * bytes_per_page(spec, 1, dtype))
