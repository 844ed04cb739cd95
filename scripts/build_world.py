"""Write a seal join world: corpus, questions of both splits and its tokenizer.

`build_world.py data/seal_join` rewrites the files that ship, byte for byte. `--full` makes the
world of long pages, `--train` and `--test` set the number of questions, `--experts` adds that many
expert episodes as gzipped traces under `experts/`, kept where they are already there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from octopus_trl.report.ending import ending, importing

with importing():
    from octopus_trl.agent.corpus import CORPUS_FILE
    from octopus_trl.errors import ConfigError
    from octopus_trl.eval.seal_join import FULL, World, WorldConfig
    from octopus_trl.eval.seal_join_backend import is_world
    from octopus_trl.eval.seal_join_studio import make_shards
    from octopus_trl.eval.seal_join_tokenizer import build_tokenizer


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--full", action="store_true", help="12 classes of 6 symbols, long pages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=1800, help="questions of the training split")
    parser.add_argument("--test", type=int, default=900, help="questions of the test split")
    parser.add_argument("--experts", type=int, default=0, help="expert episodes to write")
    parser.add_argument("--processes", type=int, help="of the expert episodes; default: all cores")
    options = parser.parse_args()
    try:
        check_options(options)
        config = dataclasses.replace(FULL if options.full else WorldConfig(), seed=options.seed)
        world = World(config)
        world.write(options.folder)
        for split, count in (("train", options.train), ("test", options.test)):
            rows = world.questions(split, count)
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (options.folder / f"questions_{split}.jsonl").write_text(text, encoding="utf-8")
        build_tokenizer().save_pretrained(options.folder / "tokenizer")
        if options.experts:
            make_shards(
                options.folder / "experts",
                options.folder,
                count=options.experts,
                seed=options.seed,
                processes=options.processes,
            )
    except OSError as error:
        raise ConfigError(
            f"{options.folder}: cannot be written ({error.strerror}); name another folder"
        ) from error
    made = f"{len(world.docid)} pages, {options.train} + {options.test} questions"
    print(f"{made}, {options.experts} expert episodes: {options.folder}")


def check_options(options: argparse.Namespace) -> None:
    """Refuse numbers below 0 and a folder that holds pages which are no world.

    Raises:
        ConfigError: says which, and what to give instead.
    """
    for name in ("train", "test", "experts"):
        if getattr(options, name) < 0:
            raise ConfigError(f"--{name} {getattr(options, name)}: must be at least 0")
    if options.processes is not None and options.processes < 1:
        raise ConfigError(f"--processes {options.processes}: must be at least 1")
    corpus = options.folder / CORPUS_FILE
    if corpus.exists() and not is_world(options.folder):
        raise ConfigError(
            f"{corpus} is no seal join corpus and would be overwritten: name another folder"
        )


if __name__ == "__main__":
    with ending():
        main()
