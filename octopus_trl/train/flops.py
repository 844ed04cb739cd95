"""Speed of training: tokens a second, model FLOPs, and their share of a device's peak (MFU).

Model FLOPs of a row of T packed tokens with M scored ones, in training:

    F = 4 T P + 4 M P_head + 2 T P_trained + 3 (A + S)
    A = Σ over attention layers 4 H D pairs        (q·k and p·v; pairs = visible query-key pairs)
    S = Σ over recurrent layers 6 E T              (decay, read and write of a state of E elements)

P are the weights of all linear layers but the head, adapters included, of which P_trained train; of
routed experts the share that a token meets. A
product costs 2 FLOPs a weight and token forward and as many for the gradient of its input; only
trained weights pay once more for their own. Without a gradient the row costs 2 T P + 2 M P_head +
A + S. What checkpointing computes again does not count, so that

    MFU = Σ F / (Σ seconds of the update · peak FLOP/s of one device),   over all ranks
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octopus_trl.models import unwrap
from octopus_trl.models.packed import PackedRow
from octopus_trl.models.spec import ModelSpec
from octopus_trl.train.meter import Meter

MEANS = (
    "speed/train_tokens_per_s",
    "speed/train_logical_tokens_per_s",
    "speed/train_tflops_per_s",
    "speed/mfu",
)
PEAKS = ("memory/peak_gib", "memory/peak_host_gib")

# Dense bf16 peak of one device in TFLOP/s, by its vendor, without sparsity.
PEAK_TFLOPS = {
    "B300": 2250.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "GH200": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "RTX 4090": 165.0,
}


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Sizes of a model that FLOPs follow from.

    Attributes:
        linear, head, trained: weights of linear layers but the head, of the head, and of the linear
            layers that train.
    """

    spec: ModelSpec
    linear: int
    head: int
    trained: int

    @classmethod
    def of(cls, model: nn.Module, spec: ModelSpec) -> ModelFlops:
        """Count the weights of a model, adapters included."""
        output = unwrap(model).get_output_embeddings()
        linear = head = trained = 0
        chosen = getattr(unwrap(model).config, "num_experts_per_tok", 0)
        for module in model.modules():
            if not isinstance(module, nn.Linear):
                experts = int(getattr(module, "num_experts", 0))
                for weight in module.parameters(recurse=False):
                    if weight.ndim == 3 and experts:
                        size = _size(weight) * chosen // experts
                        linear += size
                        trained += size if weight.requires_grad else 0
                continue
            size = _size(module.weight)
            if module is output:
                head += size
            else:
                linear += size
                trained += size if module.weight.requires_grad else 0
        return cls(spec, linear, head, trained)

    def of_row(self, row: PackedRow, scored: int, *, trains: bool) -> float:
        """Count the FLOPs of one pass over a row; see the equation above."""
        tokens = row.num_rows
        mixers = sum(self.attention(row, layer) for layer in self.spec.attention_layers)
        state = float(np.prod(self.spec.state_shape)) if self.spec.is_hybrid else 0.0
        steps = tokens if row.layout.steps is None else len(row.layout.steps)
        mixers += 6.0 * state * steps * len(self.spec.recurrent_layers)
        forward = 2.0 * tokens * self.linear + 2.0 * scored * self.head
        if not trains:
            return forward + mixers
        return 2 * forward + 2.0 * tokens * self.trained + 3 * mixers

    def attention(self, row: PackedRow, layer: int) -> float:
        """Count the forward FLOPs of one attention layer."""
        pairs = visible_pairs(row, mounts=layer in self.spec.mount_layers)
        return 4.0 * self.spec.num_heads * self.spec.head_dim * pairs


def visible_pairs(row: PackedRow, *, mounts: bool) -> int:
    """Count the (query, key) pairs that attention evaluates over a row; copies ask for nothing."""
    plan = row.layout.plan
    lengths = np.bincount(plan.segment_of_row, minlength=len(plan.visible)).astype(np.int64)
    seen = plan.visible | plan.mounted if mounts else plan.visible
    own = lengths[: len(lengths) - plan.num_copies]
    return int(lengths @ (seen.astype(np.int64) @ lengths) + (own * (own + 1) // 2).sum())


def peak_tflops(device: torch.device, given: float | None) -> float | None:
    """Give the peak that MFU divides by: the setting, else the table's; None where neither is."""
    if given is not None:
        return given
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)


class Speed:
    """What an update has computed so far, until its figures are handed to a meter."""

    def __init__(self, model: nn.Module, spec: ModelSpec, peak: float | None) -> None:
        self._flops, self._peak = ModelFlops.of(model, spec), peak
        self._clear()

    def _clear(self) -> None:
        self._tokens = self._logical = self._work = self._seconds = 0.0

    def row(self, row: PackedRow, scored: int, *, trains: bool) -> None:
        """Count one pass over a row."""
        self._tokens += row.num_rows
        self._logical += row_logical_tokens(row)
        self._work += self._flops.of_row(row, scored, trains=trains)

    def seconds(self, value: float) -> None:
        """Add time that the update took."""
        self._seconds += value

    def flush(self, meter: Meter, device: torch.device) -> None:
        """Hand over to the meter, which averages over ranks, and start anew."""
        if self._seconds > 0:
            meter.add("speed/train_tokens_per_s", self._tokens, self._seconds)
            meter.add("speed/train_logical_tokens_per_s", self._logical, self._seconds)
            meter.add("speed/train_tflops_per_s", self._work / 1e12, self._seconds)
            if self._peak is not None:
                meter.add("speed/mfu", self._work, self._seconds * self._peak * 1e12)
        measure_memory(meter, device)
        self._clear()


def _size(weight: Tensor) -> int:
    """Count a weight's elements; ZeRO-3 leaves an empty shell of it and says its size."""
    return int(getattr(weight, "ds_numel", weight.numel()))


def row_logical_tokens(row: PackedRow) -> int:
    """Count the tokens of a row's leaf chains as separate rows, each with what it mounted."""
    plan = row.layout.plan
    lengths = np.bincount(plan.segment_of_row, minlength=len(plan.visible)).astype(np.int64)
    leaves = np.asarray(~plan.visible.any(axis=0))
    leaves[len(plan.visible) - plan.num_copies :] = False
    seen = (plan.visible | plan.mounted)[leaves].astype(np.int64) @ lengths
    return int((seen + lengths[leaves]).sum())


def measure_memory(meter: Any, device: torch.device) -> None:
    """Note the most memory that this process has held since it began, in GiB."""
    if device.type == "cuda":
        meter.peak("memory/peak_gib", torch.cuda.max_memory_allocated(device) / 2**30)
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts KiB
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    meter.peak("memory/peak_host_gib", most / 2**30)
