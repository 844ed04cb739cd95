"""What one family of Hugging Face models must say to run here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn


class RecurrentSizes(NamedTuple):
    """Shapes that one recurrent layer carries from token to token.

    Attributes:
        state: recurrent state of one thread, float32.
        tail: [C, W - 1], convolution tail in the model's dtype.
    """

    state: tuple[int, ...]
    tail: tuple[int, ...]


def _no_sizes(config: Any) -> RecurrentSizes:
    return RecurrentSizes((), ())


def _stock_head(causal_lm: Any) -> Callable[[Tensor], Tensor]:
    return causal_lm.get_output_embeddings()


@dataclass(frozen=True, slots=True)
class Backbone:
    """One supported class and the mixers that replace its own.

    Attributes:
        causal_lm: stock class; its `model` takes attention masks by layer kind and hands unknown
            keywords down to every mixer.
        attention: attention module, which asks its config for the attention function.
        mixers: stock recurrent module -> ours, a subclass without state of its own.
        recurrent_sizes: reads the shapes from a config with recurrent layers.
        head: gives the function from hidden states [T, d] to logits [T, vocab].
    """

    causal_lm: type[nn.Module]
    attention: type[nn.Module]
    mixers: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    recurrent_sizes: Callable[[Any], RecurrentSizes] = _no_sizes
    head: Callable[[Any], Callable[[Tensor], Tensor]] = _stock_head
