"""Writes `recipes/qwen3.5-4b/README.md`: `python -m octopus_trl.train.plan_table`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from trl import ModelConfig

from octopus_trl.train.config import OctopusGRPOConfig
from octopus_trl.train.plan import GIB
from octopus_trl.train.plan_report import PlanArguments, Report, make_report
from octopus_trl.train.startup import RecipeParser

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "qwen3.5-4b"
DOCUMENT = FOLDER / "README.md"
_GPUS = re.compile(r"_((?:\d+x)?\d+)gpu$")
HEAD = """# Qwen3.5-4B

Written by `python -m octopus_trl.train.plan_table`: what `scripts/train.py --plan` says of each
recipe here on H200s of 139 GiB. Nothing in this table was run at this size: bytes are counted from
the model's configuration (`model.json`, shapes of `Qwen/Qwen3.5-4B`), the engine's own rule for its
pools, and the widths of a packed row (`octopus_trl/train/footprint.py` says what was compared).

    python scripts/train.py --config recipes/qwen3.5-4b/grpo/config_octopus.yaml --plan --gpus 8

"""
COLUMNS = (
    "recipe",
    "GPUs, launch file",
    "questions a step",
    "held",
    "pages",
    "states",
    "packed row",
    "peaks: generation, update",
    "longest row that fits, host memory of a row",
    "decode, prefill, update of a step",
    "an episode of the mix",
)
TAIL = """
*Held* is weights, adapter, resident copy (ZeRO-3), optimizer and gradients; bytes are of one GPU.
Seconds are for episodes of {given:,} tokens given and {sampled:,} sampled, the frozen mix
`data/bench/mixes/episode_v1.json.gz`, at these rates:

{sources}

Tools, rewards, old log-probs and what a short row saves or a long one adds to the rate of its
update are not in them. An episode like that mix is one tree of {unique:,} tokens. A tree is never
split: where it exceeds `max_row_tokens` it is left out of the update whole, counted in
`packing/left_out`. Rows that long fit with `mlp_tile_tokens` and `activation_offloading`.
"""


def read_recipe(path: Path) -> tuple[OctopusGRPOConfig, ModelConfig]:
    """Read a recipe's settings of training and model, as a machine without a GPU can.

    Raises:
        ConfigError, ValueError: a value is refused.
    """
    parser = RecipeParser((OctopusGRPOConfig, ModelConfig))
    args, model_args, _ = parser.parse_args_and_config(
        ["--config", str(path), "--use_cpu", "true"], return_remaining_strings=True
    )
    return args, model_args


def report_of(path: Path) -> Report:
    """Plan a recipe for the GPUs that its file name says, 8 where it says none."""
    args, model_args = read_recipe(path)
    named = _GPUS.search(path.stem)
    return make_report(args, model_args, PlanArguments(gpus=[named[1] if named else "8"]), path)


def render() -> str:
    """Give the document as text."""
    reports = {path: report_of(path) for path in sorted((FOLDER / "grpo").glob("*.yaml"))}
    lines = [_line(path.name, report) for path, report in reports.items()]
    episode = next(iter(reports.values())).episode
    speeds = [each for report in reports.values() for each in report.speeds]
    sources = [
        f"- {name}: {source}"
        for name in ("decode", "prefill", "update")
        for source in dict.fromkeys(getattr(each, name).source for each in speeds)
    ]
    tail = TAIL.format(
        given=episode.given,
        sampled=episode.sampled,
        unique=episode.unique,
        sources="\n".join(sources),
    )
    head = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    return HEAD + "\n".join(head + lines) + "\n" + tail


def _line(name: str, report: Report) -> str:
    (plan,), (speeds,) = report.plans, report.speeds
    seconds = plan.seconds(speeds, report.episode)
    cells = (
        f"`{name}`",
        f"{plan.layout.name}, `{plan.layout.launch_file}.yaml`",
        str(plan.questions_a_step),
        _gib(plan.held + plan.trained_state),
        f"{plan.sizes.pages:,} ({_gib(plan.page_bytes)})",
        f"{plan.sizes.states:,} ({_gib(plan.state_bytes)})",
        _gib(plan.row_bytes),
        f"{_gib(plan.generation_bytes)}, {_gib(plan.update_bytes)}",
        f"{plan.longest_row:,}, {_gib(plan.host_bytes)}",
        ", ".join("no figure" if s is None else f"{s:,.0f} s" for s in seconds.values()),
        "fits a row" if report.episode.unique <= plan.args.max_row_tokens else "left out",
    )
    return "| " + " | ".join(cells) + " |"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
    sys.stdout.write(f"{DOCUMENT}\n")
