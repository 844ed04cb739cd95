"""Writes `docs/config.md` from the settings: `python -m octopus_trl.train.config_table`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from octopus_trl.train.config import REFUSED, own_fields

DOCUMENT = Path(__file__).parents[2] / "docs" / "config.md"
HEAD = """# Settings

Written by `python -m octopus_trl.train.config_table`; edit `octopus_trl/train/config.py` instead.

`OctopusGRPOConfig` is TRL's `GRPOConfig` with the fields below. Recipes set both by name; an
unknown name is an error. `paper` is the symbol or name in the Octopus report where it has one.

## Our fields

| field | default | unit | paper | meaning |
|---|---|---|---|---|
"""
TAIL = """
## Fields of TRL that keep their meaning

`num_generations` (G rollouts a question), `per_device_train_batch_size` (episodes of a micro-step
on a rank, whole groups), `gradient_accumulation_steps`, `steps_per_generation` and
`num_iterations` (reuse of a generation), `temperature`, `beta` (weight of the divergence from the
model without its adapter), `epsilon` and `epsilon_high` (clip of the ratio, Eq. 9),
`reward_weights`, `mask_truncated_completions`, `num_generations_eval`, `log_completions`,
`chat_template_kwargs`, and everything of transformers' `TrainingArguments`. `loss_type` is `grpo`
and `scale_rewards` is `none`.

## Fields of TRL that are refused

| field | allowed | instead |
|---|---|---|
"""


def render() -> str:
    """Give the document as text."""
    rows = [
        f"| `{name}` | {_value(default)} | {unit} | {symbol} | {_cell(text)} |"
        for name, default, text, unit, symbol in own_fields()
    ]
    refused = [
        f"| `{name}` | {_value(allowed[0])} | {_cell(instead)} |"
        for name, (allowed, instead) in REFUSED.items()
    ]
    return HEAD + "\n".join(rows) + "\n" + TAIL + "\n".join(refused) + "\n"


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(render(), encoding="utf-8")
    sys.stdout.write(f"{DOCUMENT}\n")
