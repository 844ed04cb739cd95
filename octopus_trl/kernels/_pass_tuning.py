"""What the kernels of a pass do together, by the rows of the pass.

Every kernel of a decode step sees the same number of rows, so that a line here decides for a whole
pass. Only what was measured faster in the whole step on an H200 is on.
"""

from __future__ import annotations

from typing import NamedTuple


class PassTuning(NamedTuple):
    """How the kernels of a pass work.

    Attributes:
        early: a kernel starts while the one before it still runs (`_triton.early`).
        streams: the streaming kernel takes every product, also those that a BLAS library does as
            fast alone: a library's kernel starts late, and the next one too.
        gated: gate, up and SwiGLU are one product.
    """

    early: bool
    streams: bool
    gated: bool


_OFF = PassTuning(early=False, streams=False, gated=False)

# Rows at most -> how; a line serves from above the one before it, the first from 1 row. A step took
# 3.76 ms with it and 3.98 without at 8 rows, 4.36 and 4.62 at 16 (2026-12-01,
# data/bench/kernels.jsonl).
_TABLE: dict[int, PassTuning] = {
    16: PassTuning(early=True, streams=True, gated=True),
}


def pass_tuning(rows: int) -> PassTuning:
    """Give how the kernels of a pass of some rows work; all is off beyond the table."""
    return next((line for most, line in _TABLE.items() if rows <= most), _OFF)
