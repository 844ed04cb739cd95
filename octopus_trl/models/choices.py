"""A packed pass that also tells the most likely token at each asked place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octopus_trl.models.packed import PackedContext, PackedOutput, PackedRow, make_context
from octopus_trl.models.spec import ModelSpec
from octopus_trl.shapes import Hidden

CHUNK = 512  # targets whose logits live at once


@dataclass
class ChoiceOutput(PackedOutput):
    """Output of a packed pass with choices.

    Attributes:
        choices: [M] int64, the most likely token where each target stands; of equals the first.
    """

    choices: Tensor | None = None


class ChoiceContext(PackedContext):
    """Context of one packed pass without gradient that keeps the most likely tokens too."""

    def finish(self, hidden: Hidden, head: Callable[[Tensor], Tensor]) -> ChoiceOutput:
        """Score the targets and choose beside them, logits in chunks."""
        logps, choices = [], []
        for rows, targets in zip(self.rows.split(CHUNK), self.targets.split(CHUNK), strict=True):
            logits = head(hidden[rows])
            scores = logits.to(torch.float64).div(self.temperature).log_softmax(-1)
            logps.append(scores.gather(-1, targets[:, None])[:, 0])
            choices.append(logits.argmax(-1))
        return ChoiceOutput(logps=torch.cat(logps), choices=torch.cat(choices))


@torch.no_grad()
def run_choices(
    model: nn.Module, spec: ModelSpec, row: PackedRow, rows: np.ndarray, targets: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Run one packed pass; returns log-probabilities [M] float64 and most likely tokens [M].

    Raises:
        ConfigError: the row holds a splice or moved keys, and the model cannot run them.
    """
    context: Any = make_context(ChoiceContext, model, spec, row, rows, targets)
    output = model(octopus=context)
    return output.logps, output.choices
