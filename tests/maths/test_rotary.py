"""Head norms, rotation and the write to the pool against transformers' attention modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as rotate_whole
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb as rotate_part

from octopus_trl.maths.rotary import rotary_tables, rotate_and_write, shift_positions
from tests.tiny import tiny_dense, tiny_hybrid

DTYPES = [torch.float32, torch.bfloat16]
POSITIONS = torch.tensor([0, 1, 63, 64, 4001])
PAGES, PAGE, POISON = 3, 4, float("nan")


def module_of(gated: bool, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Give an attention module, its rotary module and how it rotates."""
    model = (tiny_hybrid(layers=4) if gated else tiny_dense(layers=1)).to(dtype)
    attention = model.model.layers[3 if gated else 0].self_attn
    rotate = rotate_part if gated else rotate_whole
    return attention, model.model.rotary_emb, rotate


def stock(attention: Any, rope: Any, rotate: Any, x: Tensor, gated: bool) -> tuple[Any, ...]:
    """What the stock module computes before it attends, as [R, heads, D]."""
    rows, dim = len(x), attention.head_dim
    q = attention.q_proj(x)
    gate = None
    if gated:
        q, gate = q.view(rows, -1, 2 * dim).chunk(2, dim=-1)
    q = attention.q_norm(q.reshape(rows, -1, dim))
    k = attention.k_norm(attention.k_proj(x).view(rows, -1, dim))
    v = attention.v_proj(x).view(rows, -1, dim)
    cos, sin = rope(x[None], POSITIONS[None])
    q, k = rotate(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    return q[0].transpose(0, 1), k[0].transpose(0, 1), v, gate


def tables(rope: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    scaling = rope.attention_scaling
    cos, sin = rotary_tables(4002, inv_freq=rope.inv_freq, scaling=scaling, dtype=dtype)
    return {"cos": cos, "sin": sin}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Qwen3_5TextRotaryEmbedding, Qwen3RotaryEmbedding])
def test_tables_hold_what_the_modules_compute(dtype: torch.dtype, kind: Any) -> None:
    hybrid = kind is Qwen3_5TextRotaryEmbedding
    rope = kind((tiny_hybrid(layers=4) if hybrid else tiny_dense(layers=1)).config)
    cos, sin = rope(torch.zeros(1, 1, dtype=dtype), POSITIONS[None])
    table = tables(rope, dtype)
    for name, want in (("cos", cos), ("sin", sin)):
        half = table[name][POSITIONS]
        assert torch.equal(torch.cat([half, half], dim=-1), want[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_queries_keys_and_values_are_the_modules_bit_by_bit(
    dtype: torch.dtype, gated: bool
) -> None:
    attention, rope, rotate = module_of(gated, dtype)
    x = torch.randn(len(POSITIONS), 48, dtype=dtype)
    kv_heads, dim = 2, attention.head_dim
    keys = torch.full((PAGES, PAGE, kv_heads, dim), POISON, dtype=dtype)
    values = keys.clone()
    slots = torch.tensor([11, 0, -1, 5, 6])
    with torch.no_grad():
        want_q, want_k, want_v, want_gate = stock(attention, rope, rotate, x, gated)
        q, gate = rotate_and_write(
            torch.cat(
                [proj(x) for proj in (attention.q_proj, attention.k_proj, attention.v_proj)], -1
            ),
            q_weight=attention.q_norm.weight,
            k_weight=attention.k_norm.weight,
            eps=1e-6,
            zero_centered=gated,
            gated=gated,
            **tables(rope, dtype),
            positions=POSITIONS,
            keys=keys,
            values=values,
            slots=slots,
        )
    assert torch.equal(q, want_q)
    assert (gate is None) == (want_gate is None)
    if gate is not None:
        assert torch.equal(gate, want_gate)
    live = slots >= 0
    for pool, want in ((keys, want_k), (values, want_v)):
        flat = pool.flatten(0, 1)
        assert torch.equal(flat[slots[live]], want[live])
        untouched = torch.ones(PAGES * PAGE, dtype=torch.bool)
        untouched[slots[live]] = False
        assert bool(flat[untouched].isnan().all())


@pytest.mark.parametrize("gated", [True, False])
def test_a_key_that_is_moved_is_the_key_written_there(gated: bool) -> None:
    """R(p + d) = R(d) R(p), forwards and back, with dims that do not rotate as they were."""
    attention, rope, rotate = module_of(gated, torch.float32)
    k = torch.randn(len(POSITIONS), 2, attention.head_dim, dtype=torch.float64)
    by = torch.tensor([7, -1, -63, 4000, -3999])

    def written(positions: Tensor) -> Tensor:
        angles = positions[:, None].double() * rope.inv_freq.double()
        cos, sin = (torch.cat([t, t], -1)[None] for t in (angles.cos(), angles.sin()))
        one = k.transpose(0, 1)[None]
        return rotate(one, one, cos, sin)[1][0].transpose(0, 1)

    moved = shift_positions(written(POSITIONS), by=by, inv_freq=rope.inv_freq)
    torch.testing.assert_close(moved, written(POSITIONS + by), atol=1e-10, rtol=0)
    assert (moved - written(POSITIONS)).abs().max() > 0.1
    assert torch.autograd.gradcheck(
        lambda x: shift_positions(x, by=by, inv_freq=rope.inv_freq), [k.requires_grad_()]
    )
