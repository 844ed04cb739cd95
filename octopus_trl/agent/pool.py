"""Tool calls on worker threads, each with its own deadline.

The workers are daemons: a tool that never returns holds one of them until the process ends, keeps
no one else waiting (another worker takes its place) and does not stop the process from ending,
which a `ThreadPoolExecutor` would.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from octopus_trl.errors import ToolError

Outcome = Literal["running", "ok", "refused", "failed", "timeout"]


class PoolCall:
    """One call: `outcome` is "running" until it ends, then `value` is set.

    `value` is what the tool returned, or the text of the `ToolError` (refused), the exception as
    text (failed), or None (timeout).
    """

    __slots__ = ("_work", "key", "outcome", "started", "value")

    def __init__(self, work: Callable[[], Any], key: Any) -> None:
        self._work = work
        self.key = key
        self.outcome: Outcome = "running"
        self.value: Any = None
        self.started: float | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, by itself or by its deadline."""
        return self.outcome != "running"

    def run(self) -> tuple[Outcome, Any]:
        """Call the tool and name how it ended; never raises."""
        self.started = time.monotonic()
        try:
            return "ok", self._work()
        except ToolError as error:
            return "refused", str(error)
        except Exception as error:  # noqa: BLE001 - a tool's fault is one call's failure
            return "failed", f"{type(error).__name__}: {error}"


class ToolPool:
    """Runs calls; all methods but the workers' own belong to the thread that made it.

    Args:
        workers: calls that run at once; 0 runs each where it is submitted, without a deadline.
        timeout_s: seconds a call may run, its time in the queue not counted.
    """

    def __init__(self, workers: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._inline = workers == 0
        self._todo: queue.SimpleQueue[PoolCall | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[PoolCall, Outcome, Any]] = queue.SimpleQueue()
        self._running: dict[int, PoolCall] = {}
        self._next_check = 0.0
        self._most_workers, self._num_workers = workers, 0

    @property
    def busy(self) -> bool:
        """Whether some call has not ended."""
        return bool(self._running)

    def submit(self, work: Callable[[], Any], key: Any) -> PoolCall:
        """Queue a call; `key` comes back with it from `collect`."""
        call = PoolCall(work, key)
        if self._inline:
            call.outcome, call.value = call.run()
            return call
        self._running[id(call)] = call
        if len(self._running) > self._num_workers < self._most_workers:
            self._add_worker()
        self._todo.put(call)
        return call

    def collect(self, wait_s: float = 0.0) -> list[PoolCall]:
        """Give the calls that ended or ran out of time since the last look.

        Args:
            wait_s: seconds to wait for the first one if none is there.
        """
        ended: list[PoolCall] = []
        if not self._running:
            return ended
        wait = wait_s
        while True:
            try:
                call, outcome, value = (
                    self._ended.get(timeout=wait) if wait else (self._ended.get_nowait())
                )
            except queue.Empty:
                break
            wait = 0.0
            if self._running.pop(id(call), None) is not None:
                call.outcome, call.value = outcome, value
                ended.append(call)
        return ended + self._expire()

    def close(self) -> None:
        """Let idle workers end; a call that still runs is left behind."""
        for _ in range(self._num_workers):
            self._todo.put(None)
        self._running.clear()

    def _expire(self) -> list[PoolCall]:
        now = time.monotonic()
        if now < self._next_check:
            return []
        self._next_check = now + min(0.05, self._timeout_s / 4)
        late = [
            call
            for call in self._running.values()
            if call.started is not None and now - call.started > self._timeout_s
        ]
        for call in late:
            del self._running[id(call)]
            call.outcome = "timeout"
            self._add_worker()  # in place of the one that the late call holds
        return late

    def _add_worker(self) -> None:
        self._num_workers += 1
        threading.Thread(target=self._work, name="octopus-tool", daemon=True).start()

    def _work(self) -> None:
        while (call := self._todo.get()) is not None:
            outcome, value = call.run()
            self._ended.put((call, outcome, value))
            if call.outcome == "timeout":  # its place was given away
                return
