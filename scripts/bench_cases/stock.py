"""What a user would run instead: transformers' own generation, and its cache."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from .clock import sync
from .setting import Setting


class StepClock(StoppingCriteria):
    """Notes the time of each step of `generate` and stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        sync()
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.no_grad()
def generate_rate(setting: Setting, sequences: int) -> tuple[float | None, str]:
    """Tokens/s of `generate` with its cache in steady state, the prompt's pass left out.

    Returns:
        The rate, or None and why it failed, so that our own figure is not lost with it.
    """
    model, sizes = setting.load(), setting.sizes
    clock = StepClock()
    try:
        model.generate(
            **_prompts(setting, sequences),
            generation_config=_sampling(sizes.baseline_steps + 1),
            stopping_criteria=StoppingCriteriaList([clock]),
        )
    except Exception as error:  # noqa: BLE001 any reason is what the line should say
        return None, f"{type(error).__name__}: {error}"
    steps = len(clock.times) - 1
    return sequences * steps / (clock.times[-1] - clock.times[0]), ""


def continuous_rate(setting: Setting, sequences: int) -> tuple[float | None, str]:
    """Tokens/s of continuous batching over the same prompts, their prefill included.

    Returns:
        The rate, or None and the reason why this model does not run there.
    """
    model, sizes = setting.load(), setting.sizes
    implementation = model.config._attn_implementation
    rows = _prompts(setting, sequences)["input_ids"].tolist()
    try:
        sync()
        begin = time.perf_counter()
        outputs = model.generate_batch(
            inputs=rows, generation_config=_sampling(sizes.baseline_steps + 1)
        )
        sync()
        seconds = time.perf_counter() - begin
    except Exception as error:  # noqa: BLE001 any reason is what the line should say
        return None, f"{type(error).__name__}: {error}"
    finally:
        model.set_attn_implementation(implementation)
    drawn = sum(len(output.generated_tokens) for output in outputs.values())
    if not drawn:
        return None, "it drew no token"
    return drawn / seconds, ""


def filled_cache(setting: Setting, tokens: int) -> DynamicCache:
    """Make the cache that transformers would hold after `tokens` tokens of one sequence."""
    model, shapes = setting.load(), setting.shapes
    config = model.config
    cache = DynamicCache(config=config)
    channels = shapes.tail_elements // (config.linear_conv_kernel_dim - 1)

    def random(*shape: int, dtype: torch.dtype = model.dtype) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=model.device)

    for layer, kind in enumerate(config.layer_types):
        if kind == "full_attention":
            heads = (1, shapes.num_kv_heads, tokens, shapes.head_dim)
            cache.update(random(*heads), random(*heads), layer)
        else:
            state = (
                config.linear_num_value_heads,
                config.linear_key_head_dim,
                config.linear_value_head_dim,
            )
            cache.update_conv_state(random(1, channels, config.linear_conv_kernel_dim), layer)
            cache.update_recurrent_state(random(1, *state, dtype=torch.float32), layer)
    return cache


def _prompts(setting: Setting, sequences: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(21)
    shape = (sequences, setting.sizes.prompt)
    ids = torch.randint(1, setting.load().config.vocab_size, shape, generator=draws)
    ids = ids.to(setting.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _sampling(tokens: int) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, pad_token_id=0
    )
