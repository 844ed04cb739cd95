"""Qwen3.5 (Gated DeltaNet hybrid), dense Qwen3 and Qwen2."""

from __future__ import annotations

from typing import Any

from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5Attention,
    Qwen3_5ForCausalLM,
    Qwen3_5GatedDeltaNet,
)

from octopus_trl.models.backbone import Backbone, RecurrentSizes
from octopus_trl.models.gated_delta import OctopusGatedDeltaNet


def delta_sizes(config: Any) -> RecurrentSizes:
    """Read the state [HV, K, V] and the tail [C, W - 1] of a Qwen3.5 config."""
    key_dim = config.linear_num_key_heads * config.linear_key_head_dim
    value_dim = config.linear_num_value_heads * config.linear_value_head_dim
    return RecurrentSizes(
        (
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        ),
        (2 * key_dim + value_dim, config.linear_conv_kernel_dim - 1),
    )


QWEN3_5 = Backbone(
    causal_lm=Qwen3_5ForCausalLM,
    attention=Qwen3_5Attention,
    mixers={Qwen3_5GatedDeltaNet: OctopusGatedDeltaNet},
    recurrent_sizes=delta_sizes,
)
QWEN3 = Backbone(causal_lm=Qwen3ForCausalLM, attention=Qwen3Attention)
QWEN2 = Backbone(causal_lm=Qwen2ForCausalLM, attention=Qwen2Attention)
