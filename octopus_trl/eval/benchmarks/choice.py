"""Benchmarks by name, and those that come with a folder of ours: a user's, and seal join."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from octopus_trl.agent.corpus import QUESTIONS_FILE, read_questions
from octopus_trl.errors import ConfigError
from octopus_trl.eval.benchmarks.benchmark import Benchmark
from octopus_trl.eval.benchmarks.browsecomp_plus import load_browsecomp_plus
from octopus_trl.eval.benchmarks.open_researcher import load_open_researcher
from octopus_trl.eval.benchmarks.qa import load_qa
from octopus_trl.eval.seal_join import ARMS, SPLITS
from octopus_trl.eval.seal_join_backend import load_world


def load_folder(
    source: str | Path, *, file: str = QUESTIONS_FILE, limit: int | None = None
) -> Benchmark:
    """Load a user's `questions.jsonl`, the first `limit` questions.

    Raises:
        ConfigError: no such file, or a line that breaks a rule (data/README.md).
    """
    path = Path(source)
    rows = read_questions(path / file if path.is_dir() else path)
    return Benchmark(f"folder/{path.resolve().name}", tuple(rows[:limit]))


def load_seal_join(
    source: str | Path = "data/seal_join",
    *,
    split: str = "test",
    num_questions: int = 200,
    arms: Sequence[str] = ("late",),
    branches: Sequence[int] = (2,),
    salt_seed: int = 0,
) -> Benchmark:
    """Make questions of a seal join world; `salt_seed` gives each fresh seals.

    Raises:
        ConfigError: no world there, or a value out of range.
    """
    if split not in SPLITS or not set(arms) <= set(ARMS) or num_questions < 1:
        raise ConfigError(
            f"split={split!r}, arms={tuple(arms)}, num_questions={num_questions}: split is one of "
            f"{SPLITS}, arms are of {ARMS}, at least 1 question"
        )
    world = load_world(source, snippet_tokens=0).world
    rows = world.questions(
        split, num_questions, arms=tuple(arms), branches=tuple(branches), salt_seed=salt_seed
    )
    name = "+".join(arms) + "/" + "+".join(map(str, branches))
    return Benchmark(f"seal-join/{split}/{name}", tuple(rows))


BENCHMARKS: dict[str, Callable[..., Benchmark]] = {
    "browsecomp-plus": load_browsecomp_plus,
    "open-researcher": load_open_researcher,
    "qa": load_qa,
    "folder": load_folder,
    "seal-join": load_seal_join,
}


def load_benchmark(name: str, source: str | Path | None = None, **options: Any) -> Benchmark:
    """Load a benchmark by name; `source` and `options` go to its loader.

    Raises:
        ConfigError: no benchmark of this name, or what its loader refuses.
    """
    loader = BENCHMARKS.get(name)
    if loader is None:
        raise ConfigError(f"benchmark {name!r}: must be one of {', '.join(BENCHMARKS)}")
    known = [key for key in inspect.signature(loader).parameters if key != "source"]
    if unknown := sorted(set(options) - set(known)):
        raise ConfigError(
            f"benchmark {name!r} has no option {unknown[0]!r}; its options are {', '.join(known)}"
        )
    try:
        return loader(**options) if source is None else loader(source, **options)
    except TypeError as error:
        raise ConfigError(
            f"benchmark {name!r}: an option is of the wrong kind ({error}); numbers are written "
            "as they are, lists as [1,2]"
        ) from error


def read_options(words: Iterable[str]) -> dict[str, Any]:
    """Read `key=value` words; a value is JSON where it can be, else text.

    >>> read_options(["limit=5", "config=hotpotqa", "expected=null"])
    {'limit': 5, 'config': 'hotpotqa', 'expected': None}

    Raises:
        ConfigError: a word without `=` or without a key.
    """
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise ConfigError(f"loader option {word!r}: must be KEY=VALUE")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options
