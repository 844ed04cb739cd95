"""Where the 64-row chunks of packed runs lie: the table that fla's kernels index by.

fla makes it from `cu_seqlens` with a wait for the device and remembers four of them; a pass has one
a level, and each layer asks for every one of them, forward, recomputed and backward.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

CHUNK = 64
_KEPT = 128  # levels of the passes at hand

_tables: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()


def chunk_indices(cu_seqlens: Tensor) -> Tensor:
    """Give [N, 2] the run of each chunk and its number within that run, once a tensor object.

    Args:
        cu_seqlens: [R + 1] run boundaries; a run may be empty.
    """
    key = id(cu_seqlens)
    if key not in _tables:
        counts = -(-np.diff(cu_seqlens.cpu().numpy()) // CHUNK)
        run = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
        table = torch.from_numpy(np.stack([run, within], axis=1)).to(cu_seqlens)
        # The tensor is kept beside its table, so that its id is not reused while the entry lives.
        _tables[key] = (cu_seqlens, table)
        if len(_tables) > _KEPT:
            _tables.popitem(last=False)
    _tables.move_to_end(key)
    return _tables[key][1]
