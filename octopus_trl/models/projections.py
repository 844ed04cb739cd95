"""Linear layers that read the same input, as one product, with their LoRA adapters.

The weights of such layers become views of one tensor: names, `state_dict`, optimizers and PEFT see
the same parameters with the same values at another address, and there is no second copy. The rows
of the adapters' A lie below the weights in that tensor, so that one product gives both ``x W^T``
and ``x A^T``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from octopus_trl.errors import ConfigError
from octopus_trl.kernels import select


@dataclass(frozen=True, slots=True)
class Adapter:
    """One active LoRA adapter of a layer: adds ``scale * B A x``.

    Attributes:
        a: [r, d]; b: [n, r]; parameters, of any float dtype.
    """

    a: Tensor
    b: Tensor
    scale: float


def plain_linear(module: Any, name: str) -> tuple[nn.Linear, list[Adapter]]:
    """Take a projection apart into its linear layer and its active adapters.

    Args:
        name: what to call it in an error.
    Raises:
        ConfigError: it is neither an `nn.Linear` nor a plain LoRA layer over one.
    """
    if hasattr(module, "modules_to_save"):  # PEFT trains a whole copy of the layer
        module = module.modules_to_save[module.active_adapter]
    adapters: list[Adapter] = []
    if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
        if not (module.disable_adapters or module.merged):
            for adapter in module.active_adapters:
                if adapter not in module.lora_A:
                    continue
                a, b = module.lora_A[adapter], module.lora_B[adapter]
                if module.lora_variant.get(adapter) is not None or b.bias is not None:
                    raise ConfigError(f"{name}: adapter {adapter!r} is no plain LoRA")
                adapters.append(Adapter(a.weight, b.weight, float(module.scaling[adapter])))
        module = module.base_layer
    if type(module) is not nn.Linear:
        raise ConfigError(f"{name} is a {type(module).__name__}, not a plain linear layer")
    return module, adapters


class Projections:
    """Layers that read the same input, called as one: [R, d] to [R, sum of widths].

    Args:
        layers: projections in the order of the output's columns, `nn.Linear` or LoRA over one.
        share: make the weights views of one tensor where each owns its storage; else one product a
            layer.
        merge: multiply by a copy ``W + scale B A`` instead, made by `refresh`; the layers stay as
            they are.
    Raises:
        ConfigError: a layer is of another kind.
    """

    def __init__(
        self, layers: Sequence[tuple[str, Any]], *, share: bool = True, merge: bool = False
    ) -> None:
        parts = [plain_linear(module, name) for name, module in layers]
        self._linears = [linear for linear, _ in parts]
        self._adapters = [adapters for _, adapters in parts]
        self.widths = [linear.out_features for linear in self._linears]
        self.width = sum(self.widths)
        weight = self._linears[0].weight
        self._device, self._dtype = weight.device, weight.dtype
        ranks = [sum(len(a.a) for a in adapters) for adapters in self._adapters]
        self._merge = merge and any(ranks)
        # Every layer gets as many rows of A as the one of the highest rank: zero rows are harmless.
        self._rank = 0 if self._merge else max(ranks)
        self._fused: Tensor | None = None  # [width (+ rows of A), d]
        self._bias: Tensor | None = None
        self._a = self._b = self._starts = None  # type: Tensor | None
        self._seen: int | None = None  # sum of the versions of what was copied
        self._shrink = select("lora_shrink", self._device)
        self._expand = select("lora_expand", self._device)
        self._product = select("skinny_linear", self._device)
        if share and not self._merge:
            self._fused = _adjoin([linear.weight for linear in self._linears], self._rows_of_a)
        if self._rank:
            self._take_adapters()
        self.refresh()

    @property
    def _rows_of_a(self) -> int:
        return self._rank * len(self._linears)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply; [R, width], perhaps a view whose rows lie further apart."""
        if self._fused is not None:
            y = self._multiply(x, self._fused, self._bias)
            if not self._rank:
                return y
            y, h = y[:, : self.width], y[:, self.width :]
        else:
            outs = [self._multiply(x, linear.weight, linear.bias) for linear in self._linears]
            y = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
            if not self._rank:
                return y
            h = self._shrink(x, a=self._a)
        return self._expand(y, h=h, b=self._b, starts=self._starts)

    @property
    def plain(self) -> Tensor | None:
        """The matrix [width, d] that a call is one product with; None where a call is more."""
        return self._fused if self._bias is None and not self._rank else None

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._product(x, weight=weight) if bias is None else F.linear(x, weight, bias)

    def signature(self) -> list[int]:
        """List the addresses that a captured product reads; it is void when one changes."""
        own = [self._fused, self._bias, self._a, self._b, self._starts]
        return [
            *(0 if tensor is None else tensor.data_ptr() for tensor in own),
            *(linear.weight.data_ptr() for linear in self._linears),
        ]

    def copied(self) -> list[Tensor]:
        """List the parameters that `refresh` copies."""
        copied = [t for adapters in self._adapters for a in adapters for t in (a.a, a.b)]
        copied += [linear.bias for linear in self._linears if linear.bias is not None]
        return copied + (self.weights() if self._merge else [])

    def weights(self) -> list[Tensor]:
        """List the weights of the layers."""
        return [linear.weight for linear in self._linears]

    def holds(self) -> bool:
        """Whether the weights still lie where they were put."""
        if self._fused is None or self._merge:
            return True
        parts = self._fused[: self.width].split(self.widths)
        return all(
            linear.weight.data_ptr() == part.data_ptr() and linear.weight.dtype == part.dtype
            for linear, part in zip(self._linears, parts, strict=True)
        )

    @torch.no_grad()
    def refresh(self, *, force: bool = False) -> None:
        """Copy adapters, biases or merged weights again if they changed, to the same addresses."""
        seen = sum(tensor._version for tensor in self.copied())
        if seen == self._seen and not force:
            return
        self._seen = seen
        if self._merge:
            self._write_merged()
        elif self._rank:
            self._write_adapters()
        if self._fused is not None and any(linear.bias is not None for linear in self._linears):
            self._write_biases(self._fused)

    def release(self) -> None:
        """Free what `refresh` makes again: the merged weights."""
        if self._merge:
            self._fused, self._seen = None, None

    @torch.no_grad()
    def undo(self) -> None:
        """Give every weight a storage of its own again; values stay bit for bit."""
        if self._fused is None or self._merge or not self.holds():
            return
        for linear in self._linears:
            linear.weight.data = linear.weight.data.clone()
        self._a = None if self._a is None else self._a.clone()
        self._fused = self._bias = None

    def _take_adapters(self) -> None:
        """Make room for the copies of A and B."""
        linear = self._linears[0]
        if self._fused is not None:
            self._a = self._fused[self.width :]
        else:
            self._a = linear.weight.new_empty(self._rows_of_a, linear.in_features)
        self._b = linear.weight.new_empty(self.width, self._rank)
        starts: list[int] = []
        for index, (width, adapters) in enumerate(zip(self.widths, self._adapters, strict=True)):
            starts += [index * self._rank if adapters else -1] * width
        self._starts = torch.tensor(starts, dtype=torch.int32, device=self._device)

    def _write_adapters(self) -> None:
        assert self._a is not None
        assert self._b is not None
        a_parts = self._a.split(self._rank)
        b_parts = self._b.split(self.widths)
        for a, b, adapters in zip(a_parts, b_parts, self._adapters, strict=True):
            done = 0
            for adapter in adapters:
                rank = len(adapter.a)
                a[done : done + rank].copy_(adapter.a)
                b[:, done : done + rank].copy_(adapter.b * adapter.scale)
                done += rank
            a[done:].zero_()
            b[:, done:].zero_()

    def _write_merged(self) -> None:
        linear = self._linears[0]
        if self._fused is None:
            self._fused = linear.weight.new_empty(self.width, linear.in_features)
        parts = self._fused.split(self.widths)
        for part, linear, adapters in zip(parts, self._linears, self._adapters, strict=True):
            part.copy_(linear.weight)
            for adapter in adapters:
                wide = torch.promote_types(adapter.b.dtype, torch.float32)
                delta = adapter.b.to(wide) @ adapter.a.to(wide) * adapter.scale
                part.copy_(part.to(wide) + delta)

    def _write_biases(self, fused: Tensor) -> None:
        if self._bias is None:
            self._bias = fused.new_zeros(len(fused))
        for part, linear in zip(
            self._bias[: self.width].split(self.widths), self._linears, strict=True
        ):
            if linear.bias is not None:
                part.copy_(linear.bias)


@torch.no_grad()
def _adjoin(weights: Sequence[Tensor], extra_rows: int) -> Tensor | None:
    """Make weights [n_i, d] views of one tensor [sum of n_i + extra_rows, d], or find them so.

    Returns:
        That tensor, or None where it must not be done: somebody else keeps a weight in a larger
        storage (a flat buffer of DeepSpeed) or gathers it (ZeRO-3), or they differ in dtype,
        device or width.
    """
    first = weights[0]
    alike = all(
        w.dtype == first.dtype and w.device == first.device and w.shape[1:] == first.shape[1:]
        for w in weights
    )
    if not alike or len({id(w) for w in weights}) != len(weights):
        return None
    rows = sum(len(w) for w in weights)
    if len(weights) == 1 and not extra_rows:
        return first.detach()
    if _adjoined(weights, rows + extra_rows):
        return first.detach().as_strided((rows + extra_rows, first.shape[1]), first.stride(), 0)
    if not all(_owns_its_storage(w) or _is_ours(w) for w in weights):
        return None
    fused = first.new_empty(rows + extra_rows, first.shape[1])
    for weight, part in zip(weights, fused[:rows].split([len(w) for w in weights]), strict=True):
        part.copy_(weight)
        weight.data = part
    _OURS[fused.untyped_storage()._cdata] = StorageWeakRef(fused.untyped_storage())
    return fused


# Storages that `_adjoin` made and that still live; a weak reference keeps an address from reuse.
_OURS: dict[int, StorageWeakRef] = {}


def _adjoined(weights: Sequence[Tensor], rows: int) -> bool:
    """Whether an earlier call put just these weights side by side, in a tensor of that height."""
    nbytes, address = rows * weights[0].shape[1] * weights[0].itemsize, weights[0].data_ptr()
    if not _is_ours(weights[0]) or weights[0].untyped_storage().nbytes() != nbytes:
        return False
    for weight in weights:
        if weight.data_ptr() != address:
            return False
        address += weight.numel() * weight.itemsize
    return weights[0].storage_offset() == 0


def _is_ours(weight: Tensor) -> bool:
    for key in [key for key, reference in _OURS.items() if reference.expired()]:
        del _OURS[key]
    return weight.untyped_storage()._cdata in _OURS


def _owns_its_storage(weight: Tensor) -> bool:
    return (
        weight.is_contiguous()
        and weight.untyped_storage().nbytes() == weight.numel() * weight.itemsize
        and not hasattr(weight, "ds_id")  # ZeRO-3 gathers and frees it
    )
