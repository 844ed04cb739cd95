"""Makes expert episodes: the agent's own loop on a scripted engine, one trace or many thousands.

About a hundredth of a second an episode on one core; `make_shards` spreads them over processes.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from octopus_trl.agent.rollout import EpisodeRunner, RolloutConfig
from octopus_trl.errors import ConfigError, TraceError
from octopus_trl.eval.scripted import ScriptedEngine
from octopus_trl.eval.seal_join import ARMS, SYSTEM_PROMPT
from octopus_trl.eval.seal_join_backend import SealJoinBackend, load_world
from octopus_trl.eval.seal_join_experts import ExpertOptions, ExpertPolicy
from octopus_trl.eval.seal_join_tokenizer import build_tokenizer
from octopus_trl.files import replacing
from octopus_trl.trace import Trace

# What a policy of the small world is trained and evaluated under; recipes repeat these values.
WORLD_ROLLOUT: dict[str, Any] = {
    "system_prompt": SYSTEM_PROMPT,
    "compact_tools": True,
    "search_k": 3,
    "window": 2048,
    "max_turns": 12,
    "max_depth": 1,
    "max_children": 5,
    "max_threads": 8,
    "max_new_tokens": 256,
}


class ExpertStudio:
    """Draws expert traces of one world under one rollout config.

    Args:
        backend: the world with its pages.
        tokenizer: whose ids the traces hold.
        config: how episodes run; `WORLD_ROLLOUT` by default.
        options: how experts vary.
    """

    def __init__(
        self,
        backend: SealJoinBackend,
        tokenizer: Any,
        *,
        config: RolloutConfig | None = None,
        options: ExpertOptions | None = None,
    ) -> None:
        self.world, self._options = backend.world, options or ExpertOptions()
        self._scripts: dict[str, ExpertPolicy] = {}
        engine = ScriptedEngine(tokenizer, self._script_of)
        # Tools run in place: a thread pool costs more than a search of a small corpus.
        config = config or RolloutConfig(**WORLD_ROLLOUT, tool_workers=0)
        self._runner = EpisodeRunner(engine, tokenizer, backend, config)

    def trace(self, row: Mapping[str, Any], *, seed: int = 0) -> Trace:
        """Run the expert of one row and give its trace, judged by exact match."""
        script = ExpertPolicy(self.world, row, options=self._options, seed=seed)
        self._scripts = {row["question"]: script}
        (trace,) = self._runner.run([row], seed=seed)
        trace.reward = float(trace.meta["result"] in row["answers"])
        trace.meta |= {"source": "expert", "arm": row["arm"], "branches": row["branches"]}
        return trace

    def draw(
        self,
        rng: np.random.Generator,
        *,
        arms: Sequence[str] = ARMS,
        branches: Sequence[int] = (1, 2, 3),
        split: str = "train",
    ) -> Trace:
        """Draw a question with a salt of its own and give its expert's trace, light to keep."""
        arm = arms[int(rng.integers(len(arms)))]
        number = branches[int(rng.integers(len(branches)))]
        index, salt, seed = (int(draw) for draw in rng.integers(0, 1 << 30, size=3))
        row = self.world.question(split, arm, number, index, salt_seed=salt)
        return lighten(self.trace(row, seed=seed))

    def _script_of(self, prompt: str) -> ExpertPolicy:
        for question, script in self._scripts.items():
            if question in prompt:
                return script
        raise ConfigError(f"no script is waiting for a prompt that ends {prompt[-80:]!r}")


def lighten(trace: Trace) -> Trace:
    """Drop what training on a script does not need: events, times, log-probabilities of 0."""
    trace.events = []
    for segment in trace.segments:
        segment.logps = segment.time_s = None
    return trace


def make_shards(
    folder: str | Path,
    world: str | Path,
    *,
    count: int,
    seed: int = 0,
    processes: int | None = None,
    per_shard: int = 500,
    **draw: Any,
) -> list[Path]:
    """Write `count` expert traces as gzipped JSON lines, shard i from (seed, i) alone.

    A shard that is already there is kept, so an interrupted run goes on.

    Args:
        world: folder of `World.write`.
        draw: arms, branches and split of `ExpertStudio.draw`.
    """
    if count < 1 or per_shard < 1:
        raise ConfigError(f"count={count}, per_shard={per_shard}: both must be at least 1")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [min(per_shard, count - start) for start in range(0, count, per_shard)]
    jobs = [
        (folder / f"expert-{seed}-{index:04d}-{size}.jsonl.gz", size, (seed, index))
        for index, size in enumerate(sizes)
    ]
    todo = [job for job in jobs if not job[0].exists()]
    write = partial(_write_shard, world=str(world), draw=draw)
    processes = min(processes or os.cpu_count() or 1, len(todo))
    if processes > 1:
        # Fresh interpreters: a fork would copy the locks of a process that runs threads.
        with _deaf():
            workers = multiprocessing.get_context("spawn").Pool(processes)
        with workers as pool:
            pool.map(write, todo, chunksize=1)
            pool.close()  # workers end by themselves: a terminated one leaks its locks
            pool.join()
    else:
        for job in todo:
            write(job)
    return [path for path, _, _ in jobs]


def read_shards(paths: Iterable[str | Path]) -> Iterator[Trace]:
    """Read the traces of shards in order.

    Raises:
        TraceError: a shard is broken; names the file and the line.
    """
    for path in paths:
        number = 1
        try:
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                for line in lines:
                    yield Trace.from_dict(json.loads(line))
                    number += 1
        except (OSError, EOFError, ValueError) as error:
            raise TraceError(f"{path}:{number}: broken shard: {error}") from error


@contextmanager
def _deaf() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach; who started them ends them, without a word."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_studios: dict[str, ExpertStudio] = {}


def _write_shard(job: tuple[Path, int, tuple[int, int]], *, world: str, draw: dict) -> None:
    path, size, seed = job
    if world not in _studios:
        _studios[world] = ExpertStudio(load_world(world, snippet_tokens=0), build_tokenizer())
    rng = np.random.default_rng(seed)
    # No time and no name in the header: the same traces are the same bytes.
    with replacing(path) as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as stream:
        for _ in range(size):
            record = _studios[world].draw(rng, **draw).to_dict()
            stream.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
