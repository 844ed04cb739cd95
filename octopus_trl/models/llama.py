"""Dense Llama and what shares its class (SmolLM2)."""

from __future__ import annotations

from transformers.models.llama.modeling_llama import LlamaAttention, LlamaForCausalLM

from octopus_trl.models.backbone import Backbone

LLAMA = Backbone(causal_lm=LlamaForCausalLM, attention=LlamaAttention)
