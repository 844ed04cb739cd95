"""Which projections an adapter reaches: every asked name must match, and the set is shown."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from torch import nn

from octopus_trl.errors import ConfigError
from octopus_trl.models import unwrap
from octopus_trl.train.zero import full_size

# The ten projections of the authors' adapter: attention, gated delta net, MLP (DESIGN §3).
PROJECTIONS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "in_proj_qkv",
    "in_proj_z",
    "out_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


def settle_targets(model: nn.Module, peft_config: Any) -> Any:
    """Fill in the targets of an adapter where none are named, and check those that are.

    Returns:
        The same config; without targets it gets those of `PROJECTIONS` that the model has.
    Raises:
        ConfigError: a name matches no module of the model, says which names there are; a rank or
            a dropout out of range.
    """
    rank, dropout = getattr(peft_config, "r", 1), getattr(peft_config, "lora_dropout", 0.0)
    if rank < 1:
        raise ConfigError(f"lora_r={rank}: must be at least 1, the rank of the adapter")
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(f"lora_dropout={dropout}: must lie in [0, 1); 0 switches it off")
    linear = linear_names(model)
    if not hasattr(peft_config, "target_modules"):
        return peft_config
    targets = peft_config.target_modules
    if targets is None:
        last = {name.rsplit(".", 1)[-1] for name in linear}
        peft_config.target_modules = {name for name in PROJECTIONS if name in last}
        return peft_config
    if targets == "all-linear":
        return peft_config
    modules = [name for name, _ in unwrap(model).named_modules()]
    if isinstance(targets, str):
        if not any(re.fullmatch(targets, name) for name in modules):
            raise _nothing_matches(targets, linear)
        return peft_config
    for target in sorted(targets):
        if not any(name == target or name.endswith(f".{target}") for name in modules):
            raise _nothing_matches(target, linear)
    return peft_config


def linear_names(model: nn.Module) -> list[str]:
    """List the linear modules of a causal LM, the output layer apart."""
    causal_lm = unwrap(model)
    head = causal_lm.get_output_embeddings()
    return [
        name
        for name, module in causal_lm.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]


def describe_adapter(model: nn.Module) -> str:
    """Say which modules carry an adapter and how many parameters train."""
    names = Counter(
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if hasattr(module, "lora_A") and name
    )
    trained = sum(full_size(p) for p in model.parameters() if p.requires_grad)
    total = sum(full_size(p) for p in model.parameters())
    share = f"{trained:,} of {total:,} parameters train"
    if not names:
        return share
    return f"adapter on {', '.join(f'{n} x{c}' for n, c in sorted(names.items()))}; {share}"


def _nothing_matches(target: str, linear: list[str]) -> ConfigError:
    last = sorted({name.rsplit(".", 1)[-1] for name in linear})
    return ConfigError(
        f"lora_target_modules: {target!r} matches no module of this model; its projections are "
        f"{', '.join(last)}"
    )
