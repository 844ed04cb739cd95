"""A trained adapter as plain weights: what `AutoModelForCausalLM.from_pretrained` loads.

Weights are merged into copies, W + s B A in float32 and then rounded to the dtype of W, so a model
in training stays bit for bit what it was. Our mixers keep every parameter's name, so nothing of
this package is needed to load the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from octopus_trl.errors import ConfigError


def export_merged(model: nn.Module, folder: str | Path, tokenizer: Any = None) -> Path:
    """Write a model with its adapter merged, in the layout of plain transformers.

    Args:
        model: PEFT-wrapped or not; not changed.
        tokenizer: written beside it.
    Returns:
        The folder.
    Raises:
        ConfigError: the adapter is of a kind that is not a sum of weights, or its weights are split
            over ranks.
    """
    target = Path(folder)
    base: Any = model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]
    base.save_pretrained(target, state_dict=merged_state(model))
    if tokenizer is not None:
        tokenizer.save_pretrained(target)
    return target


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Give the state dict of the base model with the active adapter's changes added.

    Raises:
        ConfigError: see `export_merged`.
    """
    base: Any = model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]
    if any(hasattr(parameter, "ds_id") for parameter in base.parameters()):
        raise ConfigError(
            "weights are split over ranks (ZeRO-3): save the adapter and merge it afterwards, "
            "python scripts/export.py --model BASE --adapter FOLDER --output MERGED"
        )
    state = dict(base.state_dict())
    for name, module in base.named_modules():
        if isinstance(module, LoraLayer):
            _merge(state, name, module)
        elif isinstance(module, ModulesToSaveWrapper):
            _take_saved(state, name, module)
    return state


def _merge(state: dict[str, Tensor], name: str, layer: Any) -> None:
    """Replace a layer's adapted weight by W + Σ s B A and its other names by the plain ones."""
    if layer.merged:
        raise ConfigError(f"{name}: its adapter is merged already; unmerge it and export again")
    if any(layer.use_dora.values()) or getattr(layer, "lora_bias", {}).get("default"):
        raise ConfigError(
            f"{name}: DoRA and LoRA biases are not plain sums of weights; train a plain LoRA"
        )
    weight = state.pop(f"{name}.base_layer.weight")
    total = weight.float()
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
            total = total + layer.scaling[adapter] * (up.float() @ down.float())
    inner = [key for key in state if key.startswith(f"{name}.")]
    for key in inner:
        value = state.pop(key)
        if key.startswith(f"{name}.base_layer."):
            state[key.replace(".base_layer.", ".", 1)] = value
    state[f"{name}.weight"] = total.to(weight.dtype)


def _take_saved(state: dict[str, Tensor], name: str, wrapper: Any) -> None:
    """Keep the copy of a module that was trained whole."""
    saved = {
        f"{name}.{key}": value
        for key, value in wrapper.modules_to_save[wrapper.active_adapters[0]].state_dict().items()
    }
    for key in [key for key in state if key.startswith(f"{name}.")]:
        del state[key]
    state.update(saved)
