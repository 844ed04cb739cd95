"""Gated delta rule on CUDA, through the Triton kernels of flash-linear-attention.

What parity with the reference rests on: decay and write strength in float32; states in float32 in
and out; lengths of q and k divided out inside the kernel with the same epsilon; an initial state
always passed. Products inside a chunk run in the dtype of v, so float32 inputs still go through
TF32 and float64 inputs take the reference.
"""

from __future__ import annotations

import functools
from importlib import import_module, util
from typing import Any, Literal

import torch
from torch import Tensor

from octopus_trl.errors import ConfigError
from octopus_trl.kernels import select
from octopus_trl.kernels._chunks import chunk_indices
from octopus_trl.maths import delta_rule as maths

INSTALL = "pip install flash-linear-attention==0.6.0 tilelang==0.1.15"

# fla divides out the lengths of q and k in kernels that it compiles in 25 ways each and times, anew
# for every multiple of so many rows of heads: training would stop for it at each new length.
_TUNED_ROWS = 65_536
_LENGTH_EPS = 1e-6  # as fla


def gated_delta_rule(
    q: Tensor,
    *,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    form: Literal["chunk", "recurrent"] = "chunk",
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule along every run, as ``maths.delta_rule.gated_delta_rule``.

    Args:
        q, k: [T, HK, K] before normalisation; v: [T, HV, V]; one dtype.
        g, beta: [T, HV] logarithm of the decay, and write strength.
        initial_state: [R, HV, K, V], gets a gradient.
        cu_seqlens: [R + 1] int64; chunk indices are made once per tensor object, so the layers of a
            pass should share it. Rows past the last run belong to none: o is left unwritten there.
        form: "recurrent" has no gradient here and serves short runs.

    Returns:
        o [T, HV, V] in the dtype of v, and the final states [R, HV, K, V] float32.

    Raises:
        ConfigError: fla is missing, or its backward is known to be wrong on this machine.
    """
    inputs = {"k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, *inputs.values()))
    if v.dtype == torch.float64 or v.shape[0] == 0 or (form == "recurrent" and needs_grad):
        return maths.gated_delta_rule(q, **inputs, cu_seqlens=cu_seqlens, form=form)
    rule = _fla(needs_grad, form)
    dtype = v.dtype
    chunks = {"chunk_indices": chunk_indices(cu_seqlens)} if form == "chunk" else {}
    q, k = q.to(dtype), k.to(dtype)
    divides = form != "chunk" or q.shape[0] * q.shape[1] <= _TUNED_ROWS
    if not divides:
        unit = select("packed_unit", q.device)
        q, k = unit(q, eps=_LENGTH_EPS), unit(k, eps=_LENGTH_EPS)
    o, state = rule(
        q=q[None],
        k=k[None],
        v=v[None],
        g=g.float()[None],
        beta=beta.float()[None],
        scale=q.shape[-1] ** -0.5,
        initial_state=initial_state.float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=divides,
        cu_seqlens=cu_seqlens,
        **chunks,
    )
    return o[0], state.float()


def gated_delta_step(
    q: Tensor,
    *,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Advance every run by one token, as ``maths.delta_rule.gated_delta_step``.

    Args:
        q, k: [R, HK, K] before normalisation; v: [R, HV, V]; one dtype.
        g, beta: [R, HV]; state: [R, HV, K, V].

    Returns:
        o [R, HV, V] in the dtype of v, and the new states [R, HV, K, V] float32.

    Raises:
        ConfigError: fla is missing.
    """
    inputs = {"k": k, "v": v, "g": g, "beta": beta, "state": state}
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, *inputs.values()))
    if v.dtype == torch.float64 or v.shape[0] == 0 or needs_grad:
        return maths.gated_delta_step(q, **inputs)
    dtype = v.dtype
    o, new_state = _fla(False, "recurrent")(
        q=q.to(dtype)[:, None],
        k=k.to(dtype)[:, None],
        v=v[:, None],
        g=g.float()[:, None],
        beta=beta.float()[:, None],
        scale=q.shape[-1] ** -0.5,
        initial_state=state.float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return o[:, 0], new_state


@functools.cache
def _fla(needs_grad: bool, form: str) -> Any:
    """Find fla's function, once, and refuse a backward that is known to be wrong here."""
    if util.find_spec("fla") is None:
        raise ConfigError(
            f"the gated delta rule on CUDA needs flash-linear-attention: {INSTALL}; "
            "OCTOPUS_KERNELS=maths runs the slow reference"
        )
    if needs_grad and _backward_is_wrong():
        raise ConfigError(
            "fla's gated delta rule gives wrong gradients on Hopper with Triton 3.4.0 to 3.7.0 "
            f"unless TileLang is installed: {INSTALL}"
        )
    ops = import_module("fla.ops.gated_delta_rule")
    name = "chunk_gated_delta_rule" if form == "chunk" else "fused_recurrent_gated_delta_rule"
    return getattr(ops, name)


def _backward_is_wrong() -> bool:
    """Known fault of fla without TileLang (flash-linear-attention#640), by device and version."""
    if torch.cuda.get_device_capability()[0] != 9 or util.find_spec("tilelang") is not None:
        return False
    version = import_module("triton").__version__.split("+")[0].split(".")
    return (3, 4, 0) <= tuple(int(part) for part in version[:3]) < (3, 7, 1)
