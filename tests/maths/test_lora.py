"""Adapters of a fused group against PEFT on each projection."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from octopus_trl.maths.lora import lora_expand, lora_shrink

SIZES = {"q": 10, "k": 3, "v": 7}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("ranks", [{"q": 4, "k": 4, "v": 4}, {"q": 1, "v": 5}, {"k": 3}], ids=str)
def test_a_fused_group_gives_what_peft_gives(dtype: torch.dtype, ranks: dict[str, int]) -> None:
    base = nn.ModuleDict({name: nn.Linear(6, size, bias=False) for name, size in SIZES.items()})
    config = LoraConfig(
        target_modules=list(ranks), rank_pattern=ranks, r=2, lora_alpha=2, init_lora_weights=False
    )
    model = get_peft_model(base, config).to(dtype)
    x = torch.randn(5, 6, dtype=dtype)
    modules = {name: model.get_submodule(f"base_model.model.{name}") for name in SIZES}
    with torch.no_grad():
        want = torch.cat([module(x) for module in modules.values()], dim=-1)
        y = torch.cat([getattr(m, "base_layer", m)(x) for m in modules.values()], dim=-1)
        a, largest = [], max(ranks.values())
        b = torch.zeros(sum(SIZES.values()), largest, dtype=dtype)
        starts = torch.full((sum(SIZES.values()),), -1)
        column = rank_lo = 0
        for name, size in SIZES.items():
            if name in ranks:
                module, rank = modules[name], ranks[name]
                a.append(module.lora_A["default"].weight)
                scaled = module.lora_B["default"].weight * module.scaling["default"]
                b[column : column + size, :rank] = scaled
                starts[column : column + size] = rank_lo
                rank_lo += rank
            column += size
        h = lora_shrink(x, a=torch.cat(a))
        got = lora_expand(y, h=h, b=b, starts=starts)
    assert got is y
    limit = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(y, want, atol=limit, rtol=limit)
    untouched = starts < 0
    assert torch.equal(y[:, untouched], want[:, untouched])
