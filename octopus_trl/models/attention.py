"""Attention mixer: the stock module, with its attention function replaced inside a pass of ours.

transformers looks the attention function up in `module.config`. Each attention module gets its own
copy of the config that names `octopus`; outside a pass of ours the function hands over to whatever
the model's own config names, so a plain forward is unchanged.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

NAME = "octopus"


def octopus_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    octopus: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend within the pass `octopus`, or as the model's own config says where there is none.

    Args:
        query, key, value: [1, heads, T, head_dim], rotated.
    Returns:
        [1, T, heads, head_dim] and no weights (inside a pass).
    """
    if octopus is None:
        config: Any = module.config.octopus_plain  # type: ignore[union-attr]
        eager = sys.modules[type(module).__module__].eager_attention_forward
        plain = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
        return plain(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )
    # Under autocast the rotation leaves q and k in float32 while v is already narrow.
    q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))
    out = octopus.attend(
        module.layer_idx,
        q,
        k,
        v,
        scaling,
    )
    return out.unsqueeze(0), None


def install(module: nn.Module, config: Any) -> None:
    """Route an attention module through `octopus_attention`.

    Args:
        config: the model's config, consulted live for a plain forward.
    """
    own = copy.copy(config)
    own._attn_implementation = NAME
    own.octopus_plain = config
    module.config = own


# On import, so that a model that was pickled in one process runs in another.
AttentionInterface.register(NAME, octopus_attention)
