"""Qwen with routed experts: the Qwen3.5-MoE hybrid and dense Qwen3-MoE.

Experts work token by token, so the stock blocks serve every pass. Which rows share an expert's
product depends on the batch, and so may the last bit of a sum; with transformers'
`experts_implementation="batched_mm"` each token is taken alone. Where two experts score alike,
rounding may pick the other one in another pass. Balance losses over router logits are no part of
a pass.
"""

from __future__ import annotations

from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeAttention,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeGatedDeltaNet,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, Qwen3MoeForCausalLM

from octopus_trl.models.backbone import Backbone
from octopus_trl.models.gated_delta import GatedDeltaPass
from octopus_trl.models.qwen import delta_sizes


class OctopusMoeGatedDeltaNet(GatedDeltaPass, Qwen3_5MoeGatedDeltaNet):
    """Qwen3.5-MoE's mixer inside a pass of ours."""


QWEN3_5_MOE = Backbone(
    causal_lm=Qwen3_5MoeForCausalLM,
    attention=Qwen3_5MoeAttention,
    mixers={Qwen3_5MoeGatedDeltaNet: OctopusMoeGatedDeltaNet},
    recurrent_sizes=delta_sizes,
)
QWEN3_MOE = Backbone(causal_lm=Qwen3MoeForCausalLM, attention=Qwen3MoeAttention)
