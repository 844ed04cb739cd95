"""The runs behind `test_killed.py`: runs that are killed again and again, and one that is not."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from octopus_trl.train import checkpoint
from tests.tiny import SHORT_LENGTHS
from tests.train.equal_worker import TARGETS, full_parameter
from tests.train.forks import fork_ranks
from tests.train.runs import SHALLOW, adapter, asked_rows, make_trainer, replayed

STEPS = 4
# Two steps a generation: steps 1 and 3 end inside a buffer of traces that are not yet trained on.
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "num_generations": 2,
    "per_device_train_batch_size": 2,
    "steps_per_generation": 2,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 2,
    "lr_scheduler_type": "linear",
    "max_turns": 2,
    "max_new_tokens": 4,
    "window": 1024,
    "num_pages": 200,
    "num_states": 16,
}
# For each run: where a rank is killed, in which step or in which checkpoint, and the rank.
KILLS: dict[str, list[tuple[str, int, int]]] = {
    "one": [
        ("in a backward pass", 0, 0),
        ("while weights are written", 1, 0),
        ("in a backward pass", 1, 0),
        ("before the manifest", 2, 0),
        ("before the rename", 3, 0),
        ("in a generation", 2, 0),
        ("while an old one is removed", 3, 0),
    ],
    # Hundredths of a second of work, drawn anew each time; a run takes about 200.
    "any": [("at any moment", random.SystemRandom().randrange(20, 200), 0) for _ in range(8)],
    "ddp": [("in a backward pass", 1, 1), ("before the manifest", 2, 0)],
    "zero2": [("while weights are written", 1, 0), ("in a backward pass", 2, 1)],
    "zero3": [("in a backward pass", 1, 1), ("before the rename", 2, 0)],
}
WORLD = {"one": 1, "any": 1}
DRAWN = "kills.txt"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(trainer: Any, point: str, at: int) -> None:
    """Have this process killed when it comes to a point.

    Args:
        at: the step under way, or the number of the checkpoint that is being written; of "at any
            moment" the hundredths of a second that this process works first.
    """
    if point == "at any moment":
        until = time.process_time() + at / 100

        def wait_and_die() -> None:
            while time.process_time() < until:
                time.sleep(1e-3)
            die()

        threading.Thread(target=wait_and_die, daemon=True).start()
        return

    def before(owner: Any, name: str, when: Callable[..., bool]) -> None:
        usual = getattr(owner, name)

        def stop_or_go(*given: Any, **named: Any) -> Any:
            if when(*given, **named):
                die()
            return usual(*given, **named)

        setattr(owner, name, stop_or_go)

    def now(*given: Any, **named: Any) -> bool:
        return bool(trainer.state.global_step == at)

    if point == "in a backward pass":
        before(trainer.accelerator, "backward", now)
    elif point == "in a generation":
        before(trainer._policy, "_awake", now)
    elif point == "while weights are written":
        usual = trainer._save

        def save_a_part(folder: str, **named: Any) -> None:
            usual(folder, **named)
            if trainer.state.global_step == at:
                written = sorted(Path(folder).rglob("*.safetensors"))
                os.truncate(written[0], written[0].stat().st_size // 2)
                die()

        trainer._save = save_a_part
    elif point == "before the manifest":
        before(checkpoint, "publish", now)
    elif point == "before the rename":
        here = checkpoint.STAGING
        before(Path, "rename", lambda self, target: self.parent.name == here and now())
    elif point == "while an old one is removed":
        remove = shutil.rmtree

        def remove_a_part(path: Any, **named: Any) -> None:
            if str(path).endswith(checkpoint.DOOMED) and Path(path).is_dir() and now():
                next(file for file in Path(path).rglob("*") if file.is_file()).unlink()
                die()
            remove(path, **named)

        shutil.rmtree = remove_a_part  # type: ignore[assignment]
    else:
        raise ValueError(point)


def run(folder: Path, mode: str, rank: int, kill: tuple[str, int, int] | None) -> None:
    """Train from the newest whole checkpoint, if there is one, to the end or until killed."""
    out = folder / "run"
    world = WORLD.get(mode, 2)
    trainer = make_trainer(
        out,
        None,
        asked_rows(4 * world),
        peft_config=adapter(lora_dropout=0.2, target_modules=list(TARGETS)),
        shape=SHALLOW,
        **SETTINGS,
    )
    if kill is not None and kill[2] == rank:
        arm(trainer, kill[0], kill[1])
    resume = checkpoint.last_checkpoint(out) is not None
    # One process draws its episodes for real; several replay them, which is quicker.
    with nullcontext() if world == 1 else replayed(sizes=(4,), lengths=SHORT_LENGTHS):
        trainer.train(resume_from_checkpoint=resume)
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    found = {
        "log": trainer.state.log_history,
        "parameters": {
            name: full_parameter(parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        },
        "step": trainer._step,
    }
    torch.save(found, folder / f"found_{rank}.pt")


def main(out: Path, *modes: str) -> None:
    """Run each asked mode once straight, and once killed at every point of its list."""
    for mode in modes:
        world = WORLD.get(mode, 2)
        (out / mode).mkdir(parents=True, exist_ok=True)
        (out / mode / DRAWN).write_text(str(KILLS[mode]))
        for name, kills in (("straight", [None]), ("killed", [*KILLS[mode], None])):
            folder = out / mode / name
            for kill in kills:

                def call(rank: int, kill: Any = kill, mode: str = mode, folder: Path = folder):  # type: ignore[no-untyped-def]
                    run(folder, mode, rank, kill)

                codes = fork_ranks(world, "one" if world == 1 else mode, folder, call)
                ends = {-signal.SIGKILL} if kill is not None else {0}
                if kill is not None and kill[0] == "at any moment":
                    ends.add(0)  # it was done before
                if codes[0 if kill is None else kill[2]] not in ends or (not kill and any(codes)):
                    sys.exit(f"{mode}, {name}, {kill}: ranks ended with {codes}; see {folder}")
