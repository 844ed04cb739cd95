"""The engine over the trainer's weights.

One GPU, DDP and ZeRO-1/2 keep the weights whole in the module, so the engine runs the very modules
that train. Under ZeRO-3 it runs a resident copy (`resident.py`), and inside a generation no rank
waits for another. Sampling and scoring run in eval mode: no dropout, whatever the adapter asks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from octopus_trl.engine import Engine
from octopus_trl.train.config import OctopusGRPOConfig
from octopus_trl.train.resident import ResidentCopy
from octopus_trl.train.zero import zero_stage

Result = TypeVar("Result")


class PolicyEngine:
    """The engine of a run, made when it is first needed and asleep between generations.

    Args:
        wrapped: gives the model as the trainer wraps it now.
        together: makes the context in which a rank works by itself, named for what it does; a
            failure there ends all ranks (`Ranks.together`).
    """

    def __init__(
        self,
        args: OctopusGRPOConfig,
        accelerator: Any,
        wrapped: Callable[[], nn.Module],
        together: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._args, self._accelerator, self._wrapped = args, accelerator, wrapped
        self._together = together
        self._resident: ResidentCopy | None = None
        self._copied: tuple[int, int] | None = None  # of which wrapped model, at which version
        self.engine: Engine | None = None

    def run(self, version: int, call: Callable[[Engine], Result]) -> Result:
        """Call with an engine that holds the current weights as policy `version`.

        Every rank must call it at the same version; `call` itself waits for no other rank.
        """
        model = self._whole_model(version)
        with self._together("drawing episodes"):
            with eval_mode(model), torch.no_grad(), self._accelerator.autocast():
                engine = self._awake(model, version)
                result = call(engine)
                engine.sleep()
        return result

    def _awake(self, model: nn.Module, version: int) -> Engine:
        if self.engine is None:
            args = self._args
            self.engine = Engine(
                model,
                page_size=args.page_size,
                num_pages=args.num_pages,
                num_states=args.num_states,
            )
        else:
            self.engine.wake()
        self.engine.set_policy_version(version)
        return self.engine

    def _whole_model(self, version: int) -> nn.Module:
        """Give modules with whole weights; under ZeRO-3 this is where ranks meet."""
        wrapped = self._wrapped()
        model: nn.Module = self._accelerator.unwrap_model(wrapped)
        if zero_stage(self._accelerator) != 3:
            return model
        now = (id(wrapped), version)
        if self._resident is None:
            self._resident = ResidentCopy(model, self._accelerator.device)
            if self._accelerator.is_main_process:
                say(self._resident.describe())
        elif self._copied != now:
            self._resident.refresh()
        self._copied = now
        return self._resident.model


def say(text: str) -> None:
    """Show a line to whoever watches the run; standard output stays free."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off and back."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
