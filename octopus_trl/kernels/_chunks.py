"""Where the 64-row chunks of packed runs lie: the table that fla's kernels index by.

fla makes it from `cu_seqlens` with a wait for the device and remembers four of them; a pass has one
a level, and each layer asks for every one of them, forward, recomputed and backward. Whoever knows
the boundaries on the host makes it there, and nothing waits.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from importlib import import_module, util

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

CHUNK = 64
_KEPT = 128  # levels of the passes at hand

# Switches of fla for kernels whose host code was not read: it may ask the device for values.
_SWITCHES = ("FLA_GLUON", "FLA_INTRACARD_CP", "FLA_FLASH_QLA")

_tables: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()


def most_chunks(num_rows: int, num_runs: int) -> int:
    """Give the most chunks that runs of so many rows in all may have."""
    return (num_rows + (CHUNK - 1) * num_runs) // CHUNK


def chunk_table(bounds: Ints, num_chunks: int | None = None) -> Ints:
    """Give [N, 2] the run of each chunk and its number within that run.

    Args:
        bounds: [R + 1] run boundaries from 0; a run may be empty.
        num_chunks: N, at least the number of chunks; further entries lie past the end of run 0,
            where kernels find no row. None takes the chunks alone.
    """
    counts = -(-np.diff(bounds) // CHUNK)
    run = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.stack([run, within], axis=1)
    if num_chunks is None:
        return table
    padded = np.zeros((num_chunks, 2), dtype=np.int64)
    padded[: len(table)] = table
    padded[len(table) :, 1] = -(-int(bounds[-1]) // CHUNK)
    return padded


def keep_chunk_indices(cu_seqlens: Tensor, table: Tensor) -> None:
    """Let `chunk_indices` of this tensor object be a table that is there already.

    Args:
        table: [N, 2] as `chunk_table` makes it, perhaps of boundaries that are yet to be written.
    """
    # The tensor is kept beside its table, so that its id is not reused while the entry lives.
    _tables[id(cu_seqlens)] = (cu_seqlens, table)
    _tables.move_to_end(id(cu_seqlens))
    if len(_tables) > _KEPT:
        _tables.popitem(last=False)


def chunk_indices(cu_seqlens: Tensor) -> Tensor:
    """Give [N, 2] the run of each chunk and its number within that run, once a tensor object.

    Args:
        cu_seqlens: [R + 1] run boundaries; a run may be empty.
    """
    key = id(cu_seqlens)
    if key not in _tables:
        table = chunk_table(cu_seqlens.cpu().numpy())
        keep_chunk_indices(cu_seqlens, torch.from_numpy(table).to(cu_seqlens))
    _tables.move_to_end(key)
    return _tables[key][1]


def can_capture() -> bool:
    """Whether forward passes of fla's kernels can be captured as CUDA graphs.

    True for fla 0.6 with none of its optional kernels: given chunk indices, what it derives from
    `cu_seqlens` beside them it makes on the device, once a tensor object.
    """
    if util.find_spec("fla") is None or util.find_spec("flash_qla") is not None:
        return False
    if any(os.environ.get(name, "0") != "0" for name in _SWITCHES):
        return False
    version: str = import_module("fla").__version__
    return version.startswith("0.6.")
