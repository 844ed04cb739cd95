"""Ways of running one update: stock, lean or fused layers, MLPs by tiles, inputs on the host.

All of them compute the same; they differ in seconds and in peak memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octopus_trl import Trace
from octopus_trl.maths.objective import rollout_training_kl
from octopus_trl.models import spec_of
from octopus_trl.models.lean_layers import lean_layers
from octopus_trl.models.mlp_tiles import tile_mlps
from octopus_trl.models.packed import run_packed
from octopus_trl.train.rows import LossRow, Tree, build_row
from octopus_trl.train.scoring import kept_on_host

from .clock import sample_s, timed
from .setting import Line, Setting, WrongResult

REPEATS = 2
LONG_S = 4.0  # a call that took longer is timed once more and not twice
TILES = 8  # of a row whose MLPs are tiled
# Mean of e^d − 1 − d between packed and separate rows, or between two ways; no token may be off by
# more than the second. Seen in bfloat16 over 32 random layers: 2.2e-3 and 0.26 on an H200 at r = 3
# and at r = 8, where a carried state begins a chunk elsewhere; of rows in a wrong order: 0.09, 1.0.
CLOSE = {torch.float32: (1e-8, 1e-3), torch.bfloat16: (5e-3, 0.6)}
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Way:
    """How the layers of an update run.

    Attributes:
        lean: as the trainer runs them; else as PEFT and transformers do.
        fused: the trainer's `fused_layers`.
        tile: its `mlp_tile_tokens`.
        on_host: its `activation_offloading`.
    """

    lean: bool = True
    fused: bool = False
    tile: int | None = None
    on_host: bool = False

    @contextmanager
    def open(self, model: Any) -> Iterator[None]:
        """Let a model run so until the block ends."""
        tile_mlps(model, self.tile)
        try:
            with lean_layers(model, fused=self.fused) if self.lean else nullcontext():
                yield
        finally:
            tile_mlps(model, None)


def row_of(traces: Sequence[Trace]) -> LossRow:
    """Pack traces into one row, as the trainer does."""
    return build_row([Tree(trace, 1.0) for trace in traces], mounts="live")


def score(model: Any, row: LossRow) -> Tensor:
    """Log-probabilities of a row's owned tokens, under autocast where the trainer has it."""
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return run_packed(model, spec_of(model), row.packed, row.rows, row.targets)


def update(model: Any, traces: Sequence[Trace], way: Way) -> None:
    """Pack, score and take the gradient of the mean log-probability."""
    with way.open(model):
        with kept_on_host() if way.on_host else nullcontext():
            loss = -score(model, row_of(traces)).mean()
        loss.backward()
    model.zero_grad(set_to_none=True)


def measured(setting: Setting, call: Callable[[], Any]) -> tuple[float, float]:
    """Give the least seconds of a call after one that does not count, and its peak GiB."""
    with timed() as first:
        call()
    cuda = setting.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = min(sample_s(call, repeats=timed_calls(first.value)))
    return seconds, torch.cuda.max_memory_allocated() / GIB if cuda else 0.0


def timed_calls(seconds: float) -> int:
    """Say how often a call of that length is timed, after one that does not count."""
    return 1 if seconds > LONG_S else REPEATS


def check_close(what: str, found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Say how far log-probabilities are apart.

    Raises:
        WrongResult: by more than rounding explains.
    """
    mean, largest = (float(x) for x in rollout_training_kl(found, rollout_logps=wanted))
    text = f"{what}: mean e^d - 1 - d {mean:.2e}, max |d| {largest:.2e}"
    print(text, file=sys.stderr, flush=True)
    if not (mean <= CLOSE[dtype][0] and largest <= CLOSE[dtype][1]):
        raise WrongResult(f"{text}: they differ")


def ways(
    setting: Setting, model: Any, trace: Trace, way: Way, ours: tuple[float, float], ideal_s: float
) -> Iterator[Line]:
    """Yield what each way of running an update gains or costs.

    Args:
        way, ours: how this run's updates run, and seconds and peak GiB of one.
        ideal_s: of its FLOPs at the device's peak.
    """
    unique = sum(trace.lengths)
    what = f"update of {trace.episode_id}, {unique:,} unique tokens"
    stock = Way(lean=False)
    apart = [("no conversions around adapters", Way()), ("fused layers", Way(fused=True))]
    found = {way: ours}
    guess = 2 * ours[0]  # of the slowest
    needed = (1 + timed_calls(guess)) * guess

    def run(each: Way) -> tuple[float, float] | None:
        if each not in found and setting.fits(needed):
            found[each] = measured(setting, lambda: update(model, [trace], each))
        return found.get(each)

    before = run(stock)
    for name, each in apart:
        case = f"{what}: {name}"
        after = run(each) if before else None
        if before is None or after is None:
            yield Line.not_run(case, setting.out_of_budget(needed))
            continue
        yield Line.rate(
            case,
            before[0] / after[0],
            "times faster than stock layers",
            before[0] / ideal_s,
            baseline=("stock layers, s", before[0]),
        )
    tile = -(-unique // TILES)
    for name, each in [
        (f"MLPs by {tile:,}", replace(way, tile=tile)),
        (
            f"MLPs by {tile:,} and inputs of layers on the host",
            replace(way, tile=tile, on_host=True),
        ),
    ]:
        case = f"{what}: {name}"
        after = run(each)
        if after is None:
            yield Line.not_run(case, setting.out_of_budget(needed))
            continue
        seconds, peak = after
        yield Line.cost(
            f"{case}: time",
            seconds / ours[0],
            "times as long",
            1.0,
            baseline=("without, s", ours[0]),
        )
        if setting.device.type == "cuda":
            case = f"{case}: peak"
            yield Line.cost(case, peak, "GiB", ours[1], baseline=("without, GiB", ours[1]))


@torch.no_grad()
def check_ways(model: Any, trace: Trace, dtype: torch.dtype) -> None:
    """Compare the log-probabilities of lean and fused layers with those of stock ones.

    Raises:
        WrongResult: they differ by more than rounding explains.
    """
    row = row_of([trace])
    scores = {}
    for name, way in [
        ("stock", Way(lean=False)),
        ("no conversions around adapters", Way()),
        ("fused layers", Way(fused=True)),
    ]:
        with way.open(model):
            scores[name] = score(model, row)
    wanted = scores.pop("stock")
    for name, found in scores.items():
        check_close(f"{trace.episode_id}: {name} against stock layers", found, wanted, dtype)
