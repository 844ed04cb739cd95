"""Small real runs: the trainer, the agent and the engine, with words put into the model's mouth.

An untrained model calls no tools, so `ForcedEngine` lets experts choose the tokens. Everything else
is real: pages, states, mounts, rewinds, and each token's log-probability under the weights.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig
from transformers import TrainerCallback

from octopus_trl.engine import Engine, scheduler
from octopus_trl.eval.scripted import ScriptedEngine
from octopus_trl.eval.seal_join import SYSTEM_PROMPT, World, WorldConfig
from octopus_trl.eval.seal_join_backend import SealJoinBackend, load_world
from octopus_trl.eval.seal_join_experts import ExpertOptions, ExpertPolicy
from octopus_trl.eval.seal_join_tokenizer import build_tokenizer
from octopus_trl.trace import Trace
from octopus_trl.train import weights
from octopus_trl.train.config import OctopusGRPOConfig
from octopus_trl.train.trainer import OctopusGRPOTrainer
from tests.tiny import LENGTHS, random_trace, tiny_hybrid

OPTIONS = ExpertOptions(empty_search=0.3, rewind=1.0, shuffled=0.3)
SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "max_steps": 1,
    "learning_rate": 1e-3,
    "weight_decay": 0.0,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 2,
    "system_prompt": SYSTEM_PROMPT,
    "compact_tools": True,
    "search_k": 3,
    "window": 2048,
    "max_turns": 12,
    "max_depth": 1,
    "tool_workers": 0,
    "num_pages": 1200,
    "num_states": 128,
}


@cache
def tokenizer() -> Any:
    return build_tokenizer()


# One layer of each kind: what splits parameters over ranks pays for every module.
SHALLOW = {"layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def save_untrained(folder: Path) -> Path:
    """Write a model that calls no tool and commits nothing, with its tokenizer."""
    tiny_hybrid(0, vocab_size=1024, eos_token_id=1).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


class Pair:
    """One place in the real engine and in the script."""

    def __init__(self, real: Any, script: Any) -> None:
        self.real, self.script = real, script

    @property
    def num_tokens(self) -> int:
        return self.real.num_tokens


class ForcedEngine:
    """The real engine, whose turns say what a script says.

    Turns are told apart by their seed, which the agent derives from thread and turn.
    """

    said: dict[int, list[int]]

    def __init__(self, world: World, rows: list[dict[str, Any]], engine: Engine) -> None:
        self.real, self._world, self._rows = engine, world, rows
        self._scripted = ScriptedEngine(tokenizer(), self._script_of)
        self._opened: dict[str, int] = {}
        self.said = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def _script_of(self, prompt: str) -> ExpertPolicy:
        row = next(row for row in self._rows if row["question"] in prompt)
        seed = self._opened[row["id"]] = self._opened.get(row["id"], -1) + 1
        return ExpertPolicy(self._world, row, options=OPTIONS, seed=seed % 2)

    def open(self, tokens: Any) -> Pair:
        return Pair(self.real.open(tokens), self._scripted.open(tokens))

    def fork(self, cursor: Pair) -> Pair:
        return Pair(self.real.fork(cursor.real), self._scripted.fork(cursor.script))

    def mount(self, cursor: Pair, source: Pair, since: Pair | None = None) -> Pair:
        self.real.mount(cursor.real, source.real, since.real if since else None)
        self._scripted.mount(cursor.script, source.script)
        return cursor

    def rewind(self, cursor: Pair, num_tokens: int) -> Pair:
        self.real.rewind(cursor.real, num_tokens)
        self._scripted.rewind(cursor.script, num_tokens)
        return cursor

    def close(self, cursor: Pair) -> None:
        self.real.close(cursor.real)
        self._scripted.close(cursor.script)

    def submit(self, cursor: Pair, tokens: Any, sampling: Any, *, until: Any) -> int:
        self._scripted.extend(cursor.script, tokens)
        ((words, _),) = self._scripted.generate([cursor.script], [], until=())
        self.said[sampling.seed] = words
        with mock.patch.object(scheduler, "draw", self._draw):
            return self.real.submit(cursor.real, tokens, sampling, until=until)

    def step(self) -> list[Any]:
        with mock.patch.object(scheduler, "draw", self._draw):
            return self.real.step()

    def _draw(self, wanted: Any, logits_of: Any, *, width: int) -> list[tuple[int, float]]:
        pad = [wanted[0].hidden] * (width - len(wanted))
        logits = logits_of(torch.stack([*(row.hidden for row in wanted), *pad]))
        logps = torch.log_softmax(logits, dim=-1)
        words = [self.said[row.seed][row.index] for row in wanted]
        return [(word, logps[at, word].item()) for at, word in enumerate(words)]


@contextmanager
def forced(world: World, rows: list[dict[str, Any]]) -> Iterator[None]:
    """Let every engine that a trainer makes say what experts say."""

    def make(model: Any, **options: Any) -> ForcedEngine:
        return ForcedEngine(world, rows, Engine(model, **options))

    with mock.patch.object(weights, "Engine", make):
        yield


def small_world(folder: Path) -> SealJoinBackend:
    """Write and open a world of 96 names; one guild in two has a withdrawn edition on top."""
    config = WorldConfig(
        num_adjectives=12, num_nouns=8, num_classes=2, page_fillers=1, guild_fillers=0,
        num_symbols=2, stale_first=0.5,
    )  # fmt: skip
    World(config).write(folder)
    return load_world(folder, snippet_tokens=0)


def questions(world: World, count: int = 2, split: str = "train") -> list[dict[str, Any]]:
    return world.questions(split, count, arms=("late",), branches=(2,))


def alternating(completions: Any, traces: Any, **kwargs: Any) -> list[float | None]:
    """Reward every second rollout."""
    return [float(trace.meta["rollout"] % 2 == 0) for trace in traces]


def adapter(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 2, "lora_alpha": 4, "lora_dropout": 0.0, **options})


def make_trainer(
    out: Path,
    backend: SealJoinBackend | None,
    rows: list[dict[str, Any]],
    *,
    reward: Callable[..., Any] = alternating,
    peft_config: Any = "default",
    callbacks: Any = None,
    eval_rows: Any = None,
    shape: Mapping[str, Any] | None = None,
    **settings: Any,
) -> OctopusGRPOTrainer:
    """Build a trainer of a random hybrid whose adapter, if any, is not at its zero point.

    Args:
        shape: settings of the model that differ.
    """
    model = tiny_hybrid(
        0, **{"vocab_size": 1024, "eos_token_id": tokenizer().eos_token_id, **(shape or {})}
    )
    config = adapter() if peft_config == "default" else peft_config
    trainer = OctopusGRPOTrainer(
        model,
        reward_funcs=reward,
        args=OctopusGRPOConfig(**{**SETTINGS, "output_dir": str(out), **settings}),
        train_dataset=rows,
        eval_dataset=eval_rows,
        processing_class=tokenizer(),
        tools=backend,
        peft_config=config,
        callbacks=callbacks,
    )
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(trainer.model.named_parameters()):
            if "lora_" in name:
                parameter.normal_(0.0, 0.1, generator=draws)
    return trainer


class Gradients(TrainerCallback):
    """Copies the gradients before each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.steps.append({n: p.grad.clone() for n, p in named if p.grad is not None})


@contextmanager
def replayed(
    *, sizes: Sequence[int] = (14,), lengths: Sequence[int] = LENGTHS
) -> Iterator[list[str]]:
    """Replace generation by random episodes that depend on question, rollout and step alone.

    Args:
        sizes: segments after the roots, question by question in turn; 0 samples no token.
        lengths: tokens of a segment.
    Yields:
        The ids of the questions asked, one for each episode.
    """
    asked: list[str] = []

    def run(self: Any, inputs: list[dict[str, Any]], size: int, mode: str) -> list[Trace]:
        asked.extend(str(row["id"]) for row in inputs)
        traces = []
        for index, row in enumerate(inputs):
            rollout = index % size
            seed = zlib.crc32(f"{row['id']} {rollout} {self.state.global_step}".encode())
            steps = sizes[int(str(row["id"]).removeprefix("q")) % len(sizes)]
            prompt = [zlib.crc32(str(row["id"]).encode()) % 1000 + 3, *range(20)]
            trace = random_trace(
                seed, steps=steps, prompt=prompt, logps=True, vocab_size=1024, lengths=lengths
            )
            trace.policy_version = self.state.global_step
            trace.meta = {"rollout": rollout, "result": f"{row['id']} {rollout}"}
            traces.append(trace)
        return traces

    with mock.patch.object(OctopusGRPOTrainer, "_run_episodes", run):
        yield asked


def asked_rows(count: int) -> list[dict[str, Any]]:
    """Make questions that nobody searches for."""
    return [{"id": f"q{index}", "question": f"question {index}"} for index in range(count)]


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Give the largest relative difference of two sets of tensors, by norm of each tensor."""
    assert left.keys() == right.keys()
    return max(
        ((left[name] - right[name]).norm() / right[name].norm().clamp(min=1e-12)).item()
        for name in left
    )


def trained(trainer: OctopusGRPOTrainer) -> dict[str, torch.Tensor]:
    """Copy the parameters that train."""
    named = trainer.model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


def logged(trainer: OctopusGRPOTrainer, key: str) -> list[Any]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]
