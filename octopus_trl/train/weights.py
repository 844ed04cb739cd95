"""The engine over the trainer's own weights, and the passes that score without training.

One GPU, DDP and ZeRO-1/2 keep the weights whole in the module, so the engine runs the very modules
that train. Under ZeRO-3 they are gathered for the length of a generation, and inside it no rank
waits for another. Sampling and scoring run in eval mode: no dropout, whatever the adapter asks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from trl.models.utils import unwrap_model_for_generation

from octopus_trl.engine import Engine
from octopus_trl.train.config import OctopusGRPOConfig

Result = TypeVar("Result")


class PolicyEngine:
    """The engine of a run, made when it is first needed and asleep between generations.

    Args:
        wrapped: gives the model as the trainer wraps it now.
    """

    def __init__(
        self, args: OctopusGRPOConfig, accelerator: Any, wrapped: Callable[[], nn.Module]
    ) -> None:
        self._args, self._accelerator, self._wrapped = args, accelerator, wrapped
        self.engine: Engine | None = None

    def run(self, version: int, call: Callable[[Engine], Result]) -> Result:
        """Call with an engine that holds the current weights as policy `version`.

        An exception leaves the model as it was before; it is raised once the weights are back.
        """
        outcome: list[Result] = []
        failure: BaseException | None = None
        with self._whole_weights() as model:
            with eval_mode(model), torch.no_grad(), self._accelerator.autocast():
                try:
                    engine = self._awake(model, version)
                    outcome.append(call(engine))
                    engine.sleep()
                # TRL's context has no finally: what crosses it leaves ZeRO-3 without its hooks.
                except BaseException as error:  # noqa: BLE001
                    failure = error
        if failure is not None:
            raise failure
        return outcome[0]

    def _awake(self, model: nn.Module, version: int) -> Engine:
        if self.engine is None:
            args = self._args
            self.engine = Engine(
                model,
                page_size=args.page_size,
                num_pages=args.num_pages,
                num_states=args.num_states,
                device=self._accelerator.device,
            )
        else:
            self.engine.wake()
        self.engine.set_policy_version(version)
        return self.engine

    def _whole_weights(self) -> AbstractContextManager[Any]:
        if not is_zero3(self._accelerator):
            return nullcontext(self._accelerator.unwrap_model(self._wrapped()))
        return unwrap_model_for_generation(
            self._wrapped(),
            self._accelerator,
            gather_deepspeed3_params=True,
            gradient_checkpointing_kwargs=self._args.gradient_checkpointing_kwargs,
        )


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


def is_zero3(accelerator: Any) -> bool:
    """Whether parameters are split over ranks."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return plugin is not None and plugin.zero_stage == 3
