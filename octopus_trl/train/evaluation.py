"""Evaluation in the middle of training that training does not notice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class ApartEvaluation:
    """The part of the trainer that evaluates; stands before TRL's class.

    Held-out episodes run on the weights and the policy version of the step, in an engine that is
    emptied afterwards, with seeds of their own and into figures of their own. What is left to keep
    apart is the process's random state, which loaders and dropout share.
    """

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' evaluation and leave every random state as it was."""
        with kept_random_state():
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Put the generators of Python, numpy, torch and every GPU back afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002 - the process's own
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002
