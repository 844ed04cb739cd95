"""Ask a policy one question over a corpus and watch its threads.

    python scripts/ask.py --model MODEL --data FOLDER "Who kept the north gate in winter?"
    python scripts/ask.py --data data/seal_join "find the chair seal of curly fir station."
    python scripts/ask.py --data FOLDER --max-turns 8 --trace runs/asked.jsonl --quiet "Who?"

`FOLDER/corpus.jsonl` holds a page a line: {"docid", "title", "text"}. A terminal shows the tree as
it grows, anything else gets a line an event; then the answer, which alone is shown by `--quiet`.
Without a recipe an episode has at most 16 threads of 24 turns of 1,024 tokens; a recipe's limits
win over these, and what is given by hand over both. Ctrl-C, SIGTERM and `--episode-timeout-s` cut
the episode where it stands; `--trace` keeps it all the same. SIGKILL loses it.

Exit codes: 0; 1 the disk refused; 2 a setting or a file is wrong; 128 + N stopped by signal N: 130
Ctrl-C, 143 SIGTERM, 141 the reader of the output has gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octopus_trl.report.ending import ending, importing

with importing():
    from rich.console import Console
    from rich.live import Live
    from transformers import AutoTokenizer

    from octopus_trl import Engine, EpisodeRunner, Trace
    from octopus_trl.agent.config import RolloutConfig
    from octopus_trl.errors import ConfigError
    from octopus_trl.eval.corpus_settings import add_corpus_flags, open_corpus
    from octopus_trl.eval.policy_settings import add_rollout_flags, given_settings, rollout_settings
    from octopus_trl.eval.seal_join_backend import asked_row, is_world
    from octopus_trl.report.growing import GrowingTree, Tail, reason_of, tame
    from octopus_trl.trace_files import write_traces
    from octopus_trl.train.startup import (
        hush_libraries,
        load_policy,
        load_pretrained,
        make_output_folder,
    )

# A policy that was never trained commits nothing: these end its episode.
BOUNDS = {"max_threads": 16, "max_turns": 24, "max_new_tokens": 1024}
EPISODE_TIMEOUT_S = 600.0
SHIPPED = "data/policy/tiny-hybrid"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    """Ask; gives the exit code."""
    asked = arguments()
    hush_libraries(bars=not asked.quiet)
    world = asked.data is not None and is_world(asked.data)
    if asked.model == SHIPPED and not world:
        print(f"note: {SHIPPED} was taught on data/seal_join alone: expect little", file=sys.stderr)
    given = {**given_settings(asked), "temperature": asked.temperature}
    settings = rollout_settings(world=world, recipe=asked.recipe, given=given)
    config = RolloutConfig(**{**BOUNDS, **settings})
    tokenizer = load_pretrained(AutoTokenizer.from_pretrained, "--model", asked.model)
    corpus = open_corpus(asked, world=world, page_tokens=config.page_tokens, tokenizer=tokenizer)
    example = {"id": "ask", "question": asked.question}
    if world:
        example = asked_row(asked.data, asked.question)
    runner = EpisodeRunner(
        Engine(load_policy(asked.model, asked.adapter, asked.recipe), page_size=16),
        tokenizer,
        corpus,
        config,
    )
    with Stop(asked.episode_timeout_s) as stop:
        with growing(asked.question, stop, quiet=asked.quiet) as feed:
            (trace,) = runner.run(
                [example], seed=asked.seed, on_event=lambda _, event: feed(event), stop=stop
            )
            if asked.trace is not None:
                write_traces(asked.trace, [trace])
        return tell(trace, stop, asked)


def arguments() -> argparse.Namespace:
    """Read the command line.

    Raises:
        ConfigError: no question, no corpus, no time, or a trace that cannot be written.
    """
    lines = (__doc__ or "").split("\n")
    parser = argparse.ArgumentParser(
        description=lines[0],
        epilog="\n".join(lines[1:]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("question")
    add("--model", default=SHIPPED, help="folder or hub name (%(default)s)")
    add("--adapter", help="folder or hub name of a LoRA adapter on it")
    add("--recipe", help="take rollout settings from a recipe of recipes/")
    add("--data", help="folder with corpus.jsonl, of the backend bm25, or of a small world")
    add_corpus_flags(parser)
    add_rollout_flags(parser)
    add(
        "--episode-timeout-s",
        type=float,
        default=EPISODE_TIMEOUT_S,
        help="longest episode, seconds, then it is cut; inf for no limit (%(default)s)",
    )
    add("--temperature", type=float, help="of the recipe, or 1, if not given")
    add("--seed", type=int, default=0)
    add("--trace", type=Path, help="keep the episode there, for scripts/view.py")
    add("--quiet", action="store_true", help="show the answer alone")
    asked = parser.parse_args()
    if not asked.question.strip():
        raise ConfigError("the question is empty: give one in quotes")
    if asked.data is None and asked.index is None:
        raise ConfigError("--data is missing: name a folder with corpus.jsonl, or give --index")
    if not asked.episode_timeout_s > 0:
        raise ConfigError(f"--episode-timeout-s {asked.episode_timeout_s}: must be above 0")
    if asked.trace is not None:
        if asked.trace.is_dir():
            raise ConfigError(f"--trace {asked.trace}: is a folder; name a file in it")
        make_output_folder(asked.trace.parent, "--trace")
    return asked


class Stop:
    """Says why the episode ends now: its time is up, or a signal came.

    The first signal waits for the step that runs, so that the episode so far is whole; a second
    one ends the process at once.
    """

    def __init__(self, timeout_s: float) -> None:
        self.signal: int | None = None
        self._timeout_s = timeout_s
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        self._until = time.monotonic() + self._timeout_s
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                self._before[number] = signal.signal(number, self.ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __call__(self) -> str | None:
        """Give the reason, or None while the episode may go on."""
        if self.signal is not None:
            return f"stopped by {signal.Signals(self.signal).name}"
        late = time.monotonic() > self._until
        return f"its {self._timeout_s:g} s are up" if late else None

    def ask(self, number: int, frame: object = None) -> None:
        """Stop as that signal would."""
        self.signal = number
        self.__exit__()


@contextmanager
def growing(
    question: str, stop: Stop, *, quiet: bool
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Give what takes events and shows them: a tree on a terminal, else a line each."""
    console = Console(highlight=False)
    if quiet:
        yield lambda event: None
    elif console.is_terminal and not console.is_dumb_terminal:
        grown = GrowingTree(question)
        tail = Tail(grown.tree)
        with Live(tail, console=console, refresh_per_second=4, vertical_overflow="visible"):
            yield grown.feed
            tail.whole = True
    else:
        say(question, stop)
        yield GrowingTree(question, lambda line: say(line, stop)).feed


def say(text: str, stop: Stop) -> None:
    """Write a text on a line; a reader that has gone stops the episode."""
    try:
        print(tame(text), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        stop.ask(signal.SIGPIPE)


def tell(trace: Trace, stop: Stop, asked: argparse.Namespace) -> int:
    """Show the answer and where the episode is; gives the exit code."""
    answer = trace.meta.get("result")
    if answer is None:
        (end,) = (e for e in trace.events if e["type"] == "end" and e["thread"] == 0)
        answer = f"no answer: the root ended without a commit ({reason_of(end)})"
    say(answer, stop)
    if not asked.quiet:
        drawn = sum(len(s.tokens) for s in trace.segments if s.kind == "action")
        fed = sum(len(s.tokens) for s in trace.segments) - drawn
        threads = len(trace.threads)
        print(
            f"{threads} thread{'s' * (threads > 1)}, {drawn:,} tokens drawn, {fed:,} fed",
            file=sys.stderr,
        )
    if stop.signal is None:
        return 0
    kept = f"is in {asked.trace}" if asked.trace else "is not kept: give --trace"
    print(f"stopped; the episode so far {kept}", file=sys.stderr)
    return 128 + stop.signal


if __name__ == "__main__":
    with ending(disk="the episode is not kept", stopped="nothing is kept"):
        sys.exit(main())
