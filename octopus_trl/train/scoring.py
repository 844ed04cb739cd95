"""From a generation batch to packed rows, and scoring without training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from octopus_trl.models.lean_layers import lean_layers
from octopus_trl.models.packed import run_packed
from octopus_trl.train.checks import check_traces
from octopus_trl.train.meter import Meter
from octopus_trl.train.rows import (
    LossRow,
    Tree,
    build_row,
    empty_row,
    num_scored,
    plan_rows,
    sampled_logps,
)
from octopus_trl.train.weights import eval_mode, say


def kept_on_host() -> save_on_cpu:
    """Keep what a pass saves for its backward pass in host memory, pinned where there is a GPU.

    What a checkpointed layer computes again is not saved by the pass and stays on the device.
    """
    return save_on_cpu(pin_memory=torch.cuda.is_available())


class PackedRows:
    """The part of the trainer between traces and log-probabilities."""

    accelerator: Any
    args: Any
    compute_loss_context_manager: Any
    model: Any
    state: Any
    _mark: str
    _spec: Any

    def _lean(self) -> AbstractContextManager[None]:
        """Run the layers of what is trained and scored inside with less traffic."""
        return lean_layers(self.model, fused=self.args.fused_layers)

    def _trees(self, inputs: dict[str, Any]) -> list[Tree]:
        """Give the trees of a batch, whose traces this run may train on now.

        Raises:
            StaleVersion, ConfigError: a trace of other weights or of another tokenizer.
        """
        step, every = self.state.global_step, self.args.gradient_accumulation_steps
        outlives = -(-self.args.steps_per_generation * self.args.num_iterations // every)
        check_traces(
            [trace for group in inputs["groups"] for trace in group],
            oldest=step - outlives,
            newest=step,
            mark=self._mark,
            spec=self._spec,
        )
        trees = []
        for index, group in enumerate(inputs["groups"]):
            for rollout, trace in enumerate(group):
                tree = Tree(trace, float(inputs["advantages"][index, rollout]))
                for name in ("old_logps", "ref_logps"):
                    if inputs.get(name) is not None:
                        setattr(tree, name, inputs[name][index][rollout].numpy())
                if inputs.get("credits") is not None:
                    tree.credit = inputs["credits"][index][rollout]
                trees.append(tree)
        return trees

    def _rows(self, trees: Sequence[Tree], meter: Meter | None = None) -> list[LossRow]:
        """Pack trees into rows; every rank gets as many, the last ones empty.

        Args:
            meter: where the sizes of rows and the share of trees that fit in none are noted.
        """
        planned, left_out = plan_rows(
            trees,
            max_row_tokens=self.args.max_row_tokens,
            max_path_tokens=self.args.max_path_tokens,
        )
        for message in left_out:
            say(f"left out of the update: {message}")
        rows = [
            build_row(part, mounts=self.args.mounts, tokens=self.args.token_rule)
            for part in planned
        ]
        if meter is not None:
            meter.add("packing/left_out", len(left_out), len(trees))
            meter.add("packing/row_tokens", sum(row.packed.num_rows for row in rows), len(rows))
        wanted = len(rows)
        if self.accelerator.num_processes > 1:
            count = torch.tensor([wanted], device=self.accelerator.device)
            wanted = int(self.accelerator.gather(count).max())
        return rows + [empty_row() for _ in range(wanted - len(rows))]

    def _row_logps(self, model: nn.Module, row: LossRow, temperature: float) -> Tensor:
        with kept_on_host() if self.args.activation_offloading else nullcontext():
            return run_packed(
                model,
                self._spec,
                row.packed,
                row.rows,
                row.targets,
                temperature=temperature,
                detach_mounts=self.args.detach_mounts,
            )

    def _score(self, batch: dict[str, Any]) -> list[list[Tensor]]:
        """Score the owned tokens of every trace; see `_score_trees`."""
        scored = self._score_trees(self._trees(batch), float(batch["temperature"]))
        return [[scored[id(trace)] for trace in group] for group in batch["groups"]]

    def _old_logps(self, batch: dict[str, Any]) -> list[list[Tensor]]:
        """Give what the ratio divides by: scored now, or as the rollout drew it where it did."""
        if self.args.old_logps == "recompute":
            return self._score(batch)
        return [[torch.from_numpy(sampled_logps(t)) for t in group] for group in batch["groups"]]

    def _score_trees(self, trees: Sequence[Tree], temperature: float) -> dict[int, Tensor]:
        """Score the owned tokens of trees with the model as it is, without gradient.

        Returns:
            By `id` of its trace, [Z] float64 on the CPU; NaN where it fits no row.
        """
        nan = torch.tensor(float("nan"), dtype=torch.float64)
        scored = {id(tree.trace): nan.repeat(num_scored(tree.trace)) for tree in trees}
        scoring = self.compute_loss_context_manager()
        with eval_mode(self.model), torch.no_grad(), scoring, self._lean():
            for row in self._rows(trees):
                # `self.model` is the root that ZeRO-3 has hooked; DDP's wrapper would synchronise.
                logps = self._row_logps(self.model, row, temperature)
                found = logps.double().cpu().split(row.num_owned.tolist())
                for trace, at, part in zip(row.traces, row.places, found, strict=True):
                    if id(trace) in scored:  # not the row of a rank that ran out of trees
                        scored[id(trace)].index_copy_(0, torch.from_numpy(at), part)
        return scored
