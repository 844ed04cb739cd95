"""Attention over an episode's DAG through flash-attn 4 (CuTe), block-sparse both ways.

Forward lists give the key blocks of each query block, backward lists the query blocks of each key
block; a block seen in part asks `_flash_mask.visible`, which reads device tensors, so that one
kernel each way serves every length and every DAG.

Axes: T rows, H query heads, KV key/value heads, D head dim, S segments.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from dataclasses import dataclass
from importlib import import_module, metadata, util
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from octopus_trl.kernels._block_lists import BlockPairs, block_pairs
from octopus_trl.maths.dag import AttentionPlan
from octopus_trl.shapes import Keys, Queries, Values

INSTALL = "pip install flash-attn-4==4.0.0b36"

_MIN_ROWS = 256  # shorter passes are padded: below, the kernels of one block differ
_ROW_MULTIPLE = 256  # the mask may look at rows up to the end of the last block
_KEPT_TABLES = 4  # plans of the pass at hand: with and without mounts, live and detached
_NEEDED = {
    "_flash_attn_fwd": ("softmax_scale", "mask_mod", "block_sparse_tensors", "aux_tensors"),
    "_flash_attn_bwd": ("softmax_scale", "mask_mod", "block_sparse_tensors", "aux_tensors"),
}


@functools.cache
def unavailable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Say why flash-attn 4 cannot serve here, or give None where it can."""
    if device.type != "cuda":
        return f"flash-attn 4 runs on CUDA, not on {device.type}"
    major = torch.cuda.get_device_capability(device)[0]
    if major not in _BLOCKS:
        name = torch.cuda.get_device_name(device)
        return f"flash-attn 4 is block-sparse on Hopper and Blackwell, this is {name}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn 4 takes 16-bit tensors, not {dtype}"
    if head_dim % 8 or not any(head_dim <= limit for limit in _BLOCKS[major]):
        return f"flash-attn 4 has no block-sparse kernels for head_dim {head_dim} on this GPU"
    if util.find_spec("flash_attn") is None or util.find_spec("flash_attn.cute") is None:
        return f"flash-attn 4 is not installed ({INSTALL})"
    try:
        interface = import_module("flash_attn.cute.interface")
    except ImportError as error:
        return f"flash-attn 4 does not import: {error} ({INSTALL})"
    for name, keywords in _NEEDED.items():
        found = getattr(interface, name, None)
        if found is None or not {*keywords} <= {*inspect.signature(found).parameters}:
            return f"flash-attn 4 {version()} has another interface ({INSTALL})"
    return None


def version() -> str:
    """Version of the installed package."""
    return metadata.version("flash-attn-4")


def dag_attention(
    q: Queries,
    *,
    k: Keys,
    v: Values,
    plan: AttentionPlan,
    scale: float,
    detach_mounts: bool = False,
) -> Queries:
    """Attend over the DAG of a packed row, as ``maths.attention.dag_attention``.

    Args:
        q: [T, H, D]; k, v: [T, KV, D], 16 bits wide.
        plan: its block lists are kept while the same object comes again.
        detach_mounts: the gradients of keys and values come from a second backward pass over the
            tree alone, with the log-sum-exp of the whole; nothing is copied.

    Cost: two compilations in a process, one each way, whatever the lengths.
    """
    rows = max(plan.num_rows, _MIN_ROWS)
    padding = rows - plan.num_rows
    if padding or q.shape[0] != rows:
        q_in, k_in, v_in = (F.pad(x[: plan.num_rows], (0, 0, 0, 0, 0, padding)) for x in (q, k, v))
    else:
        q_in, k_in, v_in = q, k, v
    tables = _tables.get(plan, q.device, q.shape[-1], tree=False)
    tree = None
    if detach_mounts and any(len(group.mounted_spans) for group in plan.groups):
        tree = _tables.get(plan, q.device, q.shape[-1], tree=True)
    out: Tensor = _FlashAttention.apply(q_in[None], k_in[None], v_in[None], tables, tree, scale)[0]
    if out.shape[0] == q.shape[0] and not padding:
        return out
    return F.pad(out[: plan.num_rows], (0, 0, 0, 0, 0, q.shape[0] - plan.num_rows))


class _FlashAttention(torch.autograd.Function):
    """flash-attn 4's two passes; its own autograd function keeps no choice of backward lists."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tables: Any, tree: Any, scale: float
    ) -> Tensor:
        out, lse = _interface()._flash_attn_fwd(
            q,
            k,
            v,
            softmax_scale=scale,
            mask_mod=_mask(),
            aux_tensors=tables.mask,
            block_sparse_tensors=tables.forward,
            return_lse=True,
        )[:2]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tables, ctx.tree, ctx.scale = tables, tree, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad_out = grad_out.contiguous()  # a broadcast one would be another kernel to compile

        def backward_over(tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
            return _interface()._flash_attn_bwd(
                q,
                k,
                v,
                out,
                grad_out,
                lse,
                softmax_scale=ctx.scale,
                mask_mod=_mask(),
                aux_tensors=tables.mask,
                block_sparse_tensors=tables.backward,
            )

        grad_q, grad_k, grad_v = backward_over(ctx.tables)
        if ctx.tree is not None:
            # exp(score - lse) with the lse of all keys is the weight of a tree's key, too.
            _, grad_k, grad_v = backward_over(ctx.tree)
        return grad_q, grad_k, grad_v, None, None, None


@dataclass(frozen=True, slots=True)
class Tables:
    """What the kernels read of a plan, on the device.

    Attributes:
        mask: segment of each row [T'] int32 and visibility bits [S + 1, W] int32.
        forward, backward: flash-attn's block lists; the second by key block.
    """

    mask: list[Tensor]
    forward: Any
    backward: Any


class _KeptTables:
    """Tables of the last few plans, by object: layers of one pass share a plan."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, str, int, bool], tuple[AttentionPlan, Tables]] = (
            OrderedDict()
        )

    def get(
        self, plan: AttentionPlan, device: torch.device, head_dim: int, *, tree: bool
    ) -> Tables:
        # The plan is kept beside its tables, so that its id is not reused while the entry lives.
        key = (id(plan), str(device), head_dim, tree)
        if key not in self._kept:
            seen = plan.without_mounts() if tree else plan
            self._kept[key] = (plan, build_tables(seen, device, head_dim))
            if len(self._kept) > _KEPT_TABLES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return self._kept[key][1]


_tables = _KeptTables()


def build_tables(plan: AttentionPlan, device: torch.device, head_dim: int) -> Tables:
    """List the blocks of a plan and copy the lists to the device."""
    rows = max(plan.num_rows, _MIN_ROWS)
    forward, backward = block_sizes(torch.cuda.get_device_capability(device)[0], head_dim)
    segment, bits = mask_tensors(plan, rows)
    return Tables(
        [torch.from_numpy(segment).to(device), torch.from_numpy(bits).to(device)],
        _block_tensors(_pairs(plan, forward, rows), forward, device),
        _block_tensors(_pairs(plan, backward, rows).transposed(), backward, device),
    )


def mask_tensors(plan: AttentionPlan, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Give the segment of each row and the pairs of segments that see each other, 32 to a word.

    Returns:
        [T'] int32, padding rows in a segment of their own that sees nothing, and [S + 1, W] int32.
    """
    num = len(plan.visible)
    segment = np.full(-(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE, num, dtype=np.int32)
    segment[: plan.num_rows] = plan.segment_of_row
    words = max(2, num // 32 + 1)  # a line of one word would be another layout to compile for
    sees = np.zeros((num + 1, words * 32), dtype=bool)
    sees[:num, :num] = plan.visible | plan.mounted
    np.fill_diagonal(sees[:num, :num], True)  # its own segment, up to the row itself
    return segment, np.packbits(sees, axis=1, bitorder="little").view(np.int32)


# Blocks [query, key] forward and backward by head_dim up to a limit, for each major capability. The
# kernels fix them: a sparse forward at head_dim 256 takes 128×64 on Hopper, its backward 64×64.
_BLOCKS: dict[int, dict[int, tuple[tuple[int, int], tuple[int, int]]]] = {
    9: {
        64: ((128, 128), (128, 128)),
        128: ((128, 128), (64, 128)),
        192: ((128, 64), (64, 96)),
        256: ((128, 64), (64, 64)),
    },
    10: {128: ((256, 128), (128, 128))},
}


def block_sizes(major: int, head_dim: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Give the blocks (query, key) of the forward and of the backward kernel."""
    return next(sizes for limit, sizes in _BLOCKS[major].items() if head_dim <= limit)


def _pairs(plan: AttentionPlan, blocks: tuple[int, int], rows: int) -> BlockPairs:
    return block_pairs(plan, query_block=blocks[0], key_block=blocks[1], rows=rows)


def _block_tensors(pairs: BlockPairs, blocks: tuple[int, int], device: torch.device) -> Any:
    sparsity = import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    arrays = [array for full in (False, True) for array in pairs.lists(full=full)]
    return sparsity(
        *(torch.from_numpy(array).to(device)[None, None] for array in arrays), block_size=blocks
    )


@functools.cache
def _interface() -> Any:
    return import_module("flash_attn.cute.interface")


@functools.cache
def _mask() -> Any:
    return import_module("octopus_trl.kernels._flash_mask").visible
