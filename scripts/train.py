"""Train a branching agent with GRPO: one recipe is one run.

    accelerate launch --config_file accelerate_configs/cpu.yaml \\
        scripts/train.py --config recipes/tiny-hybrid/grpo/config_cpu.yaml

Every field of the recipe can be given on the command line; an unknown one is an error. `--plan`
prints the memory and time that it would take and starts nothing; no GPU is needed. Ctrl-C or
SIGTERM finishes the step and saves; `--resume_from_checkpoint true` goes on from the newest
checkpoint. Exit codes: 0 the run is finished and saved; 75 it was stopped, holds a checkpoint and
wants to be started again; 2 a setting is wrong; 130 it was interrupted where it stood.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octopus_trl.report.ending import importing, until_unread

with importing():
    import torch
    import yaml
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.trainer_callback import PrinterCallback, ProgressCallback
    from trl import ModelConfig, get_peft_config

    from octopus_trl.agent.backend_choice import open_backend
    from octopus_trl.agent.corpus import read_questions
    from octopus_trl.agent.search import token_ends
    from octopus_trl.errors import ConfigError, OctopusError, RankFailed
    from octopus_trl.eval.judge_choice import JudgeSettings, reward_functions
    from octopus_trl.eval.seal_join_backend import is_world, load_world
    from octopus_trl.train.checkpoint import last_checkpoint
    from octopus_trl.train.config import OctopusGRPOConfig
    from octopus_trl.train.interrupt import StopGracefully
    from octopus_trl.train.plan_report import PlanArguments, make_report, recipe_of, wants_plan
    from octopus_trl.train.progress import ShowProgress
    from octopus_trl.train.ranks import EXIT_CODE as RANK_FAILED
    from octopus_trl.train.startup import (
        check_report_to,
        hush_libraries,
        load_pretrained,
        make_output_folder,
        read_arguments,
    )
    from octopus_trl.train.trainer import OctopusGRPOTrainer
    from octopus_trl.train.weights import say

STOPPED = 75  # EX_TEMPFAIL of sysexits.h: start it again


@dataclass
class OctopusScriptArguments:
    """Where questions and pages come from."""

    data: str = field(
        default="data/seal_join",
        metadata={"help": "Folder with corpus.jsonl and questions.jsonl, or a seal join world."},
    )
    train_file: str | None = field(
        default=None,
        metadata={"help": "Questions in that folder. A world makes its own where none is named."},
    )
    eval_file: str | None = field(
        default=None, metadata={"help": "Held-out questions in that folder."}
    )
    arms: list[str] = field(
        default_factory=lambda: ["late"],
        metadata={"help": "Of a world: early (class in the question), late (class on a page)."},
    )
    branches: list[int] = field(
        default_factory=lambda: [2], metadata={"help": "Of a world: places that a question joins."}
    )
    num_train_questions: int | None = field(
        default=None, metadata={"help": "Questions to train on; a world makes 1,600 by default."}
    )
    num_eval_questions: int | None = field(
        default=None, metadata={"help": "Held-out questions; a world makes none by default."}
    )
    k1: float = field(default=0.9, metadata={"help": "BM25: saturation of term counts."})
    b: float = field(default=0.4, metadata={"help": "BM25: weight of document length."})
    snippet_tokens: int = field(
        default=0, metadata={"help": "Tokens of a hit's snippet; 0 shows titles alone."}
    )
    backend: str | None = field(
        default=None,
        metadata={"help": "bm25 (corpus.jsonl of that folder), opensearch or pyserini."},
    )
    search_url: str | None = field(
        default=None,
        metadata={"help": "Address of an OpenSearch server; password in OPENSEARCH_PASSWORD."},
    )
    index: str | None = field(
        default=None, metadata={"help": "Index on that server, or folder of a Lucene index."}
    )
    search_user: str | None = field(default=None, metadata={"help": "User of that server."})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["exact_match"],
        metadata={
            "help": "exact_match; answer (exact match, then a judge); judge (of every answer). "
            "Several are summed by reward_weights."
        },
    )
    judge_model: str | None = field(
        default=None,
        metadata={"help": "Judge: name on its server, or folder or hub name of a local model."},
    )
    judge_url: str | None = field(
        default=None, metadata={"help": "OpenAI-compatible server of the judge; none: local."}
    )
    judge_revision: str | None = field(
        default=None, metadata={"help": "Commit of a local judge from the hub."}
    )
    judge_device: str = field(default="cpu", metadata={"help": "Where a local judge runs."})
    judge_max_tokens: int = field(default=512, metadata={"help": "Most tokens of a judge's reply."})


def main() -> int:
    """Parse a recipe, train, save; gives the exit code."""
    hush_libraries()
    planned = wants_plan(sys.argv)
    script, args, model_args, asked = read_arguments(
        (OctopusScriptArguments, OctopusGRPOConfig, ModelConfig, PlanArguments),
        # A plan for GPUs is made anywhere; transformers refuses bf16 where there is none.
        ("--use_cpu", "true") if planned and not torch.cuda.is_available() else (),
    )
    if asked.plan:
        report = make_report(args, model_args, asked, recipe_of(sys.argv))
        with until_unread():
            print(report.text())
        report.refuse()
        return 0
    name = model_args.model_name_or_path
    if name is None:
        raise ConfigError("model_name_or_path is not set: name a folder or a hub model")
    check_report_to(args.report_to)
    tokenizer = load_pretrained(
        AutoTokenizer.from_pretrained,
        "model_name_or_path",
        name,
        revision=model_args.model_revision,
    )
    corpus = open_corpus(script, args, tokenizer)
    check_branches(script, args)
    train, held_out = load_questions(script, corpus)
    make_output_folder(args.output_dir)
    rewards = rewards_of(script, args)
    args.disable_tqdm = True
    trainer = OctopusGRPOTrainer(
        load_model(model_args),
        reward_funcs=rewards,
        args=args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        tools=corpus,
        peft_config=get_peft_config(model_args),
    )
    progress, stop = ShowProgress(), StopGracefully(trainer.accelerator)
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(progress)
    trainer.add_callback(stop)
    try:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    finally:
        progress.close()
        stop.release()
    # A signal during the last step stops nothing any more.
    stopped = stop.stopped and trainer.state.global_step < trainer.state.max_steps
    finish(trainer, stopped=stopped)
    return STOPPED if stopped else 0


def load_model(model_args: ModelConfig) -> Any:
    """Load the text model of a checkpoint as an instance, so that TRL does not guess a class."""
    options: dict[str, Any] = {"dtype": model_args.dtype, "revision": model_args.model_revision}
    if model_args.attn_implementation is not None:
        options["attn_implementation"] = model_args.attn_implementation
    name = model_args.model_name_or_path
    return load_pretrained(
        AutoModelForCausalLM.from_pretrained, "model_name_or_path", name, **options
    )


def open_corpus(script: OctopusScriptArguments, args: OctopusGRPOConfig, tokenizer: Any) -> Any:
    """Open what `search` and `open` read."""
    ranking: dict[str, Any] = {
        "k1": script.k1,
        "b": script.b,
        "snippet_tokens": script.snippet_tokens,
    }
    if is_world(script.data):
        return load_world(script.data, **ranking)
    return open_backend(
        script.backend,
        script.data,
        url=script.search_url,
        index=script.index,
        user=script.search_user,
        ends=token_ends(tokenizer),
        page_tokens=args.page_tokens,
        **ranking,
    )


def rewards_of(script: OctopusScriptArguments, args: OctopusGRPOConfig) -> list[Any]:
    """Make the reward functions that a recipe names; verdicts are kept beside the run."""
    judge = JudgeSettings(
        script.judge_url,
        script.judge_model,
        script.judge_revision,
        script.judge_device,
        script.judge_max_tokens,
    )
    plugin = args.deepspeed_plugin
    if script.judge_model and not script.judge_url and plugin and plugin.zero_stage == 3:
        raise ConfigError(
            f"judge_model={script.judge_model} in this process under ZeRO-3: DeepSpeed would split "
            "it over ranks that judge different numbers of answers; give judge_url, or use ZeRO-2"
        )
    verdicts = Path(args.output_dir) / "verdicts.json"
    functions = reward_functions(script.reward_funcs, judge, cache=verdicts)
    weights = args.reward_weights
    if weights is not None and len(weights) != len(functions):
        raise ConfigError(
            f"reward_weights={weights}: {len(weights)} weights for {len(functions)} reward_funcs; "
            "give one each, or none"
        )
    return functions


def check_branches(script: OctopusScriptArguments, args: OctopusGRPOConfig) -> None:
    """Refuse questions of a world that no episode could look up side by side."""
    for count in script.branches if is_world(script.data) else ():
        if not 1 <= count <= args.max_children:
            raise ConfigError(
                f"branches={count}: must lie in 1..max_children={args.max_children}, an episode "
                "forks a thread for each place; lower it or raise max_children"
            )


def load_questions(
    script: OctopusScriptArguments, corpus: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Read or make the questions to train on and those held out."""
    folder = Path(script.data)
    world = corpus.world if is_world(script.data) else None
    sets: list[list[dict[str, Any]] | None] = []
    for name, split, file, count in (
        ("train", "train", script.train_file, script.num_train_questions),
        ("eval", "test", script.eval_file, script.num_eval_questions),
    ):
        if count is not None and count < (1 if split == "train" else 0):
            raise ConfigError(f"num_{name}_questions={count}: leave it out or ask for at least one")
        if file is not None:
            sets.append(read_questions(folder / file)[:count])
        elif world is not None and (split == "train" or count):
            arms, branches = tuple(script.arms), tuple(script.branches)
            wanted = 1600 if count is None else count
            sets.append(world.questions(split, wanted, arms=arms, branches=branches))
        elif split == "train":
            sets.append(read_questions(folder)[:count])
        else:
            sets.append(None)
    train, held_out = sets
    assert train is not None, "the first split always has questions"
    return train, held_out


def finish(trainer: OctopusGRPOTrainer, *, stopped: bool) -> None:
    """Save what a run ends with and say where it is."""
    folder = trainer.args.output_dir
    if stopped:
        if trainer.accelerator.is_main_process:
            say(
                f"stopped before its end, at step {trainer.state.global_step} of "
                f"{trainer.state.max_steps} (exit code {STOPPED}); kept {last_checkpoint(folder)}; "
                "go on with --resume_from_checkpoint true"
            )
        return
    trainer.save_model(folder, _internal_call=True)
    trainer.save_state()
    trainer.create_model_card(model_name=Path(folder).name)
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
    if trainer.accelerator.is_main_process:
        say(f"saved {folder}; traces in {folder}/traces")


def kept(argv: list[str]) -> str:
    """Say what an interrupted run leaves on disk, from its own arguments."""
    given = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    given.add_argument("--output_dir")
    folder = given.parse_known_args(argv[1:])[0].output_dir
    recipe = recipe_of(argv)
    if folder is None and recipe is not None:
        folder = yaml.safe_load(recipe.read_text(encoding="utf-8")).get("output_dir")
    last = last_checkpoint(folder) if folder else None
    if last is None:
        return "no checkpoint yet; traces of finished steps are kept"
    return f"kept {last} and the traces; go on with --resume_from_checkpoint true"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OctopusError as error:
        say(f"error: {error}")
        sys.exit(RANK_FAILED if isinstance(error, RankFailed) else 2)
    except KeyboardInterrupt:
        say(f"interrupted; {kept(sys.argv)}")
        sys.exit(130)
