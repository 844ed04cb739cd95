"""A decode step over pools against transformers' layer with its cache, and what it may touch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from octopus_trl.maths.delta_pool import gated_delta_pool_step
from tests.tiny import tiny_hybrid

SLOTS = 7


def inputs(rows: int, dtype: torch.dtype, *, bias: bool = False) -> dict[str, Any]:
    """Draw a step over poisoned pools of which slots 0 to 3 may be read."""
    key_heads, heads, key_dim, value_dim, width = 2, 4, 5, 6, 4
    channels = 2 * key_heads * key_dim + heads * value_dim
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    given = {
        "mixed": torch.randn(rows, channels),
        "a": torch.randn(rows, heads),
        "b": torch.randn(rows, heads),
        "z": torch.randn(rows, heads * value_dim),
        "conv_weight": torch.randn(channels, width),
        "conv_bias": torch.randn(channels),
        "A_log": torch.randn(heads),
        "dt_bias": torch.randn(heads),
        "norm_weight": torch.randn(value_dim),
        "tails": torch.randn(SLOTS, channels, width - 1),
    }
    made: dict[str, Any] = {name: value.to(dtype) for name, value in given.items()}
    made["states"] = torch.randn(SLOTS, heads, key_dim, value_dim, dtype=wide)
    for pool in ("tails", "states"):
        made[pool][0] = 0
        made[pool][4:] = float("nan")
    if not bias:
        made["conv_bias"] = None
    return {**made, "num_key_heads": key_heads}


def step(given: dict[str, Any], read: list[int], write: list[int]) -> tuple[Tensor, dict[str, Any]]:
    """Run a step on copies of the pools and give them changed."""
    own = {**given, "tails": given["tails"].clone(), "states": given["states"].clone()}
    mixed = own.pop("mixed")
    out = gated_delta_pool_step(mixed, **own, read=torch.tensor(read), write=torch.tensor(write))
    return out, own


def test_steps_equal_transformers_layer_with_its_cache() -> None:
    model = tiny_hybrid(layers=4)
    layer = model.model.layers[1].linear_attn
    hidden = torch.randn(1, 9, 48)
    cache = DynamicCache(config=model.config)
    tails = torch.zeros(3, layer.conv_dim, layer.conv_kernel_size - 1)
    states = torch.zeros(3, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    with torch.no_grad():
        for index in range(hidden.shape[1]):
            x = hidden[:, index : index + 1]
            want = layer(x, cache=cache)
            core = gated_delta_pool_step(
                layer.in_proj_qkv(x)[0],
                a=layer.in_proj_a(x)[0],
                b=layer.in_proj_b(x)[0],
                z=layer.in_proj_z(x)[0],
                conv_weight=layer.conv1d.weight.squeeze(1),
                conv_bias=layer.conv1d.bias,
                A_log=layer.A_log,
                dt_bias=layer.dt_bias,
                norm_weight=layer.norm.weight,
                norm_eps=layer.norm.variance_epsilon,
                tails=tails,
                states=states,
                read=torch.tensor([0 if index == 0 else 2]),
                write=torch.tensor([2]),
                num_key_heads=layer.num_k_heads,
            )
            torch.testing.assert_close(layer.out_proj(core), want[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_step_in_place_and_a_step_to_another_slot_give_the_same(dtype: torch.dtype) -> None:
    given = inputs(3, dtype, bias=True)
    out, pools = step(given, [1, 2, 0], [1, 2, 3])
    apart, others = step(given, [1, 2, 0], [4, 5, 6])
    assert torch.equal(out, apart)
    for pool in ("tails", "states"):
        assert torch.equal(pools[pool][1:4], others[pool][4:7])
        assert torch.equal(others[pool][:4], given[pool][:4])


@pytest.mark.parametrize("padding", [0, -1])
def test_padding_rows_are_zero_and_touch_nothing(padding: int) -> None:
    given = inputs(4, torch.float32)
    given["mixed"][1] = given["z"][3] = float("nan")
    out, pools = step(given, [1, 5, 2, 0], [4, padding, 2, padding])
    assert torch.equal(out[[1, 3]], torch.zeros_like(out[[1, 3]]))
    assert bool(out[[0, 2]].isfinite().all())
    for pool in ("tails", "states"):
        assert torch.equal(pools[pool][[0, 1, 3]], given[pool][[0, 1, 3]])
        assert bool(pools[pool][5:].isnan().all())


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    given = inputs(4, torch.float64)
    out, _ = step(given, [0, 1, 2, 3], [4, 5, 6, 3])
    for name in ("mixed", "a", "b", "z"):
        given[name][1:] = float("nan")
    alone, _ = step(given, [0, 1, 2, 3], [4, 5, 6, 3])
    torch.testing.assert_close(alone[0], out[0], atol=1e-14, rtol=0)


def test_without_a_gate_the_outputs_come_before_the_norm() -> None:
    given = inputs(2, torch.float64)
    gated, pools = step(given, [1, 2], [4, 5])
    raw, others = step({**given, "z": None, "norm_weight": None}, [1, 2], [4, 5])
    o, z = raw.view(2, 4, 6), given["z"].view(2, 4, 6)
    scale = (o.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    want = o / scale * given["norm_weight"] * z * z.sigmoid()
    torch.testing.assert_close(gated, want.flatten(1), atol=1e-12, rtol=0)
    assert torch.equal(pools["states"][4:6], others["states"][4:6])
