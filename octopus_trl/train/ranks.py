"""One rank that fails ends the run on all, with its number and its reason, in bounded time.

Two nets. What a rank does by itself (drawing episodes, judging them) ends in an exchange of who
failed, so that all raise together. Everything else is watched: a rank that fails leaves a note in
the store through which the process group met, and a thread of every other rank, whose main thread
may wait in a collective that will never come, reads it and ends the process.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from trl.trainer.utils import is_async_callable

from octopus_trl.errors import RankFailed
from octopus_trl.train.weights import say

EXIT_CODE = 70  # of a process whose main thread could not be woken
NOTE = "octopus/note"  # key in the store
POLL_S = 0.5  # between looks at the store
GRACE_S = 5.0  # for the main thread to notice by itself


class Ranks:
    """The processes of a run as one that fails together.

    Args:
        accelerator: knows the process group; with one process every method does nothing.
        stop: ends this process; takes the exit code.
    """

    def __init__(self, accelerator: Any, *, stop: Callable[[int], Any] = os._exit) -> None:
        self._accelerator, self._stop = accelerator, stop
        self._store: Any = None
        self._over = threading.Event()
        self._kept: BaseException | None = None

    @property
    def rank(self) -> int:
        """Number of this process."""
        return int(self._accelerator.process_index)

    @property
    def several(self) -> bool:
        """Whether there is another process."""
        return bool(self._accelerator.num_processes > 1)

    # ---- parts that a rank does by itself

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a part without collectives; where it fails on one rank, all raise after it.

        Raises:
            RankFailed: another rank failed at it.
        """
        try:
            yield
        except Exception as error:
            self._exchange(doing, error)
            raise
        self._exchange(doing, None)

    @contextmanager
    def judging(self, trainer: Any) -> Iterator[None]:
        """Keep what a reward function raises until `trainer` has gathered rewards, then raise it.

        TRL gathers right after the functions ran, so one that raises on one rank would leave the
        others waiting.
        """
        if not self.several:
            yield
            return
        functions, self._kept = trainer.reward_funcs, None
        trainer.reward_funcs = [self._guarded(function) for function in functions]
        try:
            yield
        finally:
            trainer.reward_funcs = functions
        self._exchange("judging episodes", self._kept)
        if self._kept is not None:
            raise self._kept

    def _exchange(self, doing: str, error: BaseException | None) -> None:
        """Tell the others whether this rank failed; raise where only another one did."""
        if not self.several:
            return
        failed = torch.tensor([float(error is not None)], device=self._accelerator.device)
        if not self._accelerator.reduce(failed).item():
            return
        told = gather_object([None if error is None else _text(error)])
        if error is None:
            rank, cause = next((at, text) for at, text in enumerate(told) if text is not None)
            raise RankFailed(f"rank {rank} failed while {doing}: {cause}")

    def _guarded(self, function: Any) -> Any:
        """Wrap a reward function: what it raises is kept, and it gives zeros instead."""
        if isinstance(function, nn.Module):
            return function
        if is_async_callable(function):

            @functools.wraps(function)
            async def judge_later(*args: Any, completions: Sequence[Any], **kwargs: Any) -> Any:
                try:
                    given = await function(*args, completions=completions, **kwargs)
                    return _as_rewards(function, given, len(completions))
                except Exception as error:  # noqa: BLE001 - raised again after the exchange
                    self._kept = error
                    return [0.0] * len(completions)

            return judge_later

        @functools.wraps(function)
        def judge(*args: Any, completions: Sequence[Any], **kwargs: Any) -> Any:
            try:
                given = function(*args, completions=completions, **kwargs)
                return _as_rewards(function, given, len(completions))
            except Exception as error:  # noqa: BLE001 - raised again after the exchange
                self._kept = error
                return [0.0] * len(completions)

        return judge

    # ---- everything else

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the other ranks while a part with collectives runs.

        Raises:
            RankFailed: a collective broke because another rank had failed.
        """
        if not self.several:
            yield
            return
        self._begin()
        try:
            yield
        except RankFailed:
            raise
        except BaseException as error:
            known = self._known() if _is_broken_collective(error) else None
            if known is not None:
                raise RankFailed(known) from error
            self._tell(f"rank {self.rank} failed: {_text(error)}")
            raise
        finally:
            self._over.set()

    def _begin(self) -> None:
        store = torch.distributed.distributed_c10d._get_default_store()
        # A connection of its own: the main thread may hold the other one while it waits.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._over = threading.Event()
        threading.Thread(target=self._watch, args=(self._over,), daemon=True).start()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(POLL_S):
            try:
                note = self._read_note()
                if note is None:
                    continue
                self._store.set(f"octopus/seen/{self.rank}", "1")
            except RuntimeError:
                return  # the store went with its process, whose end breaks our collectives
            if not over.wait(GRACE_S):
                say(f"error: {note}; rank {self.rank} ends, it waited for that rank")
                sys.stdout.flush()
                self._stop(EXIT_CODE)
            return

    def _known(self) -> str | None:
        try:
            return self._read_note()
        except RuntimeError:
            return None

    def _tell(self, text: str) -> None:
        """Leave a note and wait a moment until the others have read it.

        The store may live in this process and end with it.
        """
        others = [r for r in range(self._accelerator.num_processes) if r != self.rank]
        until = time.monotonic() + 4 * POLL_S
        try:
            self._store.set(NOTE, text)
            while time.monotonic() < until:
                if all(self._store.check([f"octopus/seen/{rank}"]) for rank in others):
                    return
                time.sleep(POLL_S / 10)
        except RuntimeError:
            return

    def _read_note(self) -> str | None:
        """Read what another rank left.

        Raises:
            RuntimeError: the store is gone with its process.
        """
        return str(self._store.get(NOTE).decode()) if self._store.check([NOTE]) else None


class FailTogether:
    """The part of the trainer that ends all ranks with the one that failed."""

    _ranks: Ranks

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        with self._ranks.judging(self):
            return super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]


def _as_rewards(function: Any, given: Sequence[Any], wanted: int) -> list[float | None]:
    """Check one reward for each completion, as TRL would right before it gathers."""
    rewards = [None if reward is None else float(reward) for reward in given]
    if len(rewards) != wanted:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(f"{name} gave {len(rewards)} rewards for {wanted} completions")
    return rewards


def _is_broken_collective(error: BaseException) -> bool:
    """Whether an error may be what a collective raises when its other end is gone."""
    return type(error) is RuntimeError or isinstance(error, torch.distributed.DistError)


def _text(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
