"""Which products the streaming kernel takes from the BLAS library, and how it cuts them.

Only what was measured faster on an H200 is listed, by the matrices of Qwen3.5-4B and the rows of a
pass; `scripts/tune_kernels.py linear` measures and prints the lines. Everything else is left to
BLAS, so a shape that nobody has measured is never slower than it was; but passes in which the
streaming kernel takes every product have a line in `_pass_tuning`.
"""

from __future__ import annotations

from octopus_trl.kernels._pass_tuning import pass_tuning
from octopus_trl.kernels._stream import Tiling, tiling

# Rows of A of a LoRA adapter lie below a fused matrix (`models/projections.py`): a line serves
# matrices of its depth with up to this share of outputs more.
_MORE_OUTPUTS = 0.06

# (inputs, outputs) -> rows at most -> tiling; a line serves from above the one before it, the first
# from 1 row. 2026-11-30, 16 rows, microseconds of ours and of BLAS (data/bench/kernels.jsonl).
_TABLE: dict[tuple[int, int], dict[int, Tiling | None]] = {
    (2560, 12352): {16: Tiling(64, 128, 1, warps=4, stages=4)},  # 18.0, 20.1: GDN in
    (4096, 2560): {16: Tiling(64, 128, 4, warps=4, stages=4)},  # 9.3, 10.7: GDN out, o_proj
    (2560, 10240): {16: Tiling(64, 128, 1, warps=4, stages=4)},  # 15.6, 16.0: attention in
    (9216, 2560): {16: Tiling(64, 128, 4, warps=4, stages=4)},  # 16.4, 17.8: down
}


def tuned(rows: int, dim: int, num_outputs: int) -> Tiling | None:
    """Give the tiling of a product; None where BLAS does it: it is at least as fast there, or
    nobody has measured, and the pass leaves it products.
    """
    measured = _measured(rows, dim, num_outputs)
    if measured is None and pass_tuning(rows).streams:
        return tiling(rows, num_outputs, dim)
    return measured


def tuned_gate(rows: int, dim: int, num_outputs: int) -> Tiling | None:
    """Give the tiling of gate, up and SwiGLU as one product; None where they are two launches.

    Its sums are those of the product by `tuned`, or by `tiling`.
    """
    if not pass_tuning(rows).gated:
        return None
    cut = _measured(rows, dim, num_outputs) or tiling(rows, num_outputs, dim)
    return cut if cut.parts == 1 else None


def _measured(rows: int, dim: int, num_outputs: int) -> Tiling | None:
    for (depth, outputs), lines in _TABLE.items():
        if depth == dim and outputs <= num_outputs <= outputs * (1 + _MORE_OUTPUTS):
            return next((cut for most, cut in lines.items() if rows <= most), None)
    return None
