"""Tiny models and random episodes that every package's tests share.

Weights are drawn wider than the libraries' default, so that a wrong key, state or position moves a
log-probability by far more than a tolerance. Recurrent layers decay slowly (A near 0.05): a fast
random decay would forget what leaked.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from octopus_trl.trace import Segment, ThreadRecord, Trace

VOCAB = 97
LENGTHS = (1, 1, 2, 3, 4, 5, 7, 9, 12, 17, 63, 64, 65)
SHORT_LENGTHS = (1, 1, 2, 3, 4, 5, 7)
LAST_NORMS = ("model.norm.weight", "model.final_layernorm.weight")


def tiny_hybrid(seed: int = 0, layers: int = 4, tie: bool = False, **overrides: Any) -> Any:
    """Build a Qwen3.5-shaped hybrid in eval mode, float32: three GDN layers, then one attention.

    Two value heads share each key head, two query heads each KV head; a quarter of the head dim
    does not rotate.
    """
    config = Qwen3_5TextConfig(**{**_attention(layers, tie), **_delta(), **overrides})
    return _filled(Qwen3_5ForCausalLM, config, seed)


def tiny_dense(seed: int = 0, layers: int = 4, tie: bool = False, **overrides: Any) -> Any:
    """Build a Qwen3-shaped dense model in eval mode, float32: attention in every layer."""
    config = Qwen3Config(**{**_attention(layers, tie), "head_dim": 16, **overrides})
    return _filled(Qwen3ForCausalLM, config, seed)


def tiny_qwen2(seed: int = 0, layers: int = 4, tie: bool = False, **overrides: Any) -> Any:
    """Build a Qwen2-shaped dense model in eval mode, float32: biases on queries, keys, values."""
    return _filled(Qwen2ForCausalLM, Qwen2Config(**{**_attention(layers, tie), **overrides}), seed)


def tiny_llama(seed: int = 0, layers: int = 4, tie: bool = False, **overrides: Any) -> Any:
    """Build a Llama-shaped dense model in eval mode, float32: no norms of queries and keys."""
    return _filled(LlamaForCausalLM, LlamaConfig(**{**_attention(layers, tie), **overrides}), seed)


def tiny_hybrid_moe(seed: int = 0, layers: int = 4, tie: bool = False, **overrides: Any) -> Any:
    """Build a Qwen3.5-MoE-shaped hybrid in eval mode, float32: `tiny_hybrid` and experts."""
    config = Qwen3_5MoeTextConfig(
        **{
            **_attention(layers, tie),
            **_delta(),
            **_EXPERTS,
            "shared_expert_intermediate_size": 32,
            **overrides,
        }
    )
    return _filled(Qwen3_5MoeForCausalLM, config, seed)


def tiny_dense_moe(seed: int = 0, layers: int = 4, tie: bool = False, **overrides: Any) -> Any:
    """Build a Qwen3-MoE-shaped model in eval mode, float32: `tiny_dense` and experts."""
    config = Qwen3MoeConfig(
        **{
            **_attention(layers, tie),
            "head_dim": 16,
            **_EXPERTS,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            **overrides,
        }
    )
    return _filled(Qwen3MoeForCausalLM, config, seed)


def tiny_bamba(seed: int = 0, layers: int = 4, tie: bool = False, **overrides: Any) -> Any:
    """Build a Bamba-shaped hybrid in eval mode, float32: Mamba-2 and attention in turns.

    Three heads share each state group, two query heads each KV head.
    """
    config = BambaConfig(
        **{
            **_mamba2(layers, tie),
            "attn_layer_indices": list(range(1, layers, 2)),
            "num_logits_to_keep": 0,
            **overrides,
        }
    )
    return _filled(BambaForCausalLM, config, seed)


def tiny_granite(seed: int = 0, layers: int = 4, tie: bool = False, **overrides: Any) -> Any:
    """Build a Granite-4-shaped hybrid in eval mode, float32: no positions, scaled residuals."""
    config = GraniteMoeHybridConfig(
        **{
            **_mamba2(layers, tie),
            "layer_types": ["linear_attention", "full_attention"] * (layers // 2),
            "shared_intermediate_size": 64,
            "num_local_experts": 0,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.5,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.7,
            **overrides,
        }
    )
    return _filled(GraniteMoeHybridForCausalLM, config, seed)


_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _attention(layers: int, tie: bool) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": tie,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }


def _delta() -> dict[str, Any]:
    return {
        "head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.75,
            "mrope_section": [2, 2, 2],
        },
    }


def _mamba2(layers: int, tie: bool) -> dict[str, Any]:
    return {
        **_attention(layers, tie),
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 16,
    }


def with_lora(model: nn.Module, seed: int = 0, rank: int = 3) -> Any:
    """Wrap a model in PEFT adapters on every inner projection, both factors non-zero."""
    from peft import LoraConfig, get_peft_model

    names = {name.rsplit(".", 1)[-1] for name, child in model.named_modules() if _is_linear(child)}
    with warnings.catch_warnings():
        # PEFT scales the rank of fused experts by a pattern, then misses parameters when it checks.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")
        wrapped = get_peft_model(
            model,
            LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=sorted(names - {"lm_head"})),
        )
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(wrapped.named_parameters()):
            if "lora_" in name:
                parameter.normal_(0.0, 0.1, generator=draws)
    return wrapped.eval()


def random_trace(
    seed: int,
    *,
    steps: int = 14,
    roots: int = 2,
    mounts: bool = True,
    lengths: Sequence[int] = LENGTHS,
    vocab_size: int = VOCAB,
    prompt: Sequence[int] | None = None,
    logps: bool = False,
    max_tokens: int = 420,
) -> Trace:
    """Draw an episode: several roots, nested forks, branches left by rewinds, a mesh of mounts.

    Args:
        steps: segments after the roots.
        roots: threads without a parent; each gets a prompt of its own.
        prompt: tokens of the first root's prompt (a group shares it).
        logps: give actions made-up sampling log-probs.
        max_tokens: lengths shrink to 1..3 beyond it.
    """
    draw = random.Random(seed)
    episode = _Episode(draw, lengths, vocab_size, mounts, max_tokens)
    for index in range(roots):
        thread = episode.new_thread(None)
        given = list(prompt) if index == 0 and prompt is not None else None
        episode.append(thread, None, "prompt", tokens=given)
    for _ in range(steps):
        episode.step()
    threads = [
        ThreadRecord(
            thread,
            parent,
            task="" if parent is None else f"task {thread}",
            status=draw.choice(["running", "committed", "cut"]),
            head=episode.heads[thread],
        )
        for thread, parent in enumerate(episode.thread_parents)
    ]
    if logps:
        for segment in episode.segments:
            if segment.kind == "action":
                segment.logps = [-draw.uniform(0.01, 5.0) for _ in segment.tokens]
    trace = Trace(
        episode_id=f"episode-{seed}",
        prompt_id=f"prompt-{seed}",
        reward=float(draw.randint(0, 1)),
        threads=threads,
        segments=episode.segments,
    )
    return trace.check(vocab_size=vocab_size)


class _Episode:
    """Plays the moves of an episode at random, by the rules of DESIGN §2."""

    def __init__(
        self,
        draw: random.Random,
        lengths: Sequence[int],
        vocab_size: int,
        mounts: bool,
        max_tokens: int,
    ) -> None:
        self.draw, self.lengths, self.vocab_size = draw, lengths, vocab_size
        self.with_mounts, self.max_tokens = mounts, max_tokens
        self.segments: list[Segment] = []
        self.thread_parents: list[int | None] = []
        self.heads: list[int | None] = []
        self.fork_points: list[int | None] = []
        self.seen: list[set[int]] = []  # for each segment: itself, ancestors and mounted ids
        self.highest: list[int] = []  # for each segment: largest end over its mounted ids

    def new_thread(self, parent: int | None) -> int:
        self.thread_parents.append(parent)
        self.fork_points.append(None if parent is None else self.heads[parent])
        self.heads.append(self.fork_points[-1])
        return len(self.heads) - 1

    def step(self) -> None:
        thread = self.draw.randrange(len(self.heads))
        move = self.draw.random()
        if move < 0.25:
            child = self.new_thread(thread)
            self.append(child, self.heads[child], "tool", self.pick(self.heads[child], 0.3))
        elif move < 0.45:
            live = self.live(thread)
            if live:
                back = self.segments[self.draw.choice(live)].parent
                if back is not None:
                    self.heads[thread] = back
            self.append(thread, self.heads[thread], "tool", self.pick(self.heads[thread], 0.4))
        elif move < 0.75:
            self.append(thread, self.heads[thread], "tool", self.pick(self.heads[thread], 0.8))
        else:
            self.append(thread, self.heads[thread], "action")

    def live(self, thread: int) -> list[int]:
        """Segments of a thread's live chain since its fork."""
        chain: list[int] = []
        node = self.heads[thread]
        while node is not None and node != self.fork_points[thread]:
            chain.append(node)
            node = self.segments[node].parent
        return chain[::-1]

    def pick(self, parent: int | None, chance: float) -> list[int]:
        """Choose what becomes readable: live spans of other threads, or any segments at all."""
        if not self.with_mounts or self.draw.random() > chance:
            return []
        if self.draw.random() < 0.6:
            wanted: set[int] = set()
            for source in self.draw.sample(range(len(self.heads)), min(2, len(self.heads))):
                wanted |= set(self.live(source))
        else:
            count = min(3, len(self.segments))
            wanted = set(self.draw.sample(range(len(self.segments)), count))
        known = set() if parent is None else self.seen[parent]
        return sorted(wanted - known)

    def append(
        self,
        thread: int,
        parent: int | None,
        kind: str,
        mounts: Sequence[int] = (),
        tokens: list[int] | None = None,
    ) -> None:
        if tokens is None:
            used = sum(len(segment.tokens) for segment in self.segments)
            length = self.draw.choice(self.lengths)
            if used + length > self.max_tokens:
                length = self.draw.randint(1, 3)
            tokens = [self.draw.randrange(self.vocab_size) for _ in range(length)]
        highest = 0 if parent is None else self.highest[parent]
        highest = max([highest, *(self.segments[mount].end for mount in mounts)])
        start = highest if parent is None else max(self.segments[parent].end, highest)
        index = len(self.segments)
        self.segments.append(
            Segment(index, thread, parent, kind, tokens, list(mounts), start, time_s=0.5 * index)
        )
        self.seen.append({index, *mounts, *(() if parent is None else self.seen[parent])})
        self.highest.append(highest)
        self.heads[thread] = index


def _filled(cls: Any, config: Any, seed: int) -> Any:
    model = cls(config).eval().to(torch.float32)
    draws = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, std: float) -> None:
        tensor.normal_(0.0, std, generator=draws)

    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("A_log"):
                parameter.uniform_(0.03, 0.07, generator=draws).log_()
            elif name.endswith("dt_bias"):
                normal(parameter, 0.5)
            elif "norm" in name:
                if name in LAST_NORMS and config.tie_word_embeddings:
                    parameter.sub_(0.8)  # wide embeddings would make the logits too sharp
                parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.1, generator=draws))
            elif "conv1d" in name:
                normal(parameter, 0.5)
            elif "embed_tokens" in name:
                normal(parameter, 0.8)
            elif "lm_head" in name:
                normal(parameter, 0.18)
            else:
                normal(parameter, 0.6 * parameter.shape[-1] ** -0.5)
    return model


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)
