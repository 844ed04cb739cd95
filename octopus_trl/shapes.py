"""Axis legend and array aliases by role, used in public signatures.

Letters inside a body: T rows (tokens of a packed row or of a step), R runs or cursors, H query
    heads, KV key/value heads, HK and HV key and value heads of a recurrent layer, D head dim, K
    and V key and value dim of a recurrent layer, C conv channels, W conv width, P pages, S slots a
    page, N segments.
"""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

Queries: TypeAlias = Tensor  # [T, H, D]
Keys: TypeAlias = Tensor  # [T, KV, D]
Values: TypeAlias = Tensor  # [T, KV, D]
LogSumExp: TypeAlias = Tensor  # [T, H] float32 or wider
RecurrentState: TypeAlias = Tensor  # [R, HV, K, V] float32
ConvTail: TypeAlias = Tensor  # [R, C, W - 1] model dtype, inputs before the activation
Hidden: TypeAlias = Tensor  # [T, d] model dtype
Logps: TypeAlias = Tensor  # [M] float32, natural log
Rows: TypeAlias = Tensor  # [M] int64, indices into T
