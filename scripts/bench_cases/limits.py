"""Bytes and FLOPs that work cannot do without, and the time they take at best (DESIGN §8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .clock import median_s

H200_BYTES_S = 4.8e12  # the roofline's, by the vendor; a copy reaches 4.3e12
H200_ATTENTION_FLOPS = 6.0e14  # of attention, DESIGN §8
H200_FLOPS = 9.89e14  # dense bf16, by the vendor: the denominator of MFU
COPY_BYTES = 1 << 28
PRODUCT = 1024  # rows and columns of the matrix product that measures another device


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device can do: bytes/s of memory, FLOP/s of attention and of matrix products."""

    bytes_s: float
    attention_flops: float
    flops: float

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> Rates:
        """Give DESIGN §8's on an H200 in bf16; elsewhere measure a copy and a matrix product."""
        if is_h200(device) and dtype == torch.bfloat16:
            return H200
        source = torch.ones(COPY_BYTES // 8, device=device)
        target = torch.empty_like(source)
        copied = 2 * source.numel() * source.itemsize
        left = torch.randn(PRODUCT, PRODUCT, device=device).to(dtype)
        flops = 2 * PRODUCT**3 / median_s(lambda: left @ left, repeats=5)
        return cls(copied / median_s(lambda: target.copy_(source), repeats=5), flops, flops)


H200 = Rates(H200_BYTES_S, H200_ATTENTION_FLOPS, H200_FLOPS)


def is_h200(device: torch.device) -> bool:
    """Whether a device is an H200."""
    return device.type == "cuda" and "H200" in torch.cuda.get_device_name(device)


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of a hybrid that bytes and FLOPs follow from.

    Attributes:
        weight_bytes: read by one decode pass; a tied embedding counts once, as the output layer,
            an untied one not at all.
        product_flops: FLOPs a token of all linear layers but the output layer.
        num_attention, num_recurrent: layers.
        state_elements: of one recurrent layer's state, float32.
        tail_elements: of one recurrent layer's convolution tail, in the model's dtype.
        itemsize: bytes of an element of weights, keys and values.
    """

    weight_bytes: int
    product_flops: int
    num_attention: int
    num_recurrent: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    state_elements: int
    tail_elements: int
    itemsize: int

    @classmethod
    def of(cls, model: Any) -> Shapes:
        """Read them from a Hugging Face Qwen3.5 causal LM."""
        config = model.config
        embedding = model.get_input_embeddings().weight
        weights = sum(parameter.numel() for parameter in model.parameters())
        tied = model.get_output_embeddings().weight is embedding
        channels = (
            2 * config.linear_num_key_heads * config.linear_key_head_dim
            + config.linear_num_value_heads * config.linear_value_head_dim
        )
        kinds = list(config.layer_types)
        products = sum(
            module.weight.numel()
            for module in model.model.modules()
            if isinstance(module, torch.nn.Linear)
        )
        return cls(
            weight_bytes=(weights if tied else weights - embedding.numel()) * embedding.itemsize,
            product_flops=2 * products,
            num_attention=kinds.count("full_attention"),
            num_recurrent=kinds.count("linear_attention"),
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            state_elements=config.linear_num_value_heads
            * config.linear_key_head_dim
            * config.linear_value_head_dim,
            tail_elements=channels * (config.linear_conv_kernel_dim - 1),
            itemsize=embedding.itemsize,
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        return 2 * self.num_attention * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of one thread's recurrent states and convolution tails."""
        return self.num_recurrent * (4 * self.state_elements + self.itemsize * self.tail_elements)

    @property
    def seen_flops(self) -> int:
        """Attention FLOPs for each token that a token sees: q·k and p·v in every layer."""
        return 4 * self.num_attention * self.num_heads * self.head_dim

    def prefill_flops(self, tokens: int, context: int) -> float:
        """FLOPs of `tokens` that follow `context` tokens of their chain, without the output layer.

        Linear layers 2 a weight; attention 4·H·D a seen token, causal; delta rule 6 a state element
        (decay and read k·S, write k⊗v, read q·S).
        """
        seen = tokens * context + tokens * (tokens + 1) / 2
        recurrent = 6 * self.num_recurrent * self.state_elements
        return tokens * (self.product_flops + recurrent) + seen * self.seen_flops

    def decode_s(self, threads: int, *, shared: int, own: int, rates: Rates) -> float:
        """Least seconds of one decode step (DESIGN §8).

        Weights once + the larger of attention's bytes (shared keys and values once, own ones of
        each thread) and its FLOPs + each thread's state read and written.
        """
        kv_bytes = (shared + threads * own) * self.kv_bytes
        flops = threads * (shared + own) * self.seen_flops
        attention_s = max(kv_bytes / rates.bytes_s, flops / rates.attention_flops)
        rest = self.weight_bytes + 2 * threads * self.state_bytes
        return rest / rates.bytes_s + attention_s
