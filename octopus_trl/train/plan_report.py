"""`scripts/train.py --plan`: from a recipe and a model's configuration to what a run takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from trl import ModelConfig, get_peft_config

from octopus_trl.errors import ConfigError
from octopus_trl.models import spec_of
from octopus_trl.models.spec import ModelSpec
from octopus_trl.train.config import OctopusGRPOConfig
from octopus_trl.train.figures import BENCH, decode_figure, prefill_figure, update_figure
from octopus_trl.train.footprint import Footprint, build
from octopus_trl.train.plan import GIB, Episode, Layout, Plan, Speeds, gib, parse_layout
from octopus_trl.train.startup import load_pretrained, read_json

USUAL = ("1", "8", "2x8")
SHIPPED = "model.json"  # of recipes/MODEL/: a configuration that needs no hub
MEASURED = Path(__file__).parents[2] / "recipes" / "qwen3.5-4b" / SHIPPED
_counted: dict[str, Footprint] = {}


@dataclass
class PlanArguments:
    """Print what the recipe would take, and start nothing."""

    plan: bool = field(
        default=False,
        metadata={"help": "Print memory and time that this recipe takes and exit; loads nothing."},
    )
    gpus: list[str] | None = field(
        default=None,
        metadata={"help": "Of the plan: GPUs, or machines x GPUs; 1, 8 and 2x8 if not given."},
    )
    zero: int | None = field(
        default=None,
        metadata={
            "help": "Of the plan: ZeRO stage, 0 is DDP. If not given none on one GPU, 2 on several."
        },
    )
    gpu_memory: float = field(
        default=139.0, metadata={"help": "Of the plan: GiB of one GPU; an H200 has 139."}
    )
    card: str = field(
        default="H200", metadata={"help": "Of the plan: whose figures of data/bench/ count."}
    )
    model_config: str | None = field(
        default=None,
        metadata={"help": "Of the plan: JSON file of the model's configuration, needs no hub."},
    )
    episode_given: int = field(
        default=345_453,
        metadata={
            "help": "Of the plan: tokens given to an episode; those of "
            "data/bench/mixes/episode_v1.json.gz."
        },
    )
    episode_sampled: int = field(
        default=23_937, metadata={"help": "Of the plan: tokens sampled by an episode; the same."}
    )


@dataclass
class Report:
    """Plans of one recipe, ready to print."""

    title: str
    plans: list[Plan]
    speeds: list[Speeds]
    episode: Episode

    def rows(self) -> list[tuple[str, list[str]]]:
        """Give every line as its name and a text for each plan."""
        plans = self.plans
        parts = ("weights", "adapter", "resident copy", "optimizer", "gradients", "buckets")
        seconds = [
            plan.seconds(speeds, self.episode)
            for plan, speeds in zip(plans, self.speeds, strict=True)
        ]

        def each(call: Any) -> list[str]:
            return [call(plan) for plan in plans]

        return [
            ("GPUs", each(lambda p: p.layout.name)),
            ("accelerate_configs/", each(lambda p: p.layout.launch_file)),
            ("questions a step", each(lambda p: f"{p.questions_a_step:,}")),
            ("episodes a GPU a step", each(lambda p: f"{p.episodes_a_rank:,.0f}")),
            ("threads at once a GPU, at most", each(lambda p: f"{p.threads_at_once:,}")),
            *((name, each(lambda p, n=name: gib(p.parts.get(n, 0)))) for name in parts),
            ("pages", each(lambda p: f"{p.sizes.pages:,}")),
            ("tokens in pages", each(lambda p: f"{p.sizes.pages * p.args.page_size:,}")),
            ("KV pool", each(lambda p: gib(p.page_bytes))),
            ("states", each(lambda p: f"{p.sizes.states:,}")),
            ("state pool", each(lambda p: gib(p.state_bytes))),
            ("widest pass of the engine", each(lambda p: gib(p.pass_bytes))),
            ("packed tokens of a row, at most", each(lambda p: f"{p.args.max_row_tokens:,}")),
            ("packed row", each(lambda p: gib(p.row_bytes))),
            ("packed row, in host memory", each(lambda p: gib(p.host_bytes))),
            ("peak of a generation", each(lambda p: gib(p.generation_bytes))),
            ("peak of an update", each(lambda p: gib(p.update_bytes))),
            ("longest row that would fit", each(lambda p: f"{p.longest_row:,}")),
            *(
                (f"{name} of a step", [_seconds(found[name]) for found in seconds])
                for name in ("decode", "prefill", "update")
            ),
            ("expected step", [_sum(found) for found in seconds]),
            ("fits", each(lambda p: "no" if p.problems else "yes")),
        ]

    def text(self) -> str:
        """Give the plan as a table with what it rests on below."""
        rows = self.rows()
        widths = [max(len(texts[at]) for _, texts in rows) for at in range(len(self.plans))]
        left = max(len(name) for name, _ in rows)
        lines = [self.title, ""]
        for name, texts in rows:
            cells = [text.rjust(width) for text, width in zip(texts, widths, strict=True)]
            lines.append(f"{name:<{left}}  " + "  ".join(cells))
        lines += ["", *self.notes()]
        return "\n".join(lines)

    def notes(self) -> list[str]:
        """Say what the figures are, each once, and what to mind."""
        episode = self.episode
        given = f"{episode.given:,} tokens given and {episode.sampled:,} sampled"
        notes = [f"times: for episodes of {given}; tools, rewards, old log-probs are not in them"]
        for name in ("decode", "prefill", "update"):
            sources = (getattr(speeds, name).source for speeds in self.speeds)
            notes += [f"{name}: {source}" for source in dict.fromkeys(sources)]
        if any(plan.layout.zero == 3 for plan in self.plans):
            notes.append("weights under ZeRO-3: a rank's share and what DeepSpeed keeps gathered")
        for plan in self.plans:
            notes += [f"gpus={plan.layout.name}: {text}" for text in plan.warnings(episode)]
        return notes

    def refuse(self) -> None:
        """Refuse what cannot fit.

        Raises:
            ConfigError: names each layout and why.
        """
        found = [f"gpus={p.layout.name}: {text}" for p in self.plans for text in p.problems]
        if found:
            raise ConfigError("this plan cannot run: " + "; ".join(found))


def make_report(
    args: OctopusGRPOConfig, model_args: ModelConfig, asked: PlanArguments, recipe: Path | None
) -> Report:
    """Plan a recipe on each layout that was asked for.

    Args:
        recipe: its file, beside whose folder a `model.json` may lie.
    Raises:
        ConfigError: no configuration of the model, or a number out of range.
    """
    for name in ("gpu_memory", "episode_given", "episode_sampled"):
        if not getattr(asked, name) > 0:
            raise ConfigError(f"{name}={getattr(asked, name)}: must be above 0")
    config, source = read_config(model_args, asked.model_config, recipe)
    plugin = args.deepspeed_plugin
    launched = None if plugin is None else int(plugin.zero_stage)
    zero = launched if asked.zero is None else asked.zero
    layouts = [parse_layout(text, zero) for text in asked.gpus or USUAL]
    card = int(asked.gpu_memory * GIB)
    plans = [
        Plan(args, footprint_of(args, model_args, config, layout), layout, card)
        for layout in layouts
    ]
    same = plans[0].footprint.spec == measured_spec()
    folder = BENCH if same else BENCH / "none"  # figures are those of one model's shapes
    speeds = [
        Speeds(
            decode_figure(asked.card, plan.threads_at_once, folder),
            prefill_figure(asked.card, folder),
            update_figure(asked.card, folder),
        )
        for plan in plans
    ]
    title = (
        f"plan of {recipe or 'the settings given'}: {model_args.model_name_or_path} ({source}), "
        f"{asked.card} of {asked.gpu_memory:g} GiB; bytes of one GPU"
    )
    return Report(title, plans, speeds, Episode(asked.episode_given, asked.episode_sampled))


def footprint_of(
    args: OctopusGRPOConfig, model_args: ModelConfig, config: Any, layout: Layout
) -> Footprint:
    """Count a model as this layout loads it; recipes of one model are counted once.

    Raises:
        ConfigError: see `footprint.build`.
    """
    adapter = get_peft_config(model_args)
    wide = layout.zero != 3  # TRL leaves an adapter in the model's dtype under ZeRO-3
    dtype = _dtype(model_args, config)
    modes: dict[str, Any] = {
        "autocast": bool(args.bf16),
        "checkpointing": bool(args.gradient_checkpointing),
        "tile_tokens": args.mlp_tile_tokens,
        "offloading": args.activation_offloading,
    }
    settings = [str(dtype), args.mount_layers, wide, modes]
    targets = None if adapter is None else adapter.to_dict()
    key = json.dumps([settings, targets, config.to_dict()], sort_keys=True, default=str)
    if key not in _counted:
        model = build(
            config,
            dtype,
            mount_layers=args.mount_layers,
            peft_config=adapter,
            autocast_adapter=wide,
        )
        _counted[key] = Footprint.of(model, **modes)
    return _counted[key]


@cache
def measured_spec() -> ModelSpec:
    """Give the shapes that `data/bench/` has GPU figures of."""
    return spec_of(build(config_of(read_json(str(MEASURED), "model_config")), torch.bfloat16))


def read_config(model_args: ModelConfig, file: str | None, recipe: Path | None) -> tuple[Any, str]:
    """Give a model's configuration and where it is from: a file, its folder, the one that ships
    with its recipes, else the hub.

    Raises:
        ConfigError: none of them has it.
    """
    name = model_args.model_name_or_path
    if file is not None:
        return config_of(read_json(file, "model_config")), file
    if name is None:
        raise ConfigError("model_name_or_path is not set: name a folder or a hub model")
    shipped = None if recipe is None else recipe.resolve().parent.parent / SHIPPED
    if not Path(name).is_dir() and shipped is not None and shipped.is_file():
        fields = read_json(str(shipped), "model_config")
        if fields.get("_name_or_path") == name:
            return config_of(fields), f"shapes of {shipped.parent.name}/{SHIPPED}"
    try:
        revision = model_args.model_revision
        config = load_pretrained(
            AutoConfig.from_pretrained, "model_name_or_path", name, revision=revision
        )
    except ConfigError as error:
        raise ConfigError(
            f"{error}; a plan needs its config.json alone: give --model_config FILE"
        ) from None
    return config, "its own config.json"


def config_of(fields: dict[str, Any]) -> Any:
    """Make a configuration from its JSON.

    Raises:
        ConfigError: no such kind of model, or a field that it refuses.
    """
    named = ("model_type", "_name_or_path")
    rest = {name: value for name, value in fields.items() if name not in named}
    try:
        return AutoConfig.for_model(fields["model_type"], **rest)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(
            f"model_config: no configuration of a model ({type(error).__name__}: {error}); give "
            "the config.json that lies beside its weights"
        ) from None


def _dtype(model_args: ModelConfig, config: Any) -> torch.dtype:
    """Give the dtype that the weights are loaded in."""
    asked = model_args.dtype
    if asked in (None, "auto"):
        found = getattr(config, "dtype", None) or torch.float32
        return found if isinstance(found, torch.dtype) else getattr(torch, str(found))
    dtype: torch.dtype = getattr(torch, str(asked))
    return dtype


def _seconds(value: float | None) -> str:
    return "no figure" if value is None else f"{value:,.0f} s"


def _sum(found: dict[str, float | None]) -> str:
    known = [value for value in found.values() if value is not None]
    if not known:
        return "no figure"
    return f"{'' if len(known) == len(found) else 'over '}{sum(known):,.0f} s"


def wants_plan(argv: Sequence[str]) -> bool:
    """Whether a command line asks for a plan."""
    return any(word.partition("=")[0] == "--plan" for word in argv)


def recipe_of(argv: Sequence[str]) -> Path | None:
    """Give the recipe that a command line names."""
    at = argv.index("--config") + 1 if "--config" in argv else len(argv)
    return Path(argv[at]) if at < len(argv) else None
