"""Splicing: a reader's state steps through what a sibling's recurrent layers were given.

Those inputs are nowhere kept. The sibling's span runs once more from the state before it, over the
pages where its keys and values lie, and beside the sibling's own state the reader's takes the same
steps; only the reader's end is kept. Where the span read others in the same way, so does this run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from octopus_trl.engine.batch import Seen, prefill_context
from octopus_trl.engine.cursor import Mount, Node, keep_states, passed, visible

if TYPE_CHECKING:
    from octopus_trl.engine.runner import Runner


def pass_through(
    runner: Runner,
    tail: Node | None,
    mounts: Sequence[Mount],
    read_slot: int,
    write_slot: int | None,
) -> int:
    """Let a state step through all that spliced mounts add after a boundary.

    Args:
        read_slot: holds the state at `tail`, which nobody may take meanwhile.
        write_slot: takes the end; None for a model without recurrent layers.
    Returns:
        The slot that holds the state now: `read_slot` where there was nothing to step through.
    Raises:
        StatesExhausted: no slot can be had for the sibling's state; `read_slot` may be lost if it
            is `write_slot`.
    """
    if write_slot is None or not any(mount.spliced for mount in mounts):
        return read_slot
    for nodes in passed(tail, mounts):
        _step_beside(runner, nodes, read_slot, write_slot)
        read_slot = write_slot
    return read_slot


def _step_beside(runner: Runner, nodes: Sequence[Node], read_slot: int, write_slot: int) -> None:
    """Run consecutive nodes of a chain again, with a second state beside the chain's own."""
    missing: list[Node] = []
    source = nodes[0].parent
    while source is not None and not source.has_state:
        missing.append(source)
        source = source.parent
    beside = Node(source, [], [], 0, 0, nodes[0].epoch, growing=True)  # holds the chain's own state
    slot = runner.take_slot(source, beside)
    try:
        assert beside.slot is not None
        with keep_states(source):
            if missing:
                reason = "state_dropped" if missing[0].stated else "no_state"
                runner.replay(missing, slot, beside.slot, reason)
                slot = beside.slot
            for node in nodes:
                slot = pass_through(runner, node.parent, node.mounts, slot, beside.slot)
                _step_node(runner, node, (slot, read_slot), (beside.slot, write_slot))
                slot, read_slot = beside.slot, write_slot
    finally:
        runner.tree.states.release(beside)


def _step_node(runner: Runner, node: Node, reads: tuple[int, int], writes: tuple[int, int]) -> None:
    """Feed a frozen node's tokens to its own chain's state and to another one."""
    memory = runner.memory
    seen = Seen(*visible(node.parent, node.mounts), room=len(node.tokens))
    assert node.cached_slots is not None
    for lo in range(0, len(node.tokens), runner.prefill_chunk):
        hi = min(lo + runner.prefill_chunk, len(node.tokens))
        context = prefill_context(
            memory,
            node.tokens[lo:hi],
            node.start + lo,
            seen,
            slots=None,
            read_slot=reads[0],
            write_slot=writes[0],
        )
        read_states, write_states = (
            torch.tensor(slots, dtype=torch.int64, device=memory.device)
            for slots in (reads, writes)
        )
        runner.run_plainly(
            replace(context, read_states=read_states, write_states=write_states, twice=True)
        )
        runner.counters.miss("spliced", hi - lo)
        seen.append(node.cached_slots[lo:hi])
        reads = writes
