"""Models to measure on: the shipped policy's shape, and Qwen3.5-4B's with random weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from octopus_trl import prepare_model
from octopus_trl.models.decay import initialise_decay

from .clock import timed

ROOT = Path(__file__).parents[2]
ENTROPY = 1.0  # nats: what sampling from a trained model is like, where uniform logits give 12.4
PROBE = 256  # random tokens that the entropy is measured on

# DESIGN §8; what it leaves open (rotary embedding, tied output layer) as in the released model.
QWEN35_4B: dict[str, Any] = {
    "vocab_size": 248_320,
    "hidden_size": 2_560,
    "intermediate_size": 9_216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}


def build(name: str, device: torch.device) -> tuple[Any, str]:
    """Make a prepared model in eval mode with random weights on a device.

    Returns:
        The model, and a line that says how long it took and the entropy of its draws. bfloat16 on
        a GPU; float32 on a CPU, where bfloat16 is slow and results are compared exactly.
    """
    config = Qwen3_5TextConfig(**settings(name))
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    with timed() as seconds:
        model = random_model(config, device, dtype)
        entropy = scale_entropy(model)
        prepare_model(model)
    size = sum(parameter.numel() for parameter in model.parameters())
    text = (
        f"{name}: {size / 1e9:.3f} B parameters, {str(dtype).removeprefix('torch.')} on {device}, "
        f"made in {seconds.value:.1f} s, mean entropy {entropy:.2f} nats"
    )
    return model, text


def settings(name: str) -> dict[str, Any]:
    """Give a model's config fields."""
    if name == "qwen3.5-4b":
        return QWEN35_4B
    fields = json.loads((ROOT / "recipes/tiny-hybrid/model.json").read_text(encoding="utf-8"))
    fields.pop("model_type")
    return fields


def random_model(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Make a model right on its device, its recurrent layers initialised to remember."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = Qwen3_5ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    initialise_decay(model, seed=0)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def scale_entropy(model: Any, target: float = ENTROPY) -> float:
    """Scale the logits so that the next token's mean entropy is `target` nats; returns it measured.

    The factor goes into the last norm (y = x/rms(x) · (1 + w)), because the output layer may be
    tied to the embedding. Entropy falls as the factor grows, so bisection finds it.
    """
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (1, PROBE), generator=draws).to(model.device)
    norm = model.model.norm
    norm.weight.zero_()
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
    logits = model.lm_head(hidden).float()
    low, high = -10.0, 10.0
    for _ in range(30):
        middle = (low + high) / 2
        if mean_entropy(logits * math.exp(middle)) > target:
            low = middle
        else:
            high = middle
    norm.weight.fill_(math.exp(low) - 1)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
    return mean_entropy(model.lm_head(hidden).float())


def mean_entropy(logits: Tensor) -> float:
    """Mean over rows of −Σ p ln p; logits [R, V] float32."""
    logps = logits.log_softmax(-1)
    return float(-(logps.exp() * logps).sum(-1).mean())
