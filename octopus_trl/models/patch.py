"""Install the mixers in a Hugging Face causal LM, in place.

Classes are swapped for subclasses under the same name, so parameters, `state_dict`, hooks and
`save_pretrained` stay what they were. A model that is wrapped by PEFT, before or after, keeps its
adapters: the mixers call the same projection modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octopus_trl.errors import ConfigError
from octopus_trl.models import attention
from octopus_trl.models.backbone import Backbone
from octopus_trl.models.llama import LLAMA
from octopus_trl.models.mamba2 import BAMBA, GRANITE
from octopus_trl.models.qwen import QWEN2, QWEN3, QWEN3_5
from octopus_trl.models.qwen_moe import QWEN3_5_MOE, QWEN3_MOE
from octopus_trl.models.spec import ModelSpec, read_spec

BACKBONES = (QWEN3_5, QWEN3_5_MOE, QWEN3, QWEN3_MOE, QWEN2, BAMBA, GRANITE, LLAMA)

# A pass brings its own visibility; the model must not build a mask from scattered positions. Models
# whose config names layer kinds take one mask a kind; the others take a mask of four dimensions as
# final, and no mixer looks at it.
_NO_MASKS: dict[str, None] = {"full_attention": None, "linear_attention": None}
_NO_MASK = torch.empty(0, 0, 0, 0)


class _PassForward:
    """Adds `model(octopus=context)` to a causal LM; every other call is the model's own."""

    def forward(self, *args: Any, octopus: Any = None, **kwargs: Any) -> Any:
        """Run one pass of ours, or the stock forward where `octopus` is None."""
        if octopus is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        by_kind = getattr(self.config, "layer_types", None) is not None  # type: ignore[attr-defined]
        outputs = self.model(  # type: ignore[attr-defined]
            input_ids=octopus.input_ids,
            position_ids=octopus.position_ids,
            attention_mask=_NO_MASKS if by_kind else _NO_MASK,
            use_cache=False,
            octopus=octopus,
        )
        hidden: Tensor = outputs.last_hidden_state.squeeze(0)
        return octopus.finish(hidden, head_of(self))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle by the stock class: this one exists only in a process that prepared a model."""
        return _blank, (stock_class(self),), self.__dict__


def prepare_model(model: nn.Module, *, mount_layers: str | Sequence[int] = "attention") -> Any:
    """Install the mixers in place and settle the mount set (DESIGN §6).

    Args:
        model: a causal LM of one of `BACKBONES`, PEFT-wrapped or not. Calling again only changes
            the mount set.
        mount_layers: "attention" for every full-attention layer of a hybrid, or layer indices;
            a dense model needs indices.
    Returns:
        The same object; its parameters' names and a plain forward's result are unchanged.
    Raises:
        ConfigError: the class is not supported, or the mount set does not fit it.
    """
    causal_lm = unwrap(model)
    backbone = _backbone_of(causal_lm)
    spec = read_spec(causal_lm.config, mount_layers, backbone.recurrent_sizes)
    if not isinstance(causal_lm, _PassForward):
        for module in causal_lm.modules():
            if isinstance(module, backbone.attention):
                attention.install(module, causal_lm.config)
            elif type(module) in backbone.mixers:
                module.__class__ = backbone.mixers[type(module)]
        causal_lm.__class__ = _with_pass(type(causal_lm))
    causal_lm.octopus_spec = spec
    return model


def unwrap(model: nn.Module) -> Any:
    """Give the Hugging Face causal LM under PEFT, DDP or DeepSpeed wrappers."""
    inner: Any = model
    while True:
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        elif type(inner).__name__ in ("DistributedDataParallel", "DeepSpeedEngine"):
            inner = inner.module
        else:
            return inner


def stock_class(causal_lm: Any) -> type:
    """Give the Hugging Face class of a prepared causal LM."""
    kind = type(causal_lm)
    return kind.__bases__[1] if issubclass(kind, _PassForward) else kind


def spec_of(model: nn.Module) -> ModelSpec:
    """Give the spec of a prepared model.

    Raises:
        ConfigError: `prepare_model` was not called.
    """
    spec = getattr(unwrap(model), "octopus_spec", None)
    if spec is None:
        raise ConfigError(
            f"{type(unwrap(model)).__name__} is not prepared: call prepare_model(model) first"
        )
    return spec


def head_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Give the function from hidden states [T, d] to logits [T, vocab], constants included."""
    causal_lm = unwrap(model)
    return _backbone_of(causal_lm).head(causal_lm)


def _backbone_of(causal_lm: Any) -> Backbone:
    for backbone in BACKBONES:
        if isinstance(causal_lm, backbone.causal_lm):
            return backbone
    names = ", ".join(backbone.causal_lm.__name__ for backbone in BACKBONES)
    raise ConfigError(
        f"{type(causal_lm).__name__} has no mixers here: supported classes are {names}; "
        "load a Qwen3.5 checkpoint with AutoModelForCausalLM to get its text model"
    )


_CLASSES: dict[type, type] = {}


def _with_pass(cls: type) -> type:
    """Subclass a causal LM under its own name, so that `config.json` names the stock class."""
    if cls not in _CLASSES:
        # `generate` and the Trainer read from the signature what a model takes.
        @functools.wraps(cls.forward)  # type: ignore[attr-defined]
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _PassForward.forward(self, *args, **kwargs)

        _CLASSES[cls] = type(
            cls.__name__,
            (_PassForward, cls),
            {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "forward": forward},
        )
    return _CLASSES[cls]


def _blank(cls: type) -> Any:
    """Make an empty prepared model of a stock class, for unpickling."""
    prepared: Any = _with_pass(cls)
    return prepared.__new__(prepared)
