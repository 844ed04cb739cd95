"""A whole copy of a policy that ZeRO-3 splits, for generation on each rank by itself.

Ranks draw episodes of different lengths, so a forward pass of generation may not wait for the
other ranks' parts. The copy is filled once, part by part, and refreshed with the parameters that
train, which for an adapter is a thousandth of the model.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn

from octopus_trl.errors import ConfigError
from octopus_trl.models import prepare_model, spec_of, unwrap
from octopus_trl.models.patch import stock_class
from octopus_trl.train.zero import full_shape, full_size, gathered, in_parts

PART_BYTES = (
    64 << 20
)  # gathered at once, beyond the copy; one larger parameter is a part of its own


class ResidentCopy:
    """Whole, frozen weights with the structure of a split model.

    Making one and `refresh` are collective: every rank must call them at the same point. The
    tensors of the copy keep their addresses, so that what was captured over them stays valid.

    Args:
        source: the model that trains, its parameters split by ZeRO-3 or not.
        device: where the copy lives.

    Attributes:
        model: the copy, prepared, in eval mode.
        num_bytes: its size.
        peak_bytes: most that was gathered at once beyond it.
    """

    def __init__(self, source: nn.Module, device: torch.device) -> None:
        began = time.perf_counter()
        self._source = source
        self._of: dict[int, nn.Parameter] = {}  # by id of the source's parameter
        self.model = _same_structure(source)
        self._materialise(device)
        self.num_bytes = sum(p.numel() * p.element_size() for p in self._of.values())
        self.peak_bytes = 0
        self._copy(trained_only=False)
        self.seconds = time.perf_counter() - began

    @property
    def refreshed_bytes(self) -> int:
        """What `refresh` copies: the parameters that train."""
        trained = (p for p in self._source.parameters() if p.requires_grad)
        return sum(full_size(p) * p.element_size() for p in trained if id(p) in self._of)

    def refresh(self) -> None:
        """Take over the parameters that train, as they are now."""
        self._copy(trained_only=True)

    def describe(self) -> str:
        """Say what the copy costs."""
        return (
            f"resident copy for generation: {_size(self.num_bytes)} on every rank, filled in "
            f"{self.seconds:.1f} s with at most {_size(self.peak_bytes)} gathered beside it; "
            f"{_size(self.refreshed_bytes)} refreshed a step"
        )

    @torch.no_grad()
    def _copy(self, *, trained_only: bool) -> None:
        wanted = (
            (name, parameter)
            for name, parameter in self._source.named_parameters()
            if id(parameter) in self._of and (parameter.requires_grad or not trained_only)
        )
        for part in in_parts(wanted, PART_BYTES):
            held = sum(full_size(p) * p.element_size() for _, p in part)
            self.peak_bytes = max(self.peak_bytes, held)
            with gathered([parameter for _, parameter in part]):
                for _, parameter in part:
                    self._of[id(parameter)].copy_(parameter)

    def _materialise(self, device: torch.device) -> None:
        """Give every tensor of the copy its memory; what the source ties stays tied."""
        parameters = dict(self._source.named_parameters(remove_duplicate=False))
        wanted = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        for name in wanted:
            if name not in parameters:
                raise ConfigError(
                    f"{name}: an adapter of this kind cannot be copied for generation under "
                    "ZeRO-3; use ZeRO-2 (accelerate_configs/zero2.yaml) or a LoRA adapter"
                )
            given = parameters[name]
            if id(given) not in self._of:
                whole = torch.empty(full_shape(given), dtype=given.dtype, device=device)
                self._of[id(given)] = nn.Parameter(whole, requires_grad=False)
            place, leaf = _place(self.model, name)
            place._parameters[leaf] = self._of[id(given)]
        buffers = dict(self._source.named_buffers(remove_duplicate=False))
        for name, _ in list(self.model.named_buffers(remove_duplicate=False)):
            place, leaf = _place(self.model, name)
            place._buffers[leaf] = buffers[name].detach().to(device, copy=True)


def _same_structure(source: Any) -> Any:
    """Build the modules of a prepared model again, adapters included, without memory."""
    causal_lm = unwrap(source)
    with torch.device("meta"):
        twin: Any = stock_class(causal_lm)(copy.deepcopy(causal_lm.config))
    if is_peft_model(source):
        from peft import get_peft_model

        for name in source.active_adapters:
            config = copy.copy(source.peft_config[name])
            if hasattr(config, "init_lora_weights"):
                config.init_lora_weights = False  # the weights come from the source
            if is_peft_model(twin):
                twin.add_adapter(name, config, low_cpu_mem_usage=True)
            else:
                twin = get_peft_model(twin, config, adapter_name=name, low_cpu_mem_usage=True)
        twin.base_model.set_adapter(list(source.active_adapters))
    prepare_model(twin, mount_layers=spec_of(source).mount_layers)
    return twin.requires_grad_(False).eval()


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Give the module that holds a tensor, and the tensor's name in it."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _size(num_bytes: int) -> str:
    """Write a size with the unit that suits it."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
