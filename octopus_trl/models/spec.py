"""What an engine or a packer must know of a Hugging Face causal LM: layer kinds and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octopus_trl.errors import ConfigError
from octopus_trl.models.backbone import RecurrentSizes

LayerKind = Literal["attention", "recurrent"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of one causal LM, and the layers that mounts reach.

    Attributes:
        layer_kinds: "attention" or "recurrent" for each layer.
        mount_layers: attention layers that see mounted segments, ascending.
        num_heads, num_kv_heads, head_dim: attention, equal in every attention layer.
        state_shape: of a recurrent state (float32): [HV, K, V] for Gated DeltaNet, [H, P, S] for
            Mamba-2, empty for a dense model.
        tail_shape: [C, W - 1] of a convolution tail (model dtype), empty for a dense model.
        hidden_size, vocab_size: widths of the residual stream and of the output layer.
    """

    layer_kinds: tuple[LayerKind, ...]
    mount_layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    state_shape: tuple[int, ...]
    tail_shape: tuple[int, ...]
    hidden_size: int
    vocab_size: int

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the attention layers, ascending."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "attention")

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Indices of the recurrent layers, ascending."""
        return tuple(i for i, kind in enumerate(self.layer_kinds) if kind == "recurrent")

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers are recurrent."""
        return "recurrent" in self.layer_kinds


def read_spec(
    config: Any, mount_layers: str | Sequence[int], sizes: Callable[[Any], RecurrentSizes]
) -> ModelSpec:
    """Read the sizes of a text config and settle the mount set.

    Args:
        config: of a supported class.
        sizes: reads the shapes of a recurrent layer (see `Backbone`).
        mount_layers: "attention" (all full-attention layers of a hybrid) or layer indices.
    Raises:
        ConfigError: a layer kind is unknown, or the mount set does not fit the layers.
    """
    kinds = _layer_kinds(config)
    hybrid = "recurrent" in kinds
    carried = sizes(config) if hybrid else RecurrentSizes((), ())
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelSpec(
        layer_kinds=tuple(kinds),
        mount_layers=_mount_set(mount_layers, attention_layers(config), hybrid, len(kinds)),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        state_shape=carried.state,
        tail_shape=carried.tail,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )


def check_splice(spec: ModelSpec) -> None:
    """Refuse `exchange: splice` where it means nothing: it is a mount on every layer.

    Raises:
        ConfigError: no layer is recurrent, or an attention layer is outside the mount set.
    """
    if not spec.is_hybrid:
        raise ConfigError(
            "exchange='splice' on a dense model: it has no recurrent layer that could step through "
            "a sibling's inputs, so nothing but a mount is left; set exchange: mount"
        )
    if spec.mount_layers != spec.attention_layers:
        raise ConfigError(
            f"exchange='splice' with mount_layers={list(spec.mount_layers)}: a splice mounts on "
            f"every layer, the attention layers are {list(spec.attention_layers)}; call "
            'prepare_model with mount_layers="attention"'
        )


def attention_layers(config: Any) -> list[int]:
    """Give the indices of a config's attention layers, ascending."""
    return [index for index, kind in enumerate(_layer_kinds(config)) if kind == "attention"]


def _layer_kinds(config: Any) -> list[LayerKind]:
    """Read the kind of each layer; a config that names none has attention throughout."""
    named = getattr(config, "layer_types", None)
    if named is None:
        window = getattr(config, "sliding_window", None) is not None
        named = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    kinds: list[LayerKind] = []
    for index, kind in enumerate(named):
        if kind == "full_attention":
            kinds.append("attention")
        elif kind == "linear_attention":
            kinds.append("recurrent")
        else:
            raise ConfigError(
                f"layer {index} is {kind!r}: only full_attention and linear_attention layers can "
                "run as threads; a sliding window would drop pages that siblings still read"
            )
    return kinds


def _mount_set(
    asked: str | Sequence[int], attention: list[int], hybrid: bool, num_layers: int
) -> tuple[int, ...]:
    if isinstance(asked, str):
        if asked != "attention":
            raise ConfigError(
                f'mount_layers={asked!r}: must be "attention" or a list of layer indices'
            )
        if not hybrid:
            raise ConfigError(
                'mount_layers="attention" on a dense model would mount everywhere and hand the '
                f"reader its sibling's goal: give layer indices among {attention}"
            )
        return tuple(attention)
    if not isinstance(asked, Iterable):
        raise ConfigError(
            f"mount_layers={asked!r}: must be a list of layer indices among {attention}"
        )
    layers = list(asked)
    wrong = [
        layer
        for layer in layers
        if not isinstance(layer, int) or isinstance(layer, bool) or layer not in attention
    ]
    if wrong or not layers or len(set(layers)) != len(layers):
        raise ConfigError(
            f"mount_layers={layers}: must be distinct attention layers, at least one, among "
            f"{attention} of {num_layers} layers"
        )
    return tuple(sorted(layers))
