"""One decode step of a gated delta layer over the slots of its pools, and the gates of any rows.

Axes: R rows, S slots (slot 0 is the zero state), C channels, W taps, HK and HV key and value heads,
K and V their dims; C = 2 HK K + HV V, in the order q, k, v.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from octopus_trl.maths.conv import causal_conv_step
from octopus_trl.maths.delta_rule import gated_delta_step
from octopus_trl.maths.norms import gated_rms_norm


def delta_gates(a: Tensor, *, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Give what rows forget and how strongly they write: ``g = -exp(A_log) softplus(a + dt_bias)``
    and ``beta = sigmoid(b)``.

    Args:
        a, b: [R, HV] outputs of in_proj_a and in_proj_b.
        A_log, dt_bias: [HV].

    Returns:
        g and beta [R, HV] in float32 (float64 for float64 inputs), beta rounded to the dtype of b.
    """
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    g = -A_log.to(wide).exp() * F.softplus(a.to(wide) + dt_bias)
    return g, b.sigmoid().to(wide)


def gated_delta_pool_step(
    mixed: Tensor,
    *,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    tails: Tensor,
    states: Tensor,
    read: Tensor,
    write: Tensor,
    num_key_heads: int,
    z: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
) -> Tensor:
    """Advance every row by one token, from the slot that it reads into the slot that it writes.

    Convolution and SiLU (README.md, Eq. 1), gates ``g = -exp(A_log) softplus(a + dt_bias)`` and
    ``beta = sigmoid(b)``, delta rule with q and k of unit length (Eq. 2), and the gated norm where
    `z` is given (Eq. 14).

    Args:
        mixed: [R, C] output of in_proj_qkv.
        a, b: [R, HV] outputs of in_proj_a and in_proj_b.
        conv_weight, conv_bias: [C, W] and [C] (or None).
        A_log, dt_bias: [HV].
        tails: [S, C, W - 1] inputs before the convolution, oldest first; changed in place.
        states: [S, HV, K, V] float32 (float64 for a float64 model); changed in place.
        read: [R] integers, slot that a row starts from; 0 starts from nothing.
        write: [R] integers, slot that takes a row's end, distinct; it may be the one the row reads,
            but none that another row reads. At most 0 marks padding: the row reads and writes
            nothing and gives exact zeros.
        num_key_heads: HK.
        z: [R, HV * V] output of in_proj_z, or None for the outputs before the gated norm.
        norm_weight, norm_eps: of the gated norm, [V].

    Returns:
        [R, HV * V] in the dtype of `mixed`: the input of out_proj.
    """
    rows, heads, (key_dim, value_dim) = len(mixed), states.shape[1], states.shape[2:]
    live = (write > 0).nonzero()[:, 0]
    source, target = read.long()[live], write.long()[live]
    x, tail = causal_conv_step(
        mixed[live], weight=conv_weight, bias=conv_bias, tail=tails.index_select(0, source)
    )
    q, k, v = x.split([num_key_heads * key_dim, num_key_heads * key_dim, heads * value_dim], dim=-1)
    g, beta = delta_gates(a[live], b=b[live], A_log=A_log, dt_bias=dt_bias)
    o, state = gated_delta_step(
        q.unflatten(-1, (num_key_heads, key_dim)),
        k=k.unflatten(-1, (num_key_heads, key_dim)),
        v=v.unflatten(-1, (heads, value_dim)),
        g=g,
        beta=beta,
        state=states.index_select(0, source),
    )
    tails.index_copy_(0, target, tail)
    states.index_copy_(0, target, state)
    y = o.flatten(1)
    if z is not None:
        assert norm_weight is not None
        y = gated_rms_norm(o, z=z[live], weight=norm_weight, eps=norm_eps)
    return y.new_zeros(rows, heads * value_dim).index_copy_(0, live, y)
