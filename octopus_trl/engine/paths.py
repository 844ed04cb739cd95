"""Which passes an engine runs: the model's own forward, or the fused ones of a GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch
from torch import nn

from octopus_trl.engine.counters import Counters
from octopus_trl.engine.fused_runner import FusedPasses, FusedRunner
from octopus_trl.engine.pipelined import PipelinedScheduler
from octopus_trl.engine.pools import Pools
from octopus_trl.engine.primitives import Primitives
from octopus_trl.engine.runner import Runner
from octopus_trl.engine.scheduler import Scheduler
from octopus_trl.errors import ConfigError

logger = logging.getLogger(__name__)

CPU_CHUNK, GPU_CHUNK = 512, 2048  # tokens of a prefill pass where nobody says


class Paths:
    """Makes the runner and the scheduler of an engine, anew for every epoch of its pools.

    Args:
        widths: rows that a decode pass may have, ascending; with one alone a fused pass is `exact`.
        fused: run fused passes; None does on a GPU, for a model that has them in half precision.
        merge: see `FusedPasses`.
    Raises:
        ConfigError: fused passes were asked for and there are none for this model.
    """

    def __init__(
        self,
        model: nn.Module,
        pools: Pools,
        counters: Counters,
        widths: tuple[int, ...],
        prefill_chunk: int,
        *,
        fused: bool | None,
        merge: bool,
    ) -> None:
        self._model, self._pools, self._counters = model, pools, counters
        self._widths, self._chunk = widths, prefill_chunk
        cuda = pools.memory.device.type == "cuda"
        self.passes: FusedPasses | None = None
        if fused is False or (fused is None and not cuda):
            return
        try:
            if cuda and pools.memory.dtype not in (torch.bfloat16, torch.float16):
                raise ConfigError(f"the weights are {pools.memory.dtype}, not in half precision")
            self.passes = FusedPasses(
                model,
                pools.memory,
                counters,
                widths=widths,
                prefill_chunk=prefill_chunk,
                num_slots=pools.memory.num_slots,
                exact=len(widths) == 1,
                merge=merge,
                capture=cuda and os.environ.get("OCTOPUS_KERNELS") != "maths",
            )
        except ConfigError as error:
            if fused:
                raise ConfigError(f"fused=True: {error}") from None
            logger.warning(
                "%s: the engine runs the model's own forward, which is slow on a GPU; fused=False "
                "says that this is meant",
                error,
            )
        else:
            passes = self.passes
            pools.on_taken.append(lambda: passes.refresh(force=True))
            pools.on_given_back.append(passes.sleep)

    def start(
        self, room: Callable[[int], None], primitives: Primitives, epoch: Callable[[], int]
    ) -> tuple[Runner, Scheduler]:
        """Make both over the pools' present tree."""
        tree, memory = self._pools.tree, self._pools.memory
        if self.passes is None:
            runner = Runner(
                self._model,
                memory,
                tree,
                self._counters,
                room,
                prefill_chunk=self._chunk,
                widths=self._widths,
            )
            return runner, Scheduler(runner, primitives, epoch)
        fused = FusedRunner(
            self._model,
            memory,
            tree,
            self._counters,
            room,
            prefill_chunk=self._chunk,
            passes=self.passes,
        )
        return fused, PipelinedScheduler(fused, primitives, epoch)
