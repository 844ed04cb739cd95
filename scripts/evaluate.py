"""Evaluate a policy on held-out questions of the seal join world and keep every episode.

    python scripts/evaluate.py --model data/policy/tiny-hybrid --output runs/eval-late

Writes `traces.jsonl` and `summary.json`. Episodes that a stopped evaluation has already written
are not run again, and none is lost.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoModelForCausalLM, AutoTokenizer

from octopus_trl import Engine, EpisodeRunner, Trace, prepare_model
from octopus_trl.agent.config import RolloutConfig
from octopus_trl.agent.reward import is_exact_match
from octopus_trl.agent.rollout import prompt_id_of
from octopus_trl.errors import ConfigError, OctopusError
from octopus_trl.eval.metrics import summarise
from octopus_trl.eval.seal_join import ARMS, SPLITS
from octopus_trl.eval.seal_join_backend import load_world
from octopus_trl.eval.seal_join_studio import WORLD_ROLLOUT
from octopus_trl.trace_files import TraceWriter, read_traces
from octopus_trl.train.startup import load_pretrained, make_output_folder, read_json

SALT_SEED = 9_000_000  # far from the visits that training counts up from 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="data/policy/tiny-hybrid", help="folder of the policy")
    parser.add_argument("--adapter", help="folder of a LoRA adapter on it")
    parser.add_argument("--data", default="data/seal_join", help="folder of the world")
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument("--arm", choices=ARMS, default="late")
    parser.add_argument("--branches", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--disable", nargs="*", default=[], help="tools whose calls are refused")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--live", type=int, default=16, help="episodes at once")
    parser.add_argument("--output", required=True, help="folder for traces and summary")
    asked = parser.parse_args()
    if asked.episodes < 1:
        raise ConfigError(f"--episodes {asked.episodes}: must be at least 1")
    most = int(WORLD_ROLLOUT["max_children"])
    if not 1 <= asked.branches <= most:
        raise ConfigError(
            f"--branches {asked.branches}: must lie in 1..{most}, an episode forks a thread for "
            "each place and has at most that many live"
        )

    backend = load_world(asked.data, snippet_tokens=0)
    rows = backend.world.questions(
        asked.split,
        asked.episodes,
        arms=(asked.arm,),
        branches=(asked.branches,),
        salt_seed=SALT_SEED + asked.seed,
    )
    folder = Path(asked.output)
    setting = {key: value for key, value in vars(asked).items() if key not in ("output", "live")}
    model = load_pretrained(
        AutoModelForCausalLM.from_pretrained, "--model", asked.model, dtype=torch.float32
    )
    if asked.adapter:
        model = load_pretrained(
            partial(PeftModel.from_pretrained, model), "--adapter", asked.adapter
        )
    model = prepare_model(model).eval()
    runner = EpisodeRunner(
        Engine(model, page_size=16),
        load_pretrained(AutoTokenizer.from_pretrained, "--model", asked.model),
        backend,
        RolloutConfig(
            **WORLD_ROLLOUT,
            temperature=asked.temperature,
            disabled_tools=tuple(asked.disable),
            max_live_episodes=asked.live,
        ),
    )
    _check_setting(folder, setting)
    answers = {prompt_id_of(row): row["answers"] for row in rows}
    with TraceWriter(folder / "traces.jsonl") as writer:
        _run(runner, writer, rows, answers, asked.seed)
    summary = summarise(list(read_traces(folder / "traces.jsonl")))
    text = json.dumps({**summary, "setting": setting}, indent=1)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def _run(runner: EpisodeRunner, writer: TraceWriter, rows: list, answers: dict, seed: int) -> None:
    done = {trace.prompt_id for trace in read_traces(writer.path)}
    todo = [row for row in rows if prompt_id_of(row) not in done]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("episodes", total=len(rows), completed=len(rows) - len(todo))
        right = 0

        def keep(trace: Trace) -> None:
            nonlocal right
            gold = answers[trace.prompt_id]
            trace.reward = float(is_exact_match(trace.meta.get("result"), gold))
            right += trace.reward == 1.0
            writer.append(trace)
            bar.advance(task)
            bar.update(task, description=f"episodes, {right} right")

        if todo:
            runner.run(todo, seed=seed, on_trace=keep)


def _check_setting(folder: Path, setting: dict) -> None:
    """Keep one setting a folder, so that a resumed evaluation never mixes two."""
    path = folder / "setting.json"
    make_output_folder(folder, "--output")
    if path.exists() and read_json(str(path), "setting") != setting:
        raise ConfigError(
            f"{path} holds another setting: an evaluation goes on only with its own; give another "
            "--output"
        )
    path.write_text(json.dumps(setting, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except OctopusError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; the episodes so far are kept, the same command goes on", file=sys.stderr)
        sys.exit(130)
