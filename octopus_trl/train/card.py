"""The model card: recipe, data, metrics and versions of a run, without paths or secrets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml
from accelerate.utils import is_peft_model
from huggingface_hub import ModelCard, ModelCardData

PACKAGES = (
    "octopus_trl",
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "deepspeed",
    "flash-linear-attention",
    "flash-attn-4",
)
# What a card shows of a run: the first and the last value of each that was logged.
FIGURES = (
    "reward",
    "eval_reward",
    "episode/forks",
    "episode/mounts",
    "episode/rewinds",
    "episode/owned_tokens",
    "packing/dedup_ratio",
    "rollout_kl/mean",
    "clip_ratio/region_mean",
    "loss",
)
# Settings that say where a run was, not what it was, or that nobody else may read.
_PRIVATE = ("dir", "path", "token", "hub", "run_name", "resume", "disable_tqdm", "local_rank")


class Card:
    """The part of the trainer that describes what came out; stands before TRL's class."""

    args: Any
    model: Any
    state: Any
    train_dataset: Any
    eval_dataset: Any
    reward_func_names: list[str]
    hub_model_id: str | None
    is_world_process_zero: Any
    _name: str
    _tag_names: list[str]
    _trained_by = "GRPO over whole episodes"

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        """Write `README.md` into the output folder.

        Args:
            model_name: title; the output folder's name by default.
            dataset_name: name of the training data on the hub, where it has one.
            tags: more tags for the card's head.
        """
        if not self.is_world_process_zero():
            return
        more = [tags] if isinstance(tags, str) else list(tags or ())
        base = public_name(getattr(self.model.config, "_name_or_path", None))
        head = ModelCardData(
            library_name="peft" if is_peft_model(self.model) else "transformers",
            base_model=base,
            datasets=dataset_name,
            model_name=model_name,
            pipeline_tag="text-generation",
            tags=sorted({*self._tag_names, *more}),
        )
        text = render(
            head.to_yaml(),
            title=model_name or Path(self.args.output_dir).name,
            base=base,
            is_adapter=is_peft_model(self.model),
            place=self.hub_model_id or "FOLDER",
            recipe={**recipe_of(self.args), **adapter_of(self.model)},
            data={
                "training": describe_data(self.train_dataset, dataset_name),
                "evaluation": describe_data(self.eval_dataset, None),
                "rewards": ", ".join(self.reward_func_names) or "none",
            },
            trained_by=self._trained_by,
            history=self.state.log_history,
            step=self.state.global_step,
        )
        ModelCard(text).save(Path(self.args.output_dir) / "README.md")


def render(
    head: str,
    *,
    title: str,
    base: str | None,
    is_adapter: bool,
    place: str,
    recipe: Mapping[str, Any],
    data: Mapping[str, str],
    trained_by: str,
    history: Sequence[Mapping[str, Any]],
    step: int,
) -> str:
    """Lay the card out as Markdown behind its YAML head."""
    kind = "LoRA adapter" if is_adapter else "model"
    of = f" of `{base}`" if base else ""
    rows = "\n".join(
        f"| `{name}` | {first:.4g} | {last:.4g} |" for name, first, last in figures(history)
    )
    loading = [
        "from transformers import AutoModelForCausalLM",
        *(["from peft import PeftModel"] if is_adapter else []),
        "from octopus_trl import prepare_model",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{base if is_adapter else place}")',
        *([f'model = PeftModel.from_pretrained(model, "{place}")'] if is_adapter else []),
        "model = prepare_model(model)  # threads over shared pages; a plain forward is unchanged",
    ]
    what = (
        f"A {kind}{of} that works on a question as many threads: it forks, reads what its threads "
        f"found through mounted KV pages, rewinds and commits. Trained by {trained_by} "
        f"with octopus_trl, {step} optimizer steps."
    )
    parts = [
        f"---\n{head}\n---",
        f"# {title}",
        what,
        "## Load\n\n```python\n" + "\n".join(loading) + "\n```",
        "## Recipe\n\n```yaml\n" + yaml.safe_dump(dict(recipe), sort_keys=True).strip() + "\n```",
        "## Data\n\n" + "\n".join(f"- {name}: {what}" for name, what in data.items()),
        "## Metrics\n\n| figure | first | last |\n|---|---|---|\n" + rows,
        "## Versions\n\n" + "\n".join(f"- {name} {number}" for name, number in versions()),
    ]
    return "\n\n".join(parts) + "\n"


def recipe_of(args: Any) -> dict[str, Any]:
    """Give the settings that differ from their defaults, without places and secrets."""
    found: dict[str, Any] = {}
    for field in fields(args):
        value = getattr(args, field.name)
        default = field.default
        if default is MISSING:
            default = field.default_factory() if field.default_factory is not MISSING else None
        if value == default or any(word in field.name for word in _PRIVATE):
            continue
        plain = _plain(value)
        if plain is not None:
            found[field.name] = plain
    return found


def adapter_of(model: Any) -> dict[str, Any]:
    """Give the adapter's sizes under the names that a recipe uses."""
    if not is_peft_model(model):
        return {}
    config = model.peft_config[model.active_adapters[0]]
    targets = config.target_modules
    return {
        "use_peft": True,
        "lora_r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "lora_target_modules": targets if isinstance(targets, str) else sorted(targets or ()),
    }


def describe_data(dataset: Any, name: str | None) -> str:
    """Say how many questions there are, with which columns, and a mark of their content.

    Rows that are made while a run goes on are counted only.
    """
    if dataset is None:
        return "none"
    if isinstance(dataset, Mapping):
        return "; ".join(f"{key}: {describe_data(part, None)}" for key, part in dataset.items())
    named = f"`{name}`, " if name else ""
    if not hasattr(dataset, "column_names"):
        return f"{named}{len(dataset)} packed rows, drawn from a seed and the number of the row"
    columns = ", ".join(f"`{column}`" for column in dataset.column_names)
    mark = getattr(dataset, "_fingerprint", None)
    return f"{named}{len(dataset)} questions, columns {columns}, fingerprint {mark}"


def figures(history: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float]]:
    """Give (name, first, last) of the figures that were logged."""
    found = []
    for name in FIGURES:
        values = [entry[name] for entry in history if isinstance(entry.get(name), int | float)]
        if values:
            found.append((name, float(values[0]), float(values[-1])))
    return found


def versions() -> list[tuple[str, str]]:
    """List the installed packages that a run depends on."""
    found = []
    for name in PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return found


def public_name(place: str | None) -> str | None:
    """Give a hub name as it is and of a folder its last part alone."""
    if not place:
        return None
    return Path(place).name if os.path.isdir(place) or os.path.isabs(place) else place


def _plain(value: Any) -> Any:
    """Give what YAML spells plainly, None for anything else."""
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        text = str(getattr(value, "value", value))
        return None if os.path.isabs(text) else text
    if isinstance(value, list | tuple) and all(isinstance(one, str | int | float) for one in value):
        return list(value)
    return None
