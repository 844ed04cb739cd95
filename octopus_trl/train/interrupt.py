"""A stop that is asked for from outside: finish the step, save, end."""

from __future__ import annotations

import signal
import threading
from typing import Any

import torch
from transformers import TrainerCallback

from octopus_trl.train.weights import say

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopGracefully(TrainerCallback):
    """Answers the first Ctrl-C or SIGTERM at the end of the step with a checkpoint and an end.

    A second signal is not held back: it ends the process where it stands.

    Args:
        accelerator: ranks stop together, whichever of them was asked.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._asked = False
        self._handlers: dict[int, Any] = {}
        self.stopped = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the signals over; only the main OS thread of a process may."""
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._ask) for number in SIGNALS}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Ask the trainer for a checkpoint and an end where any rank was asked to stop."""
        asked = self._asked
        if self._accelerator.num_processes > 1:
            flag = torch.tensor([int(asked)], device=self._accelerator.device)
            asked = bool(self._accelerator.gather(flag).max())
        if asked:
            self.stopped = control.should_save = control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the signals back."""
        self.release()

    def release(self) -> None:
        """Put the handlers back that stood before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _ask(self, number: int, frame: Any) -> None:
        self._asked = True
        self.release()
        if self._accelerator.is_main_process:
            say("stopping after this step, with a checkpoint; once more to stop at once")
