"""Evaluate a policy on held-out questions and keep every episode.

    python scripts/evaluate.py --model data/policy/tiny-hybrid --output runs/eval-late
    python scripts/evaluate.py --model MODEL --adapter ADAPTER --recipe RECIPE --data FOLDER \
        --limit 50 --output runs/eval-mine
    python scripts/evaluate.py --exchange transcript --output runs/pasted
    python scripts/evaluate.py --disable fork --output runs/no-fork
    python scripts/evaluate.py --compare runs/before runs/after

One set of weights runs under every setting: those of `--recipe`, then what is given by hand.
Writes `traces.jsonl`, `records.jsonl` and `summary.json`; `--browsecomp-runs` adds run files of
BrowseComp-Plus's format. Episodes that a stopped evaluation has already written are not run again,
and none is lost. `--data` is the seal join world or a folder with corpus and questions;
`--benchmark` takes the questions from a loader instead and searches the corpus of `--data`.

Exit codes: 0; 1 the disk refused, or the judge left answers open; 2 a setting or a file is wrong;
130 interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from octopus_trl.report.ending import ending, importing

with importing():
    from transformers import AutoTokenizer

    from octopus_trl import Engine, EpisodeRunner
    from octopus_trl.agent.config import RolloutConfig
    from octopus_trl.agent.corpus import read_questions
    from octopus_trl.errors import ConfigError
    from octopus_trl.eval.benchmarks.benchmark import fingerprint_of
    from octopus_trl.eval.benchmarks.choice import BENCHMARKS, load_benchmark, read_options
    from octopus_trl.eval.corpus_settings import add_corpus_flags, open_corpus
    from octopus_trl.eval.grader import AnswerReward
    from octopus_trl.eval.judge_choice import JudgeSettings
    from octopus_trl.eval.paired import compare
    from octopus_trl.eval.policy_settings import add_rollout_flags, given_settings, rollout_settings
    from octopus_trl.eval.records import read_records
    from octopus_trl.eval.run import UNSETTLED, Evaluation, RecordingTools
    from octopus_trl.eval.seal_join import ARMS, SPLITS
    from octopus_trl.eval.seal_join_backend import is_world, load_world
    from octopus_trl.report.progress import StageBars
    from octopus_trl.train.startup import (
        hush_libraries,
        load_policy,
        load_pretrained,
        make_output_folder,
    )

SALT_SEED = 9_000_000  # far from the visits that training counts up from 0
# What a result does not depend on: the corpus has a fingerprint, wherever it is served from.
QUIET = (
    *("output", "live", "limit", "compare", "browsecomp_runs"),
    *("judge_url", "judge_device", "search_url", "index", "search_user", "backend"),
)


def main() -> int:
    """Evaluate, or compare; gives the exit code."""
    asked = arguments()
    if asked.compare:
        print(json.dumps(compare_runs(*map(Path, asked.compare)), indent=1))
        return 0
    if asked.output is None:
        raise ConfigError("--output is missing: name a folder for traces and summary")
    for name in ("episodes", "limit", "live"):
        if (value := getattr(asked, name)) is not None and value < 1:
            raise ConfigError(f"--{name} {value}: must be at least 1")
    hush_libraries()
    world = is_world(asked.data)
    config = settings_of(asked, world=world)
    tokenizer = load_pretrained(AutoTokenizer.from_pretrained, "--model", asked.model)
    setting = {key: value for key, value in vars(asked).items() if key not in QUIET}
    setting.pop("loader_options")
    setting["temperature"] = config.temperature
    if asked.recipe is not None:  # the file may say something else when the command comes again
        setting["recipe_sha256"] = hashlib.sha256(Path(asked.recipe).read_bytes()).hexdigest()
    rows, secret = questions(asked, world, config, setting)
    corpus = open_corpus(asked, world=world, page_tokens=config.page_tokens, tokenizer=tokenizer)
    setting["corpus"] = corpus.fingerprint()
    folder = make_output_folder(asked.output, "--output")
    evaluation = Evaluation(
        folder, rows[: asked.limit], grader=grader(asked), setting=setting, private=secret
    )
    tools = RecordingTools(corpus)
    runner = EpisodeRunner(
        Engine(load_policy(asked.model, asked.adapter, asked.recipe), page_size=16),
        tokenizer,
        tools,
        config,
    )
    with StageBars(tell_ends=True) as bars:
        evaluation.run(runner, tools, seed=asked.seed, tell=partial(tell_episodes, bars))
    written = {"model": asked.adapter or asked.model, "max_output_tokens": config.max_new_tokens}
    summary = evaluation.finish(browsecomp=written if asked.browsecomp_runs else None)
    print(json.dumps(summary, indent=1))
    for line in evaluation.failures:
        print(line, file=sys.stderr)
    if "accuracy" in summary:
        share = summary["accuracy"]
        low, high = summary["interval_95"]
        print(
            f"{share:.1%} right (95 % interval {low:.1%} to {high:.1%}), n = {summary['n']}; "
            f"all of it in {folder}",
            file=sys.stderr,
        )
    return tell_of_judge(summary)


def tell_of_judge(summary: dict[str, Any]) -> int:
    """Say which answers the judge did not settle; gives the exit code."""
    share, total = summary["graded_by"], summary["n"] + summary["ungraded"]
    down, unparsed = (round(share.get(stage, 0.0) * total) for stage in UNSETTLED[::-1])
    if unparsed:
        print(
            f"error: to {unparsed} of {total} answers the judge replied without a verdict, so they "
            "count as wrong: is it the right model? The same command asks about them again",
            file=sys.stderr,
        )
    if down:
        print(
            f"error: {down} of {total} answers have no grade, the judge could not be reached; the "
            "same command asks about them again",
            file=sys.stderr,
        )
    return int(bool(unparsed or down))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="data/policy/tiny-hybrid", help="folder or hub name of the policy")
    add("--adapter", help="folder or hub name of a LoRA adapter on it")
    add("--recipe", help="take rollout settings from a recipe of recipes/")
    add("--data", default="data/seal_join", help="folder of a world, or of corpus and questions")
    add("--benchmark", choices=list(BENCHMARKS), help="take the questions from this loader")
    add("--source", help="of the benchmark: files or hub name; its own default if not given")
    add("--loader-options", nargs="*", default=[], metavar="KEY=VALUE", help="of the benchmark")
    add("--split", choices=SPLITS, default="test")
    add("--arm", choices=ARMS, default="late")
    add("--branches", type=int, default=2)
    add("--episodes", type=int, default=200, help="questions that a world makes")
    add("--limit", type=int, help="ask only the first N questions; more may be asked later")
    add("--temperature", type=float, help="of the recipe, or 1, if not given")
    add_rollout_flags(parser)
    add_corpus_flags(parser)
    add("--judge-model", help="judges what exact match leaves open: folder, hub or server name")
    add("--judge-url", help="OpenAI-compatible server that runs it; without one it is loaded here")
    add("--judge-revision", help="commit of a judge from the hub")
    add("--judge-device", default="cpu", help="where a judge that is loaded here runs")
    add("--seed", type=int, default=0)
    add("--live", type=int, default=16, help="episodes at once")
    add("--browsecomp-runs", action="store_true", help="also write BrowseComp-Plus run files")
    add("--compare", nargs=2, metavar=("A", "B"), help="paired comparison of two outputs")
    add("--output", help="folder for traces, records and summary")
    return parser.parse_args()


def settings_of(asked: argparse.Namespace, *, world: bool) -> RolloutConfig:
    """Give how episodes run: as the recipe says, with what was given by hand."""
    given = {
        **given_settings(asked),
        "temperature": asked.temperature,
        "max_live_episodes": asked.live,
    }
    return RolloutConfig(**rollout_settings(world=world, recipe=asked.recipe, given=given))


def questions(
    asked: argparse.Namespace, world: bool, config: RolloutConfig, setting: dict[str, Any]
) -> tuple[list[dict[str, Any]], bool]:
    """Give the questions, and whether they must not be written in clear."""
    if asked.benchmark is not None:
        options = read_options(asked.loader_options)
        benchmark = load_benchmark(asked.benchmark, asked.source, **options)
        setting["questions"] = benchmark.fingerprint()
        return list(benchmark.questions), benchmark.secret
    if not world:
        rows = read_questions(asked.data)
        setting["questions"] = fingerprint_of(rows)
        return rows, False
    most = config.max_children
    if not 1 <= asked.branches <= most:
        raise ConfigError(
            f"--branches {asked.branches}: must lie in 1..{most}, an episode forks a thread for "
            "each place and has at most that many live"
        )
    made = load_world(asked.data, snippet_tokens=0).world.questions(
        asked.split,
        asked.episodes,
        arms=(asked.arm,),
        branches=(asked.branches,),
        salt_seed=SALT_SEED + asked.seed,
    )
    return list(made), False


def grader(asked: argparse.Namespace) -> AnswerReward:
    """Give what decides: exact match, then a judge where one is named."""
    settings = JudgeSettings(
        asked.judge_url, asked.judge_model, asked.judge_revision, asked.judge_device
    )
    return AnswerReward(settings.judge(Path(asked.output) / "verdicts.json"))


def compare_runs(first: Path, second: Path) -> dict[str, Any]:
    """Compare the graded questions of two outputs pair by pair."""
    scores = []
    for folder in (first, second):
        records = read_records(folder / "records.jsonl")
        if not records:
            raise ConfigError(f"{folder}: holds no records.jsonl; give two outputs of evaluate.py")
        graded = {name: r["score"] for name, r in records.items() if r["score"] is not None}
        scores.append(graded)
    return compare(*scores)


def tell_episodes(bars: StageBars, done: int, right: int, total: int) -> None:
    """Show questions done and right so far."""
    bars.tell("episodes", done, total, f"{right / done:.1%} right" if done else "none right")


if __name__ == "__main__":
    with ending(
        disk="the episodes so far are kept",
        stopped="the episodes so far are kept, the same command goes on",
    ):
        sys.exit(main())
