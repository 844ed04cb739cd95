"""One attempt at one question: turns that closed become effects, effects become segments.

Rounds are the logical clock. In a round the calls of every closed turn take effect in (turn,
thread, call) order against segments closed at its start; only then are forked, mounted and
rewound cursors fed their tool text. With `deterministic` a round waits until no thread is
writing, so a trace depends on nothing but the sampled tokens; without it a round is held as soon
as one turn has closed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from octopus_trl.agent import feed
from octopus_trl.agent.chat import Chat
from octopus_trl.agent.config import RolloutConfig
from octopus_trl.agent.effects import awaited_have_ended, plan_turn, run_agenda
from octopus_trl.agent.pool import PoolCall, ToolPool
from octopus_trl.agent.recorder import Recorder
from octopus_trl.agent.thread import Agenda, Status, Thread
from octopus_trl.agent.tools import CORPUS_TOOLS, Result, ToolCall, ToolSpec, run_corpus_tool
from octopus_trl.errors import BudgetExceeded, ConfigError, IntegrityError, PoolExhausted
from octopus_trl.protocols import EngineLike, Finished, SearchBackend
from octopus_trl.trace import Trace


class Episode:
    """The state machine of one episode on any engine.

    Args:
        identity: `prompt_id`, `rollout`, `seed` and `step`; with thread and turn they seed draws.
        corpus: gives the backend of this question; called on worker threads.
        tickets: the runner's table of turns in flight, which this episode writes to.
        unreadable: threads that no thread may read, nor what descends from them.
    """

    def __init__(
        self,
        identity: Mapping[str, Any],
        example: Mapping[str, Any],
        *,
        engine: EngineLike,
        chat: Chat,
        tools: tuple[ToolSpec, ...],
        corpus: Callable[[], SearchBackend],
        pool: ToolPool,
        config: RolloutConfig,
        tickets: dict[int, tuple[Episode, Thread]],
        unreadable: Collection[int] = (),
    ) -> None:
        self.identity = dict(identity)
        self.id = "{prompt_id}-s{seed}-t{step}-r{rollout}".format(**identity)
        self.example = example
        self.config = config
        self.unreadable = frozenset(unreadable)
        self.threads: dict[int, Thread] = {}
        self.recorder = Recorder(config.position)
        self.events: list[dict[str, Any]] = []
        self.done = False
        self.round = 0
        self.engine, self.chat, self.tickets = engine, chat, tickets
        self._corpus, self._pool = corpus, pool
        self._newborn: list[Thread] = []
        self._tool_names = tuple(tool.name for tool in tools)
        self._began = time.monotonic()
        self._policy_version = engine.policy_version

    def start(self, *, patient: bool = False) -> bool:
        """Open the root on its prompt and let it write.

        Args:
            patient: give up without a trace where the pools have no room for the prompt now.

        Returns:
            Whether the episode has started.
        """
        self._began = time.monotonic()
        root = self._add_thread(None, "")
        prompt = self.chat.prompt(self.example)
        self.write_prompt(root, prompt)
        try:
            root.cursor = self.engine.open(prompt)
        except PoolExhausted:
            if not patient:
                raise
            self.threads, self.recorder = {}, Recorder(self.config.position)
            return False
        self.attempt(root, feed.start, self, root)
        self._settle()
        return True

    def turn_ended(self, thread: Thread, finished: Finished) -> None:
        """Take a turn that the engine finished and start the tools that it calls."""
        thread.ticket = None
        thread.finished = finished
        if finished.reason == "error":
            thread.agenda = Agenda()
            return
        thread.read = self.chat.read_turn(finished.tokens)
        thread.agenda = plan_turn(
            thread.read,
            offered=self._tool_names,
            disabled=self.config.disabled_tools,
            last_turn=thread.last_turn,
            launch=self._launch,
        )

    def advance(self) -> None:
        """Hold every round that can be held now."""
        while not self.done and (closed := self._next_round()) is not None:
            self._hold_round(closed)
            self._settle()

    def abort(self, error: BaseException) -> None:
        """End the episode because something outside its threads failed."""
        self._stop("failed", f"{type(error).__name__}: {error}")

    def cut(self, reason: str) -> None:
        """End the episode where it stands; what turns in flight have drawn stays on the record."""
        self._stop("cut", reason)

    def trace(self) -> Trace:
        """Give the record; complete once `done`."""
        root = self.threads[0]
        meta = {
            **self.identity,
            "question": self._question(),
            "result": root.result,
            "agent": self.config.agent,
            "rounds": self.round,
            "clock": "rounds" if self.config.deterministic else "seconds",
        }
        return Trace(
            episode_id=self.id,
            prompt_id=str(self.identity["prompt_id"]),
            policy_version=self._policy_version,
            truncated=root.status != "committed",
            threads=[thread.record() for thread in self.threads.values()],
            segments=self.recorder.segments,
            events=self.events,
            meta=meta,
            exchange=self.config.exchange,
            position=self.config.position,
        )

    def _question(self) -> str | None:
        asked = self.example.get("prompt", self.example.get("question"))
        return asked if isinstance(asked, str) or not asked else asked[-1]["content"]

    def note(self, kind: str, thread: Thread, **facts: Any) -> None:
        """Put an event on the record."""
        event = {"type": kind, "round": self.round, "thread": thread.id, **facts}
        if not self.config.deterministic:
            event["time_s"] = self.time()
        self.events.append(event)

    def clock(self) -> float:
        """Give seconds since the episode began."""
        return time.monotonic() - self._began

    def end(self, thread: Thread, status: Status, **facts: Any) -> None:
        """Let a thread write no more."""
        thread.status = status
        thread.waiting_for = frozenset()
        self.note("end", thread, status=status, **facts)

    def new_thread(self, parent: Thread, task: str) -> Thread:
        """Start a child at the end of its parent's last turn, which copies nothing, or in a fresh
        context of its own.
        """
        number, config = len(self.threads), self.config
        text = (
            f"you are thread {number}; task: {task}; budget {config.window} tokens, "
            f"{config.max_turns} turns"
        )
        if config.exchange == "summary":
            prompt = self.chat.task_prompt(self.example, text)
            cursor = self.engine.open(prompt)
            child = self._add_thread(parent, task)
            child.cursor, child.base_segment = cursor, parent.head
            self.write_prompt(child, prompt)
            child.agenda = Agenda()
        else:
            cursor, origin = feed.fork(self, parent)
            child = self._add_thread(parent, task)
            child.cursor, child.origin = cursor, origin
            child.base_segment = child.head = parent.head
            child.base_tokens = child.num_tokens = parent.num_tokens
            child.agenda = Agenda(results=[Result(text)])
        self._newborn.append(child)
        self.note("fork", parent, child=child.id, segment=parent.head, task=task)
        return child

    def write_prompt(self, thread: Thread, prompt: list[int]) -> None:
        """Begin a root of the trace with a thread's prompt."""
        self._write(thread, "prompt", prompt, time_s=self.time())
        thread.take_snapshot(closed=False, thinking=self.chat.opens_thinking)

    def _next_round(self) -> list[Thread] | None:
        """List the threads whose turns take effect now, or None where there is nothing to do."""
        running = [thread for thread in self.threads.values() if thread.status == "running"]
        ready = [thread for thread in running if thread.ready]
        if self.config.deterministic and len(ready) < len(running):
            return None
        if not ready and not any(self._may_go_on(thread) for thread in self.threads.values()):
            return None
        return sorted(ready, key=lambda thread: (thread.num_turns, thread.id))

    def _may_go_on(self, thread: Thread) -> bool:
        if thread.status != "waiting":
            return False
        if awaited_have_ended(self, thread):
            return True
        waited = self.clock() - thread.waiting_since
        return not self.config.deterministic and waited > self.config.wait_timeout_s

    def _hold_round(self, closed: list[Thread]) -> None:
        self.round += 1
        for thread in closed:
            self._record_action(thread)
        spoken: list[Thread] = []
        for thread in closed:
            if self._take_effect(thread):
                spoken.append(thread)
        woken = True
        while woken and not self.threads[0].ended:
            woken = False
            sleeping = [thread for thread in self.threads.values() if thread.status == "waiting"]
            for thread in sorted(sleeping, key=lambda thread: (thread.num_turns, thread.id)):
                if self._may_go_on(thread):
                    thread.status = "running"
                    woken = True
                    if self._take_effect(thread):
                        spoken.append(thread)
        if self.threads[0].ended:
            return
        # A child's first text is due in the round that forked it.
        spoken += self._newborn
        self._newborn = []
        feed.feed_round(self, sorted(spoken, key=lambda thread: (thread.num_turns, thread.id)))

    def _take_effect(self, thread: Thread) -> bool:
        agenda = thread.agenda
        if agenda is None or thread.ended or self.threads[0].ended:
            return False
        ended = run_agenda(self, thread, agenda)
        if not ended and not thread.ended:  # it waits
            return False
        asked = [
            call.arguments if isinstance(call, ToolCall) and call.name in CORPUS_TOOLS else None
            for call in agenda.calls
        ]
        self.note(
            "turn",
            thread,
            turn=thread.turn,
            segment=thread.head,
            calls=[list(pair) for pair in zip(agenda.names, agenda.outcomes)],
            **({"arguments": asked} if any(asked) else {}),
        )
        if thread.ended:
            return False
        if thread.last_turn not in (None, "summary") and (
            agenda.rewind_to is None or thread.last_turn == "turns"
        ):
            self.end(thread, "cut", reason=thread.last_turn)
            return False
        return True

    def _add_thread(self, parent: Thread | None, task: str) -> Thread:
        depth = 0 if parent is None else parent.depth + 1
        thread = Thread(len(self.threads), parent, task, depth)
        self.threads[thread.id] = thread
        return thread

    def _launch(self, call: ToolCall) -> PoolCall:
        work = partial(
            run_corpus_tool,
            call,
            self._corpus,
            k=self.config.search_k,
            page_tokens=self.config.page_tokens,
        )
        return self._pool.submit(work, self)

    def _record_action(self, thread: Thread) -> None:
        """Write a turn that ended, and the text that was fed before it, on the record."""
        finished, fed = thread.finished, thread.fed
        assert finished is not None, "a closed turn has its tokens"
        thread.finished = thread.fed = None
        thread.num_turns += 1
        if finished.tokens:
            if fed is not None and fed.tokens:
                self._write(
                    thread,
                    "tool",
                    fed.tokens,
                    mounts=fed.mounts,
                    pasted=fed.pasted,
                    time_s=fed.time_s,
                )
                if not thread.snapshots:
                    thread.take_snapshot(closed=False, thinking=self.chat.opens_thinking)
            tokens, logps = finished.tokens, finished.logps
            self._write(thread, "action", tokens, logps=logps, time_s=self.time())
        if finished.reason == "error":
            self.end(thread, "failed", reason=finished.error)
        elif thread.read is not None:
            thread.take_snapshot(closed=thread.read.closed, thinking=thread.read.thinking)
            feed.keep_boundary(self, thread)

    def _write(self, thread: Thread, kind: str, tokens: list[int], **facts: Any) -> None:
        segment = self.recorder.add(thread.id, thread.head, kind, tokens, **facts)
        thread.append(segment, len(tokens))

    def attempt(self, thread: Thread, step: Callable[..., None], *args: Any) -> None:
        """Carry a step out; what fails ends this thread and no other."""
        try:
            step(*args)
        except BudgetExceeded as error:
            self.end(thread, "cut", reason=str(error))
        except IntegrityError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, siblings go on
            self.end(thread, "failed", reason=f"{type(error).__name__}: {error}")

    def _stop(self, status: Status, reason: str) -> None:
        root = self.threads.get(0)
        if root is not None and not root.ended:
            self.end(root, status, reason=reason)
        self._settle()

    def _settle(self) -> None:
        """Once the root has ended, end the rest and give everything back."""
        if self.done or not self.threads[0].ended:
            return
        for thread in self.threads.values():
            if thread.ticket is not None:
                self.tickets.pop(thread.ticket, None)
                try:
                    tokens, logps = self.engine.cancel(thread.ticket)
                except ConfigError:  # the engine knows no such turn: nothing of it was drawn
                    tokens, logps = [], []
                thread.finished = Finished(thread.ticket, tokens, logps, "length")
                thread.ticket, thread.read = None, None
            if thread.finished is not None:
                self._record_action(thread)
            if not thread.ended:
                self.end(thread, "cut", reason="the root has ended")
        for thread in self.threads.values():
            feed.release(self, thread, *feed.CURSORS)
        self.done = True

    def time(self) -> float | None:
        """Give the time for the record; the logical clock has none."""
        return None if self.config.deterministic else round(self.clock(), 6)
