"""Layers of an update with less traffic between their products.

Between two products a stock layer reads and writes its rows many times: a norm alone seven times in
float32, an adapter five times at full width. While `lean_layers` is open, modules that it knows run
the same mathematics with one kernel a norm and a gate, and one more product an adapter. It sets
`forward` on instances and takes it off again: classes, parameters, hooks and `state_dict` stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn
from transformers.models.bamba.modeling_bamba import BambaMLP, BambaRMSNorm
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5MLP,
    Qwen3_5RMSNorm,
    Qwen3_5RMSNormGated,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeMLP,
    Qwen3_5MoeRMSNorm,
    Qwen3_5MoeRMSNormGated,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP, Qwen3MoeRMSNorm

from octopus_trl.kernels import select
from octopus_trl.models.mlp_tiles import Tiled

CENTERED = (Qwen3_5RMSNorm, Qwen3_5MoeRMSNorm)  # the factor is 1 + weight
PLAIN = (
    Qwen3RMSNorm,
    Qwen3MoeRMSNorm,
    Qwen2RMSNorm,
    LlamaRMSNorm,
    BambaRMSNorm,
    GraniteMoeHybridRMSNorm,
)
GATED = (Qwen3_5RMSNormGated, Qwen3_5MoeRMSNormGated)
MLPS = (Qwen3_5MLP, Qwen3_5MoeMLP, Qwen3MLP, Qwen3MoeMLP, Qwen2MLP, LlamaMLP, BambaMLP)

Forward = Callable[..., Tensor]


@contextmanager
def lean_layers(model: nn.Module, *, fused: bool) -> Iterator[None]:
    """Let the layers of a model move less memory until the block ends, backward pass included.

    An adapter of float32 gets its input as it is wherever autocast to the input's own dtype is on:
    PEFT makes it float32 and autocast narrow again, which loses nothing and costs two copies each
    way. Values and gradients keep their bits; dropout, where there is some, may draw another mask.

    Args:
        model: PEFT-wrapped or not.
        fused: on a GPU also run norms and SwiGLU in one kernel each way, rounded where the modules
            round, and add an adapter's output within its product, rounded once in place of three
            times.
    """
    found: list[tuple[nn.Module, str]] = []

    def put(module: nn.Module, name: str, call: Callable[..., Any]) -> None:
        if name not in vars(module):  # somebody's own, or ours from a block around this one
            setattr(module, name, call)
            found.append((module, name))

    try:
        for module in model.modules():
            if type(module) is LoraLinear and not module.lora_variant:
                put(module, "_cast_input_dtype", _cast_less(module))
                if fused:
                    put(module, "forward", _adapted(module))
            elif fused and isinstance(module, (*CENTERED, *PLAIN)):
                put(module, "forward", _norm(module, centered=isinstance(module, CENTERED)))
            elif fused and isinstance(module, GATED):
                put(module, "forward", _gated_norm(module))
            elif fused and isinstance(module, MLPS) and _is_silu(module):
                name = "octopus_whole" if isinstance(module, Tiled) else "forward"
                put(module, name, _swiglu(module))
        yield
    finally:
        for module, name in found:
            delattr(module, name)


def takes(x: Tensor) -> bool:
    """Whether kernels of one pass serve a tensor."""
    return x.is_cuda and x.dtype != torch.float64


def autocasts_to(x: Tensor) -> bool:
    """Whether autocast is on, to the dtype that a tensor has."""
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == x.dtype


def _one_dtype(x: Tensor, *layers: nn.Linear) -> bool:
    """Whether layers compute in the dtype of their input."""
    if torch.is_autocast_enabled(x.device.type):
        return autocasts_to(x)
    return all(layer.weight.dtype == x.dtype for layer in layers)


def _norm(module: Any, *, centered: bool) -> Forward:
    stock = module.forward
    eps = module.eps if centered else module.variance_epsilon

    def forward(hidden_states: Tensor) -> Tensor:
        weight = module.weight
        if not takes(hidden_states) or not (centered or weight.dtype == hidden_states.dtype):
            return stock(hidden_states)
        norm = select("packed_rms_norm", hidden_states.device)
        return norm(hidden_states, weight=weight, eps=eps, zero_centered=centered)

    return forward


def _gated_norm(module: Any) -> Forward:
    stock, eps = module.forward, module.variance_epsilon

    def forward(hidden_states: Tensor, gate: Tensor) -> Tensor:
        weight = module.weight
        known = weight.dtype in (hidden_states.dtype, torch.float32) and hidden_states.dim() == 2
        if not takes(hidden_states) or not known:
            return stock(hidden_states, gate)
        norm = select("packed_gated_norm", hidden_states.device)
        return norm(hidden_states, z=gate, weight=weight, eps=eps)

    return forward


def _swiglu(module: Any) -> Forward:
    stock = module.whole if isinstance(module, Tiled) else module.forward

    def forward(x: Tensor) -> Tensor:
        if not takes(x):
            return stock(x)
        gate, up = module.gate_proj(x), module.up_proj(x)
        return module.down_proj(select("packed_swiglu", x.device)(gate, up=up))

    return forward


def _is_silu(mlp: Any) -> bool:
    return type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _cast_less(module: Any) -> Callable[[Tensor, torch.dtype], Tensor]:
    stock = module._cast_input_dtype

    def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x if dtype == torch.float32 and autocasts_to(x) else stock(x, dtype)

    return cast


def _adapted(module: Any) -> Forward:
    """Add ``scale · B A x`` to the base layer's output while it is written by B's product."""
    stock = module.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        known = not (args or kwargs or module.disable_adapters or module.merged)
        names = [name for name in module.active_adapters if name in module.lora_A]
        base, ups = module.base_layer, [module.lora_B[name] for name in names]
        if (
            not (known and takes(x) and type(base) is nn.Linear)
            or any(up.bias is not None for up in ups)
            or any(hasattr(up.weight, "ds_id") for up in ups)  # ZeRO-3 gathers by module
            or not _one_dtype(x, base, *ups)
        ):
            return stock(x, *args, **kwargs)
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor = base(rows)
        for name, up in zip(names, ups, strict=True):
            low = module.lora_A[name](module.lora_dropout[name](rows))
            # In place: nothing has kept what the base layer gave.
            out.addmm_(low, up.weight.to(low.dtype).t(), alpha=module.scaling[name])
        return out.view(*x.shape[:-1], -1)

    return forward
