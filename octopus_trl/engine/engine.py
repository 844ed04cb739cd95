"""The engine: cursors over one pool of pages, turns sampled on many of them at once."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octopus_trl.engine.checks import (
    check_at_least,
    check_batch,
    check_kernels,
    check_length,
    check_place,
    check_tokens,
    check_turn,
    check_usable,
)
from octopus_trl.engine.counters import Counters
from octopus_trl.engine.cursor import Cursor
from octopus_trl.engine.host_memory import keep_freed_memory
from octopus_trl.engine.opening import open_prompt
from octopus_trl.engine.paths import CPU_CHUNK, GPU_CHUNK, Paths
from octopus_trl.engine.pools import Pools
from octopus_trl.engine.primitives import Primitives
from octopus_trl.engine.prompts import Forgotten, PromptCache
from octopus_trl.engine.reading import check_reading, read_span
from octopus_trl.engine.sizes import budget_of, settle, warn_of_thrash
from octopus_trl.engine.turn import Turn
from octopus_trl.engine.widths import decode_widths
from octopus_trl.errors import ConfigError
from octopus_trl.models import spec_of, unwrap
from octopus_trl.protocols import Finished, SamplingParams


class Engine:
    """Runs a prepared model over shared pages (DESIGN §4).

    Forking, mounting and going back to a snapshot touch no tensor. On a CPU in float32, what a
    cursor computes does not depend on which others run beside it, bit by bit.

    Args:
        model: a prepared model, PEFT-wrapped or not; run in evaluation mode and put back after.
        page_size: token slots of a page, at least 1.
        num_pages: pages of the pool; None takes a share of the free memory.
        num_states: recurrent states held at once; None takes a share. When they run out the states
            of snapshots, then of idle cursors, are parked, or dropped and built again when needed.
        device: where the model is; None asks the model.
        max_snapshots: boundaries whose state a cursor keeps: its fork point and the last others.
        prefill_chunk: most tokens of one prefill pass; None takes 512, on a GPU 2,048.
        decode_width: rows of every decode pass; None takes the least of several widths that holds
            the rows, on a CPU only widths that are seen to agree bit by bit. On a GPU a cursor is
            independent of its batch, bit by bit, only where this is given, which is slower.
        fused: run fused passes, captured as graphs; None does so on a GPU, for a model that has
            them in half precision. False runs the model's own forward.
        merge_adapters: fused passes multiply by a merged copy of the adapted weights.
        park_bytes: pinned host memory for states that are not about to step; 0 parks none, None
            takes a share of the free host memory beside a GPU and nothing on a CPU.

    Raises:
        ConfigError: a value is outside its range, or the model is not prepared.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        page_size: int,
        num_pages: int | None = None,
        num_states: int | None = None,
        device: torch.device | str | None = None,
        max_snapshots: int = 4,
        prefill_chunk: int | None = None,
        decode_width: int | None = None,
        fused: bool | None = None,
        merge_adapters: bool = False,
        park_bytes: int | None = None,
    ) -> None:
        spec = spec_of(model)
        weight = unwrap(model).get_input_embeddings().weight
        place = check_place(device, weight.device)
        check_kernels(spec, place)
        check_at_least(0, park_bytes=park_bytes)
        check_at_least(
            1,
            page_size=page_size,
            num_pages=num_pages,
            num_states=num_states if spec.is_hybrid else None,
            max_snapshots=max_snapshots,
            prefill_chunk=prefill_chunk,
            decode_width=decode_width,
        )
        chunk = prefill_chunk or (GPU_CHUNK if place.type == "cuda" else CPU_CHUNK)
        widths = (decode_width,) if decode_width else decode_widths(unwrap(model), place)
        sizes = settle(
            spec,
            budget_of(place, spec, weight.dtype, prefill_chunk=chunk, rows=widths[-1]),
            page_size=page_size,
            dtype=weight.dtype,
            num_pages=num_pages,
            num_states=num_states,
            park_bytes=park_bytes,
        )
        warn_of_thrash(spec, sizes, max_snapshots)
        self.model, self.spec, self.page_size = model, spec, page_size
        self.num_pages, self.num_states, _ = sizes
        self.max_snapshots = max_snapshots
        self.counters = Counters()
        self._pools = Pools(spec, sizes, page_size, weight.dtype, place, self.counters)
        self._forgotten = Forgotten()
        self._paths = Paths(
            model, self._pools, self.counters, widths, chunk, fused=fused, merge=merge_adapters
        )
        self._tickets = itertools.count()
        self._policy_version = 0
        self._epoch = 0
        if place.type == "cpu":
            keep_freed_memory()
        self._start_empty()
        self._pools.take()

    def open(self, tokens: Sequence[int]) -> Cursor:
        """Return a new cursor after `tokens`, sharing all that earlier prompts have in common with
        it: equal prompts bit by bit, others up to rounding.

        Raises:
            ConfigError: no token, or one outside the vocabulary.
            PagesExhausted, StatesExhausted: too little room; nothing was changed.
        """
        prompt = check_tokens(tokens, self.spec.vocab_size, at_least=1)
        self._check_awake()
        with self.counters.timed("open"), self._runner.evaluating():
            node = open_prompt(self._runner, self._prompts, prompt, self._epoch)
            cursor = self._primitives.make(self, node, None)
            cursor._counted = len(prompt)
            self._tree.drop(node)
            return cursor

    def fork(self, cursor: Cursor) -> Cursor:
        """Return a new cursor at the same place; copies nothing."""
        with self.counters.timed("fork"):
            self._usable(cursor)
            self.counters.forks += 1
            with self.counters.copying("fork"):
                return self._primitives.fork(cursor)

    def extend(self, cursor: Cursor, tokens: Sequence[int]) -> Cursor:
        """Append `tokens` to the cursor's chain and return it; no token changes nothing.

        Raises:
            PagesExhausted, StatesExhausted: too little room; nothing was changed.
        """
        with self.counters.timed("extend"), self._runner.evaluating():
            self._usable(cursor, idle=True)
            self._check_awake()
            new = check_tokens(tokens, self.spec.vocab_size)
            if new:
                node = self._runner.grow(
                    cursor._tail, new, cursor._pending, cursor._position, self._epoch
                )
                self._primitives.advance(cursor, node)
                self.counters.extended(cursor, len(new))
            return cursor

    def mount(
        self,
        cursor: Cursor,
        source: Cursor,
        since: Cursor | None = None,
        *,
        position: str = "jump",
        exchange: str = "mount",
    ) -> Cursor:
        """Make readable what `source`'s chain holds after `since`, less what `cursor` sees and what
        `source` itself mounted; a span that holds nothing new changes nothing.

        Args:
            since: a cursor on the same chain, or on one that left it: then what follows their last
                common boundary. None: after the point where `source` was forked.
            position, exchange: where `cursor` goes on, and how it reads; see `read_span`.
        """
        with self.counters.timed("mount"):
            self._usable(cursor, idle=True)
            for each in (source, since or source):
                self._usable(each)
            read_span(self._primitives, self._runner, cursor, source, since, position, exchange)
            return cursor

    def check_system(self, *, exchange: str, position: str) -> None:
        """Refuse what `mount` would refuse, before anything runs; raises `ConfigError`."""
        check_reading(self.model, position, exchange)

    def rewind(self, cursor: Cursor, num_tokens: int) -> Cursor:
        """Keep the first `num_tokens` tokens of the chain, drop mounts made later.

        Raises:
            ConfigError: `num_tokens` is not in 1..cursor.num_tokens.
            StatesExhausted: the state must be rebuilt and no slot is free; nothing was changed.
        """
        with self.counters.timed("rewind"):
            self._usable(cursor, idle=True)
            check_length(num_tokens, cursor.num_tokens)
            node = self._tree.locate(cursor._tail, num_tokens)
            if self.spec.is_hybrid and not node.has_state:
                self._check_awake()
                with self._runner.evaluating():
                    self._runner.ensure_state(node)
            with self.counters.copying("rewind"):
                self._primitives.rewind(cursor, node)
            cursor._counted = min(cursor._counted, num_tokens)
            self.counters.rewinds += 1
            return cursor

    def close(self, cursor: Cursor) -> None:
        """Release the cursor, its turn cancelled; pages that others reach stay."""
        if not isinstance(cursor, Cursor) or cursor._engine is not self:
            raise ConfigError(f"{cursor!r} is no cursor of this engine")
        if cursor._turn is not None:
            self._scheduler.cancel(cursor._turn, keep=False)
        if id(cursor) in self._primitives.cursors:  # a second call finds it gone
            self._primitives.close(cursor)
        cursor._closed = True

    def logits(self, cursor: Cursor) -> Tensor:
        """Return the next token's logits [vocab], float32; mounts count from the next `extend`."""
        self._usable(cursor)
        self._check_awake()
        with self._runner.evaluating():
            hidden = self._runner.ensure_hidden(cursor._tail)
            return self._runner.logits(hidden[None])[0]

    def generate(
        self,
        cursors: Sequence[Cursor],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        until: Collection[int],
    ) -> list[tuple[list[int], list[float]]]:
        """Sample one turn on each cursor and return `(tokens, logps)` in their order.

        Args:
            sampling: one for all, or one a cursor; the same seed draws the same uniforms.
            until: stop ids, kept in the output.

        Raises:
            OctopusError: what ended a turn early, after all others ran to their ends.
        """
        wanted = check_batch(cursors, sampling, until)
        for cursor in cursors:
            self._usable(cursor, idle=True)
        tickets = [self.submit(cursor, [], params, until=until) for cursor, params in wanted]
        ended = self._scheduler.run(tickets)
        for turn in ended:
            if turn.error is not None:
                raise turn.error
        return [(turn.finished.tokens, turn.finished.logps) for turn in ended]

    def submit(
        self,
        cursor: Cursor,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        until: Collection[int],
    ) -> int:
        """Queue: feed `tokens`, then sample until a stop id. Returns a ticket.

        When the turn ends its cursor has grown by `tokens` and all that was drawn, the stop token
        included; a turn that fails before all of `tokens` are through leaves the cursor as it was.
        When pages run out the youngest turns pause and go on later with the same draws; one that
        finds no room again, though no other runs, fails with nothing drawn.
        """
        self._usable(cursor, idle=True)
        self._check_awake()
        given = check_tokens(tokens, self.spec.vocab_size)
        check_turn(sampling, until)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        turn = Turn(next(self._tickets), cursor, given, sampling, frozenset(until), seed)
        self._scheduler.submit(turn)
        return turn.ticket

    def step(self) -> list[Finished]:
        """Run one iteration over everything queued and return the turns that ended in it."""
        return [ended.finished for ended in self._scheduler.step()]

    def cancel(self, ticket: int) -> tuple[list[int], list[float]]:
        """Take a queued or running turn out and return what it had sampled.

        The cursor ends after exactly that; if nothing was fed to it yet, or what a paused turn had
        drawn fits no more, nothing is returned and it is as before `submit`.

        Raises:
            ConfigError: no such turn is queued or running.
        """
        turn = self._scheduler.cancel(ticket)
        if turn is None:
            raise ConfigError(f"ticket={ticket!r}: no turn of that number is queued or running")
        return turn.tokens, turn.logps

    @property
    def has_work(self) -> bool:
        """Whether a submitted turn has not been returned by `step`."""
        return self._scheduler.has_work

    @property
    def policy_version(self) -> int:
        """Optimizer step of the weights that the engine runs; setting it is
        `set_policy_version`.
        """
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self.set_policy_version(version)

    def set_policy_version(self, version: int) -> None:
        """Say that the weights changed: cursors and prompts of before become stale.

        Raises:
            ConfigError: the version is below the present one.
        """
        check_at_least(self._policy_version, policy_version=version)
        if version != self._policy_version:
            self._policy_version = version
            self._epoch += 1
            self._prompts.clear()
            self._runner.forget_modules()

    @property
    def num_free_pages(self) -> int:
        """Pages that no cursor holds; those of cached prompts count, they are evicted on demand."""
        return self._tree.pages.num_free + self._prompts.num_evictable_pages()

    def sleep(self) -> None:
        """Give the pools' memory back; cursors that are still open become stale.

        Raises:
            ConfigError: turns are queued or running.
        """
        if not self._scheduler.is_idle:
            raise ConfigError("turns are running: step until they end, or cancel them, then sleep")
        with self.counters.timed("sleep"):
            self._epoch += 1
            self._prompts.clear()
            self._pools.give_back()
            self._start_empty()

    def wake(self) -> None:
        """Take the pools' memory again, the same sizes as before; nothing if it is held.

        Raises:
            ConfigError: too little of it is free now.
        """
        with self.counters.timed("wake"):
            self._pools.take()

    def stats(self) -> dict[str, Any]:
        """Return the counters of everything since the engine was made.

        `pages` are held by cursors, `cached_pages` by prompts alone; `peak_pages` counts both.
        Seconds overlap: `open`, `extend` and `step` contain what they run.
        """
        tree, cached = self._tree, self._prompts.num_evictable_pages()
        return {
            **self.counters.report(),
            "pages": tree.pages.num_held - cached,
            "cached_pages": cached,
            **self._pools.report(),
            "cursors": len(self._primitives.cursors),
        }

    def check_integrity(self) -> None:
        """Recount every page, slot, node and mount from what cursors, turns and prompts reach.

        Raises:
            IntegrityError: a count differs.
        """
        growing = [growth.node for growth in self._scheduler.growing]
        self._primitives.check(entries=self._prompts.nodes, growing=growing)

    def _start_empty(self) -> None:
        """Make the host side of empty pools; the memory stays as it is."""
        self._tree, self._memory = self._pools.tree, self._pools.memory
        self._prompts = PromptCache(self._tree, self._forgotten)
        self._primitives = Primitives(self._tree, self.max_snapshots)
        self._runner, self._scheduler = self._paths.start(
            self._prompts.make_room, self._primitives, lambda: self._epoch
        )

    def _usable(self, cursor: Cursor, *, idle: bool = False) -> None:
        check_usable(cursor, self, self._epoch, idle=idle)

    def _check_awake(self) -> None:
        if not self._memory.allocated:
            raise ConfigError("the engine sleeps and holds no memory: call engine.wake() first")
