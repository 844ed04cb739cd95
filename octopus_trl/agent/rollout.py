"""Many episodes on one engine: each goes on as soon as it can, none waits for another."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from octopus_trl.agent.chat import Chat
from octopus_trl.agent.config import RolloutConfig
from octopus_trl.agent.episode import Episode
from octopus_trl.agent.feed import LAST_TURN, WARNINGS
from octopus_trl.agent.pool import ToolPool
from octopus_trl.agent.thread import Thread
from octopus_trl.agent.tools import Result, offered
from octopus_trl.errors import ConfigError, IntegrityError
from octopus_trl.protocols import BindsExample, ChecksSystem, EngineLike, SearchBackend, Tokenizer
from octopus_trl.trace import Trace

__all__ = ["EpisodeRunner", "RolloutConfig", "prompt_id_of"]

_IDLE_WAIT_S = 0.02  # look at waits and deadlines this often while only tools run
_WAIT_CHECK_S = 0.25

T = TypeVar("T")
EventSink = Callable[[str, dict[str, Any]], None]


class EpisodeRunner:
    """Runs episodes of many threads on an engine and returns their traces.

    Args:
        engine: anything that follows `EngineLike`.
        tokenizer: a transformers tokenizer with a chat template.
        tools: the corpus behind `search` and `open`; one that binds to an example is asked once
            a question; None offers neither tool.
        config: limits and sampling.

    Raises:
        ConfigError: the template or a limit cannot work; says which and what to do.
    """

    def __init__(
        self,
        engine: EngineLike,
        tokenizer: Tokenizer,
        tools: SearchBackend | BindsExample | None,
        config: RolloutConfig | None = None,
    ) -> None:
        self.engine = engine
        self.config = config = config or RolloutConfig()
        if config.reads_others and isinstance(engine, ChecksSystem):
            engine.check_system(exchange=config.exchange, position=config.position)
        self._corpus = tools
        self.tools = offered(primitives=config.primitives, corpus=tools is not None)
        self.chat = Chat(
            tokenizer,
            self.tools,
            system_prompt=config.system_prompt,
            compact=config.compact_tools,
            template_kwargs=config.template_kwargs,
        )
        for text in (WARNINGS if config.agent == "compact" else LAST_TURN).values():
            needed = len(self.chat.tool_ids([Result(text)], closed=False, thinking=True)) + 1
            if needed > config.reserve // 2:
                raise ConfigError(
                    f"reserve_tokens={config.reserve} (window {config.window}): half of it must "
                    f"hold the last warning, {needed} tokens; set reserve_tokens to at least "
                    f"{2 * needed} and window to at least {4 * needed}"
                )

    def run(
        self,
        examples: Sequence[Mapping[str, Any]],
        *,
        group_size: int = 1,
        seed: int = 0,
        step: int | None = None,
        on_trace: Callable[[Trace], None] | None = None,
        on_event: EventSink | None = None,
        unreadable: Sequence[Collection[int]] | None = None,
        stop: Callable[[], str | None] | None = None,
    ) -> list[Trace]:
        """Run `group_size` episodes of each example.

        Args:
            examples: mappings with `question` or `prompt`, and `id` where there is one.
            seed: with the policy step, prompt, rollout, thread and turn it seeds every draw.
            step: policy step; None takes the config's.
            on_trace: called with each episode as it ends, so that an interruption loses none.
            on_event: called with an episode's id and each of its events as it happens.
            unreadable: for each example the threads that nobody may read, for counterfactuals.
            stop: asked before each step of the engine; a reason ends every live episode as `cut`,
                and no other begins.

        Returns:
            Traces, rollouts of one example adjacent, in the order of `examples`; reward unset.
            After a stop those of the episodes that had begun.

        Raises:
            ConfigError: group_size below 1, or an example without a question.
        """
        if group_size < 1:
            raise ConfigError(f"group_size={group_size}: must be at least 1")
        run = _Run(self, on_event)
        hidden = unreadable or [()] * len(examples)
        waiting = deque(self._plan(examples, group_size, seed, step, run, hidden))
        order = [episode.id for episode in waiting]
        traces: dict[str, Trace] = {}
        try:
            while waiting or run.live:
                while waiting and len(run.live) < self.config.max_live_episodes:
                    if not run.begin(waiting[0]):
                        break
                    waiting.popleft()
                if stop is not None and (reason := stop()) is not None:
                    waiting.clear()
                    run.cut(reason)
                run.turn()
                for episode in run.take_done():
                    trace = traces[episode.id] = episode.trace()
                    if on_trace is not None:
                        on_trace(trace)
        finally:
            run.close()
        return [traces[episode_id] for episode_id in order if episode_id in traces]

    def _plan(
        self,
        examples: Sequence[Mapping[str, Any]],
        group_size: int,
        seed: int,
        step: int | None,
        run: _Run,
        unreadable: Sequence[Collection[int]],
    ) -> Iterator[Episode]:
        """Make every episode, so that an example that cannot run is refused before any does."""
        seen: dict[str, int] = {}
        for example, hidden in zip(examples, unreadable, strict=True):
            self.chat.prompt(example)
            prompt_id = prompt_id_of(example)
            # A prompt that comes twice goes on counting rollouts, so that no seed is used twice.
            first = seen.get(prompt_id, 0)
            seen[prompt_id] = first + group_size
            corpus = _Corpus(self._corpus, example)
            for rollout in range(first, first + group_size):
                yield Episode(
                    {
                        "prompt_id": prompt_id,
                        "rollout": rollout,
                        "seed": seed,
                        "step": self.config.step if step is None else step,
                    },
                    example,
                    engine=self.engine,
                    chat=self.chat,
                    tools=self.tools,
                    corpus=corpus.backend,
                    pool=run.pool,
                    config=self.config,
                    tickets=run.tickets,
                    unreadable=hidden,
                )


class _Corpus:
    """The corpus as one question sees it; bound on first use, shared by its rollouts."""

    def __init__(
        self, corpus: SearchBackend | BindsExample | None, example: Mapping[str, Any]
    ) -> None:
        self._corpus, self._example = corpus, example
        self._lock = threading.Lock()
        self._bound: SearchBackend | None = None

    def backend(self) -> SearchBackend:
        """Give the backend; called on worker threads."""
        with self._lock:
            if self._bound is None:
                assert self._corpus is not None, "corpus tools are offered with a corpus only"
                corpus = self._corpus
                bound = corpus.bind(self._example) if isinstance(corpus, BindsExample) else corpus
                self._bound = bound
            return self._bound


class _Run:
    """What one call of `run` holds: live episodes, turns in flight, tools at work."""

    def __init__(self, runner: EpisodeRunner, on_event: EventSink | None) -> None:
        self.live: dict[str, Episode] = {}
        self.tickets: dict[int, tuple[Episode, Thread]] = {}
        self.pool = ToolPool(runner.config.tool_workers, runner.config.tool_timeout_s)
        self._engine, self._on_event = runner.engine, on_event
        self._checks_waits = not runner.config.deterministic
        self._next_check = 0.0
        self._num_told: dict[str, int] = {}
        self._is_full = False

    def begin(self, episode: Episode) -> bool:
        """Start an episode; False where the pools have no room for it before another ends."""
        if self._is_full:
            return False
        patient = bool(self.live)
        self.live[episode.id] = episode
        if self._attempt(episode, episode.start, patient=patient) is False:
            del self.live[episode.id]
            self._is_full = True
            return False
        return True

    def turn(self) -> None:
        """Let the engine take one step, hand out what ended, and hold the rounds that are due."""
        touched: dict[str, Episode] = {}
        if self._engine.has_work:
            for finished in self._engine.step():
                place = self.tickets.pop(finished.ticket, None)
                if place is None:
                    continue  # taken back in the very step that ended it
                episode, thread = place
                self._attempt(episode, episode.turn_ended, thread, finished)
                touched[episode.id] = episode
        idle = not touched and not self._engine.has_work
        for call in self.pool.collect(_IDLE_WAIT_S if idle else 0.0):
            touched[call.key.id] = call.key
        if self._checks_waits and time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + _WAIT_CHECK_S
            touched = self.live
        for episode in touched.values():
            self._attempt(episode, episode.advance)
        if not self._engine.has_work and not self.pool.busy:
            for episode in self.live.values():
                if not episode.done:
                    episode.abort(RuntimeError("nothing is left that could wake its threads"))
        self._tell()

    def cut(self, reason: str) -> None:
        """End every live episode where it stands."""
        for episode in self.live.values():
            self._attempt(episode, episode.cut, reason)

    def take_done(self) -> list[Episode]:
        """Give the episodes that ended and forget them."""
        done = [episode for episode in self.live.values() if episode.done]
        for episode in done:
            self._is_full = False
            del self.live[episode.id]
            self._num_told.pop(episode.id, None)
        return done

    def close(self) -> None:
        """Give back what live episodes hold, whatever interrupted them."""
        for episode in self.live.values():
            with contextlib.suppress(Exception):  # the first error is the one to show
                episode.abort(RuntimeError("interrupted"))
        self.pool.close()

    def _attempt(
        self, episode: Episode, step: Callable[..., T], *args: Any, **kwargs: Any
    ) -> T | None:
        """Carry a step out; what fails ends this episode and no other."""
        if episode.done:
            return None
        try:
            return step(*args, **kwargs)
        except IntegrityError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
            episode.abort(error)
            return None

    def _tell(self) -> None:
        if self._on_event is None:
            return
        for episode in self.live.values():
            told = self._num_told.get(episode.id, 0)
            self._num_told[episode.id] = len(episode.events)
            for event in episode.events[told:]:
                self._on_event(episode.id, event)


def prompt_id_of(example: Mapping[str, Any]) -> str:
    """Give the name of a prompt: its `id`, else a hash of its text."""
    if "id" in example:
        return str(example["id"])
    text = json.dumps(example.get("prompt", example.get("question")), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
