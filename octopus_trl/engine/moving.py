"""Copies of keys at other positions: pages of their own, for `position: rerotate` (DESIGN §3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octopus_trl.engine.cursor import Node
from octopus_trl.engine.pages import Slots
from octopus_trl.engine.runner import Runner
from octopus_trl.kernels import select
from octopus_trl.maths.rotary import shift_positions


def copy_moved(
    runner: Runner,
    tokens: Sequence[int],
    parts: Sequence[tuple[Slots, int]],
    *,
    end: int,
    epoch: int,
    inv_freq: Tensor,
) -> Node:
    """Copy keys and values of slots to pages of a new node, the keys moved; it is held once.

    Only layers that see mounts are copied, and only the node's mounts may read it: it continues
    nothing and has no state.

    Args:
        parts: slots and how many positions their keys move, in order.
        end: position just past the copy.
        inv_freq: see `shift_positions`.
    Raises:
        PagesExhausted: too little room; nothing was changed.
    """
    tree, memory = runner.tree, runner.memory
    runner.room(tree.pages.needed(None, len(tokens)))
    node = tree.new(None, (), end - len(tokens), epoch)
    try:
        slots = tree.pages.grow(node.ranges, None, len(tokens))
        node.tokens.extend(tokens)
        device = memory.device
        to = torch.from_numpy(slots).to(device)
        source = torch.from_numpy(np.concatenate([places for places, _ in parts])).to(device)
        moves = np.repeat([far for _, far in parts], [len(places) for places, _ in parts])
        by = torch.from_numpy(moves).to(device)
        gather, write = select("gather_slots", device), select("write_slots", device)

        def copy() -> None:
            for layer in memory.spec.mount_layers:
                keys, values = memory.keys[layer], memory.values[layer]
                moved = shift_positions(
                    gather(keys, slots=source), by=by, inv_freq=inv_freq.to(device)
                )
                write(keys, values=moved, slots=to)
                write(values, values=gather(values, slots=source), slots=to)

        runner.launch(copy)
    except BaseException:
        tree.drop(node)
        raise
    tree.freeze(node)
    written = 2 * len(memory.spec.mount_layers) * memory.spec.num_kv_heads * memory.spec.head_dim
    runner.counters.moved(len(tokens), len(tokens) * written * memory.dtype.itemsize)
    return node
