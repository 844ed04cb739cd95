"""Groups of processes as a launcher would start them, forked from one that has imported all.

Importing torch, transformers and DeepSpeed takes longer than the runs themselves, so a worker
module imports once and forks every rank of every run. Ranks meet over gloo on this machine.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DEEPSPEED = find_spec("deepspeed") is not None
MODES = ("ddp", "zero1", "zero2", "zero3") if DEEPSPEED else ("ddp",)
# The launcher's own variables would win over what a run is meant to be.
INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def fork_ranks(
    world: int, mode: str, folder: Path, call: Callable[[int], None], *, timeout_s: float = 400.0
) -> list[int]:
    """Run `call(rank)` on `world` ranks and wait for all; each writes `folder/rank_N.log`.

    As under a launcher, the end of one rank by a signal ends the others too.

    Args:
        mode: "one" process without a group, "ddp", or "zero1" to "zero3".
    Returns:
        For each rank its exit code, or minus the signal that ended it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    sys.stdout.flush()
    sys.stderr.flush()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, world, mode, port, folder, call)
        pids.append(pid)
    ends: dict[int, int] = {}
    until = time.monotonic() + timeout_s
    while len(ends) < world:
        for rank, pid in enumerate(pids):
            if rank not in ends:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ends[rank] = os.waitstatus_to_exitcode(status)
        if any(code < 0 for code in ends.values()) or time.monotonic() > until:
            for rank, pid in enumerate(pids):
                if rank not in ends:
                    os.kill(pid, signal.SIGKILL)
                    ends[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(0.05)
    return [ends[rank] for rank in range(world)]


def log_of(folder: Path, rank: int) -> str:
    """Read what a rank wrote."""
    return (folder / f"rank_{rank}.log").read_text(errors="replace")


def deepspeed_settings(stage: int) -> dict[str, object]:
    """Give DeepSpeed's settings of a tiny model: every parameter of ZeRO-3 is really split."""
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }


class Collectives(TorchDispatchMode):
    """Lists the collectives of this rank in order, those of DDP's reducer too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _be_rank(
    rank: int, world: int, mode: str, port: int, folder: Path, call: Callable[[int], None]
) -> None:
    """Become one rank of a launched run and never return."""
    code = 1
    try:
        log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for name in INHERITED:
            os.environ.pop(name, None)
        if mode != "one":
            places: Sequence[tuple[str, object]] = (
                ("RANK", rank),
                ("LOCAL_RANK", rank),
                ("WORLD_SIZE", world),
                ("LOCAL_WORLD_SIZE", world),
                ("MASTER_ADDR", "127.0.0.1"),
                ("MASTER_PORT", port),
            )
            os.environ.update({name: str(value) for name, value in places})
        # With this set accelerate would leave DeepSpeed out without a word.
        os.environ.pop("ACCELERATE_USE_CPU", None)
        if mode.startswith("zero"):
            settings = folder / f"{mode}.json"
            if rank == 0:
                settings.write_text(json.dumps(deepspeed_settings(int(mode[-1]))))
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(settings)
            _wait_for(settings)
        torch.manual_seed(0)
        call(rank)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for(path: Path) -> None:
    while not (path.is_file() and path.stat().st_size):
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
