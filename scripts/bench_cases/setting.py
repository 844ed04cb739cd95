"""What a case gets and yields: the model, sizes and budget, and result lines (DESIGN §8)."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .limits import Rates, Shapes
from .models import build
from .sizes import SIZES, Sizes


class WrongResult(Exception):
    """What would be timed computes something wrong; the case ends."""


@dataclass(frozen=True, slots=True)
class Line:
    """One figure.

    Attributes:
        limit: roofline or ideal in the same unit, None where there is none.
        share: value over limit, its inverse for times and costs.
        baseline: name and value of the alternative measured in the same run; its name says what
            it did, or why there is no value.
    """

    case: str
    value: float | None
    unit: str
    limit: float | None = None
    share: float | None = None
    baseline: tuple[str, float | None] = ("none", None)

    @classmethod
    def rate(cls, case: str, value: float, unit: str, limit: float, **rest: Any) -> Line:
        """Make a line of a figure that should be high."""
        return cls(case, value, unit, limit, value / limit if limit else None, **rest)

    @classmethod
    def cost(cls, case: str, value: float, unit: str, limit: float, **rest: Any) -> Line:
        """Make a line of a figure that should be low; a cost of 0 has share 1."""
        share = limit / value if value else 1.0
        return cls(case, value, unit, limit, share, **rest)

    @classmethod
    def not_run(cls, case: str, reason: str) -> Line:
        """Make the line of a case that did not run."""
        return cls(f"{case}: not run ({reason})", None, "none")

    def record(self) -> dict[str, Any]:
        """Give the case's part of the JSON line."""
        name, value = self.baseline
        return {
            "case": self.case,
            "value": self.value,
            "unit": self.unit,
            "limit": self.limit,
            "share": self.share,
            "baseline": {"name": name, "value": value},
        }


@dataclass(eq=False)
class Setting:
    """One run of the benchmark.

    Args:
        model: a name in `SIZES`.
        budget_s: seconds for everything, the model's making included; None for no bound.
        profile: folder for profiles of what was timed; None makes none.
        mixes: episode mixes of the update, by name; None for all.
        fused_layers: of the updates, as the trainer's setting.
    """

    model: str = "tiny"
    budget_s: float | None = None
    profile: Path | None = None
    mixes: Sequence[str] | None = None
    fused_layers: bool = True
    sizes: Sizes = None  # type: ignore[assignment]
    begin_s: float = field(default_factory=time.perf_counter)
    kept: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sizes is None:
            self.sizes = SIZES[self.model]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._rate = self.sizes.prefill_rate
        self._console = Console(stderr=True)
        self._text = ""

    def load(self) -> Any:
        """Give the prepared model, made at the first call."""
        if "model" not in self.kept:
            with self.busy(f"making {self.model}"):
                self.kept["model"], text = build(self.model, self.device)
            print(text, file=sys.stderr, flush=True)
        return self.kept["model"]

    @cached_property
    def shapes(self) -> Shapes:
        """Sizes of the model that bytes and FLOPs follow from."""
        return Shapes.of(self.load())

    @cached_property
    def rates(self) -> Rates:
        """Bytes/s and FLOP/s of the device."""
        return Rates.of(self.device, self.load().dtype)

    def fits(self, seconds: float) -> bool:
        """Whether the budget has room for that many seconds more."""
        if self.budget_s is None:
            return True
        return time.perf_counter() - self.begin_s + seconds <= self.budget_s

    def prefill_s(self, tokens: float) -> float:
        """Guess the seconds of a prefill from the last that was measured."""
        return tokens / self._rate

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        """Note a measured prefill of at least one chunk."""
        if tokens >= self.sizes.prefill_chunk:
            self._rate = tokens / seconds

    def out_of_budget(self, seconds: float) -> str:
        """Say why something that needs `seconds` did not run."""
        gone = time.perf_counter() - self.begin_s
        return f"budget {self.budget_s:g} s, {gone:.0f} s gone, about {seconds:.0f} s needed"

    @contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """Show on a terminal what runs."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status(text):
            yield
