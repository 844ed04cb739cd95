"""What a model takes on one GPU, counted from its configuration: no weight is loaded.

The model is built without memory (torch's `meta` device), adapters included, so parameters are
those of a run by construction. Bytes of a packed row are counted from the widths that a layer's
backward pass needs; what a kernel keeps for itself is not, and neither is fragmentation.

    row(T) = T (layers · h · b + last norm) + max(T · widest layer, scored chunk · vocabulary · 16)

with checkpointing, where each layer keeps its input of width h and b bytes a number and is computed
again; without it every layer is kept. Where MLPs run in tiles (`mlp_tile_tokens`), what they keep
counts for one tile and not for the row; with `activation_offloading` the layers' inputs are bytes
of the host.

Measured against it: real peaks of a tiny dense model on a CPU, a fifth to a third below; four of an
H200 (Qwen3.5-4B shapes, LoRA r = 16): stock layers, 15.3 GiB at 8,192 tokens and 16.7 at 16,384,
packed rows, 18.7 GiB at 25,089 tokens and 40.3 at 75,734, where the count is 10 and 14 % above;
tests hold them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from octopus_trl.models import prepare_model, spec_of, unwrap
from octopus_trl.models.mlp_tiles import MLP_NAMES
from octopus_trl.models.spec import ModelSpec
from octopus_trl.train.lora import settle_targets

SCORED_CHUNK = 1024  # targets whose logits exist at once (maths/logps.py)
LOGIT_BYTES = 16  # of one logit in a backward pass: narrow, wide, its log-softmax, two gradients
NORM_BYTES = 8  # of one number that a norm keeps: its input and its normalised value in float32
STATE_CHUNK = 64  # rows of a chunk of the delta rule, whose products each head keeps


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes of one model and its adapter.

    Attributes:
        spec: layers and shapes.
        dtype: of the weights.
        frozen, trained: numbers of parameters.
        frozen_bytes, trained_bytes: of the modules as they are loaded.
        kept: bytes that a token of a packed row keeps from forward to backward pass.
        widest: bytes a token that the backward pass of the widest layer needs beside them.
        tile: bytes a token that the backward pass of an MLP's tile needs beside them.
        tile_tokens: of a tile, at most; 0 without tiles.
        offloaded: bytes a token of what is kept in host memory; 0 where nothing is.
    """

    spec: ModelSpec
    dtype: torch.dtype
    frozen: int
    trained: int
    frozen_bytes: int
    trained_bytes: int
    kept: int
    widest: int
    tile: int = 0
    tile_tokens: int = 0
    offloaded: int = 0

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        autocast: bool,
        checkpointing: bool,
        tile_tokens: int | None = None,
        offloading: bool = False,
    ) -> Footprint:
        """Count a prepared model, on whatever device it is.

        Args:
            autocast: products run in bfloat16.
            tile_tokens: of an MLP's tile; None where MLPs take rows whole.
            offloading: inputs of checkpointed layers wait in host memory.
        """
        parameters = list(model.parameters())
        trained = [p for p in parameters if p.requires_grad]
        causal_lm, spec = unwrap(model), spec_of(model)
        dtype = causal_lm.get_input_embeddings().weight.dtype
        narrow = 2 if autocast else dtype.itemsize
        tile = 0
        layers = [layer_bytes(layer, spec, narrow) for layer in causal_lm.model.layers]
        if tile_tokens is not None:
            parts = [mlp_bytes(layer, spec, narrow) for layer in causal_lm.model.layers]
            tile = max(saved + flying for saved, flying in parts)
            # Of a tiled MLP a layer keeps the input and the output; gradients of the mixer's
            # widest tensors fly when the MLP is done.
            layers = [
                (saved - inner + 2 * narrow * spec.hidden_size, _flying(layer, narrow, mlp=False))
                for layer, (saved, _), (inner, _) in zip(
                    causal_lm.model.layers, layers, parts, strict=True
                )
            ]
        stream = spec.hidden_size * dtype.itemsize
        kept = len(layers) * stream if checkpointing else sum(layer[0] for layer in layers)
        offloaded = kept if offloading else 0
        if offloading:
            kept = 2 * stream  # one layer's input at work, one on its way
        kept += NORM_BYTES * spec.hidden_size + stream  # the last norm, which no checkpoint covers
        moving = [saved + flying for saved, flying in layers]
        return cls(
            spec,
            dtype,
            sum(p.numel() for p in parameters) - sum(p.numel() for p in trained),
            sum(p.numel() for p in trained),
            sum(p.nbytes for p in parameters) - sum(p.nbytes for p in trained),
            sum(p.nbytes for p in trained),
            kept,
            max(moving) if checkpointing else max(flying for _, flying in layers),
            tile,
            tile_tokens or 0,
            offloaded,
        )

    @property
    def logit_bytes(self) -> int:
        """Bytes of the logits of one scored chunk, forward and backward."""
        return SCORED_CHUNK * self.spec.vocab_size * LOGIT_BYTES

    def row_bytes(self, tokens: int) -> int:
        """Bytes that a packed row of so many tokens takes at the peak of its backward pass."""
        tile = min(tokens, self.tile_tokens) * self.tile
        return tokens * self.kept + max(tokens * self.widest + tile, self.logit_bytes)

    def longest_row(self, num_bytes: int) -> int:
        """Give the most tokens of a row that `num_bytes` hold; 0 where not one."""
        beside_logits = (num_bytes - self.logit_bytes) // self.kept
        each, most = self.kept + self.widest, self.tile_tokens
        cut = (num_bytes - most * self.tile) // each  # of a row of more than a tile
        whole = cut if cut >= most else num_bytes // (each + self.tile)
        return max(0, min(beside_logits, whole))


def build(
    config: Any,
    dtype: torch.dtype,
    *,
    mount_layers: Any = "attention",
    peft_config: Any = None,
    autocast_adapter: bool = True,
) -> nn.Module:
    """Build a prepared causal LM without memory, with its adapter where there is one.

    Args:
        config: of a Hugging Face model; of one with several parts the text part counts.
        autocast_adapter: whether PEFT keeps the adapter of narrow weights in float32; TRL switches
            that off under ZeRO-3.
    Raises:
        ConfigError: a class without mixers, a mount set that does not fit, or an adapter's name
            that matches nothing.
    """
    config = copy.deepcopy(getattr(config, "text_config", None) or config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    prepare_model(model, mount_layers=mount_layers)
    if peft_config is None:
        return model
    adapter = settle_targets(model, copy.deepcopy(peft_config))
    return get_peft_model(
        model, adapter, autocast_adapter_dtype=autocast_adapter, low_cpu_mem_usage=True
    )


def layer_bytes(layer: nn.Module, spec: ModelSpec, narrow: int) -> tuple[int, int]:
    """Count what one decoder layer keeps for its backward pass, and what that needs beside it.

    Inputs and outputs of all products, the product inside the MLP, norms in float32, and of the
    mixer its heads' norms and gates, for a recurrent one the convolution and its chunks' products;
    then the gradients of the MLP's widest three tensors and one of them in float32.

    Args:
        narrow: bytes of a number in a product.
    Returns:
        Bytes a token, each.
    """
    products = _products(layer)
    hidden = spec.hidden_size
    mixer = [module for name, module in products if not _in_mlp(name)]
    inner = max((m.in_features for m in mixer if m.out_features == hidden), default=hidden)
    widest = max(max(m.in_features, m.out_features) for _, m in products)
    saved = narrow * sum(module.in_features + module.out_features for _, module in products)
    saved += narrow * widest + 2 * NORM_BYTES * hidden
    saved += (NORM_BYTES + 2 * narrow) * inner
    if any(name.endswith("k_proj") for name, _ in products):
        saved += NORM_BYTES * spec.num_kv_heads * spec.head_dim
    elif spec.tail_shape:
        saved += narrow * (spec.tail_shape[0] + STATE_CHUNK * spec.state_shape[0])
    return saved, _flying(layer, narrow)


def mlp_bytes(layer: nn.Module, spec: ModelSpec, narrow: int) -> tuple[int, int]:
    """Count the part of `layer_bytes` that the MLP has, the norm before it included.

    Returns:
        Bytes a token, each.
    """
    products = [module for name, module in _products(layer) if _in_mlp(name)]
    widest = max((max(m.in_features, m.out_features) for m in products), default=0)
    widths = sum(m.in_features + m.out_features for m in products)
    saved = narrow * (widths + widest) + NORM_BYTES * spec.hidden_size
    return saved, _flying(layer, narrow, mlp=True)


def _flying(layer: nn.Module, narrow: int, *, mlp: bool | None = None) -> int:
    """Count gradients that exist at once: of the widest three tensors, and one in float32.

    Args:
        mlp: of the MLP alone, of the mixer alone, or of all products.
    """
    widths = (
        max(module.in_features, module.out_features)
        for name, module in _products(layer)
        if mlp is None or _in_mlp(name) == mlp
    )
    widest = max(widths, default=0)  # experts are one tensor, no products
    return widest * (3 * narrow + 4)


def _products(layer: nn.Module) -> list[tuple[str, nn.Linear]]:
    """List a layer's linear modules by their names without an adapter."""
    return [
        (name.removesuffix(".base_layer"), module)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    ]


def _in_mlp(name: str) -> bool:
    return any(part in MLP_NAMES for part in name.split("."))
