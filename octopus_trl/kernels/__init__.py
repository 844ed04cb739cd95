"""Fast versions of functions of `maths`: same names, same signatures, chosen per device.

`select` alone decides. A CPU tensor always takes the reference. On CUDA an operation that has a
kernel takes it, and a missing package is an error that says what to install, because a silent
fallback would be slower by orders of magnitude. ``OCTOPUS_KERNELS=maths`` runs everything on the
references, for debugging and for measuring parity.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from octopus_trl.errors import ConfigError

# operation -> module of that name in `maths`, and whether `kernels` has a fast version of it
_OPERATIONS = {
    "causal_conv": ("conv", True),
    "causal_conv_step": ("conv", False),
    "gated_delta_rule": ("delta_rule", True),
    "gated_delta_step": ("delta_rule", True),
    "ssd": ("ssd", False),
    "ssd_step": ("ssd", False),
    "dag_attention": ("attention", True),
    "dag_decode_attention": ("decode_attention", True),
    "append_slots": ("decode_attention", True),
    "masked_attention": ("attention", False),
    "merge_attention": ("attention", False),
    "token_logps": ("logps", False),
    "write_slots": ("paging", False),
    "gather_slots": ("paging", False),
    "sample": ("sampling", True),
    "gated_delta_pool_step": ("delta_pool", True),
    "delta_gates": ("delta_pool", True),
    "rms_norm": ("norms", True),
    "gated_rms_norm": ("norms", True),
    "swiglu": ("gates", True),
    "sigmoid_gate": ("gates", True),
    "rotate_and_write": ("rotary", True),
    "rotary_tables": ("rotary", False),
    "lora_shrink": ("lora", True),
    "lora_expand": ("lora", True),
    "skinny_linear": ("linear", True),
    "gated_linear": ("linear", True),
    "packed_rms_norm": ("packed_layers", True),
    "packed_unit": ("packed_layers", True),
    "packed_gated_norm": ("packed_layers", True),
    "packed_swiglu": ("packed_layers", True),
}


def select(op: str, device: torch.device | str) -> Callable[..., Any]:
    """Give the implementation of an operation for tensors on a device.

    Args:
        op: public function name of a module of `maths`, such as "dag_attention".
        device: where the tensors are.

    Raises:
        ConfigError: the operation is unknown, OCTOPUS_KERNELS has an unknown value, or a package
            that the kernel needs is missing.
    """
    if op not in _OPERATIONS:
        raise ConfigError(f"op is {op!r}, must be one of {sorted(_OPERATIONS)}")
    setting = os.environ.get("OCTOPUS_KERNELS", "auto")
    if setting not in ("auto", "maths"):
        raise ConfigError(
            f"OCTOPUS_KERNELS is {setting!r}, must be 'auto' or 'maths'; unset it for the default"
        )
    module, has_kernel = _OPERATIONS[op]
    fast = has_kernel and setting == "auto" and torch.device(device).type == "cuda"
    package = "kernels" if fast else "maths"
    return getattr(import_module(f"octopus_trl.{package}.{module}"), op)
