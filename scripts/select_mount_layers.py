"""Find the layers that a mount must reach, and write the recipe line.

    python scripts/select_mount_layers.py --model Qwen/Qwen3-0.6B --out runs/layers.json
    python scripts/select_mount_layers.py --model MODEL --probes mine.jsonl --method top \
        --max-layers 6 --recipe recipes/MODEL/grpo/config_MINE.yaml

Scores every attention layer by what a mount on it alone restores of the answer's NLL, where the
sibling's full text restores all; then grows a set (`--method greedy` tries every further layer,
`top` takes them in that order) and scores the choice on probes that it was not chosen on. Works on
any model that `prepare_model` takes, dense or hybrid, from a folder or the hub. `--probes FILE`
takes your own passages, `{"text", "question", "answer"}` a line. A run that was stopped goes on
from the scores beside `--out`. Exit codes: 0 done; 2 a setting is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from octopus_trl.report.ending import ending, importing

with importing():
    from rich.console import Console
    from rich.table import Table

    from octopus_trl import prepare_model
    from octopus_trl.errors import ConfigError
    from octopus_trl.eval.layer_scores import LayerScores
    from octopus_trl.eval.mount_layers import (
        METHODS,
        AnswerNll,
        LayerStudy,
        Restored,
        check_growth,
        grow,
        mean,
        most_passes,
    )
    from octopus_trl.eval.probes import Probe, read_probes, station_probes
    from octopus_trl.eval.recipe_line import check_recipe, mount_line, write_mount_layers
    from octopus_trl.files import write_whole
    from octopus_trl.models import spec_of
    from octopus_trl.report.progress import StageBars
    from octopus_trl.trace import Trace
    from octopus_trl.train.choices import score_last
    from octopus_trl.train.measured import circumstances, load_measured, read_layers
    from octopus_trl.train.startup import hush_libraries

READINGS = ("mount", "unshifted", "rerotate", "reencode")
_STAGE = "layer sets, at most"


def main() -> None:
    asked = arguments()
    hush_libraries()
    if asked.out is not None and asked.out.is_dir():
        raise ConfigError(f"--out {asked.out}: is a folder; name a file")
    check_growth(asked.method, asked.max_layers, asked.target)
    if asked.n < 4:
        raise ConfigError(f"-n {asked.n}: must be at least 4, half of them are held out")
    if asked.recipe is not None:
        check_recipe(asked.recipe)
    model, tokenizer = load_measured(asked.model, "all")
    probes, held_out = halves(draw_probes(asked, tokenizer))
    attention = spec_of(model).attention_layers
    candidates = attention if asked.layers is None else chosen_layers(asked.layers, attention)
    settings = {
        "model": asked.model,
        "reading": asked.reading,
        "probes": digest(probes),
        "dtype": str(next(model.parameters()).dtype),
    }
    kept = None if asked.out is None else asked.out.with_suffix(".scores.jsonl")
    scores = {} if kept is None else LayerScores(kept, settings)
    with StageBars() as bars:
        most = most_passes(len(candidates), asked.method, asked.max_layers)
        nll = scorer(model, most, bars)
        study = LayerStudy(probes, nll, candidates, reading=asked.reading, scores=scores)
        ranked = study.rank()
        everywhere = study.restored(candidates)
        path = grow(study, method=asked.method, max_layers=asked.max_layers, target=asked.target)
        apart = LayerStudy(held_out, nll, candidates, reading=asked.reading)
        check = apart.restored(path[-1].layers)
    print_tables(study, ranked, everywhere, path, check)
    line = mount_line(path[-1].layers)
    print(line)
    if asked.out is not None:
        result = {
            **settings,
            "mount_layers": list(path[-1].layers),
            "method": asked.method,
            "target": asked.target,
            "nll_without": mean(study.none),
            "nll_full_text": mean(study.full),
            "alone": [each.as_json() for each in ranked],
            "all": everywhere.as_json(),
            "path": [each.as_json() for each in path],
            "held_out": check.as_json(),
            **circumstances(sys.argv),
        }
        write_whole(asked.out, json.dumps(result, indent=1) + "\n")
    if asked.recipe is not None:
        write_mount_layers(asked.recipe, path[-1].layers)
        print(f"written to {asked.recipe}", file=sys.stderr)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder, hub name, .gguf, smollm2")
    parser.add_argument("--layers", help="score these alone: 3,5-9; all attention layers if not")
    parser.add_argument("--probes", type=Path, help="your own, one JSON object a line")
    parser.add_argument("-n", type=int, default=32, help="probes; half of them are held out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sibling-facts", type=int, default=4, help="lines that the sibling wrote")
    parser.add_argument("--own-facts", type=int, default=3, help="lines that the reader wrote")
    parser.add_argument("--reading", choices=READINGS, default="mount")
    parser.add_argument("--method", choices=METHODS, default="greedy")
    parser.add_argument("--max-layers", type=int, default=4)
    parser.add_argument("--target", type=float, default=0.95, help="share at which it is enough")
    parser.add_argument("--out", type=Path, help="JSON of all scores; a stopped run goes on there")
    parser.add_argument("--recipe", type=Path, help="YAML file whose mount_layers are set")
    return parser.parse_args()


def draw_probes(asked: argparse.Namespace, tokenizer: Any) -> list[Probe]:
    """Give the probes asked for.

    Raises:
        ConfigError: a file holds fewer than four, or a count is out of range.
    """

    def encode(text: str) -> Sequence[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    begin = tuple(tokenizer("").input_ids)
    if asked.probes is None:
        return station_probes(
            encode,
            asked.n,
            seed=asked.seed,
            sibling_facts=asked.sibling_facts,
            own_facts=asked.own_facts,
            begin=begin,
        )
    probes = list(read_probes(asked.probes, encode, begin=begin))[: asked.n]
    if len(probes) < 4:
        raise ConfigError(f"--probes {asked.probes}: holds {len(probes)}, must be at least 4")
    return probes


def halves(probes: Sequence[Probe]) -> tuple[list[Probe], list[Probe]]:
    """Give those to choose on and those held out, in turn."""
    return list(probes[::2]), list(probes[1::2])


def chosen_layers(text: str, attention: Sequence[int]) -> tuple[int, ...]:
    """Read the layers to score.

    Raises:
        ConfigError: one is no attention layer.
    """
    layers = read_layers(text, 1 + max(attention))
    if isinstance(layers, str) or not set(layers) <= set(attention):
        raise ConfigError(f"--layers {text}: must be among the attention layers {list(attention)}")
    return tuple(sorted(set(layers)))


def digest(probes: Sequence[Probe]) -> str:
    """Name a set of probes by their tokens."""
    text = "\n".join(map(repr, probes))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def scorer(model: Any, most: int, bars: StageBars) -> AnswerNll:
    """Give what scores episodes with a model's mounts on some layers and tells how far it is.

    Args:
        most: passes over all probes at most.
    """
    passes = count(1)

    def nll(traces: Sequence[Trace], layers: Sequence[int]) -> list[float]:
        prepare_model(model, mount_layers=layers)
        found = [-sum(logps) for logps, _ in score_last(model, traces)]
        bars.tell(_STAGE, next(passes), most)
        return found

    bars.tell(_STAGE, 0, most)
    return nll


def print_tables(
    study: LayerStudy,
    ranked: Sequence[Restored],
    everywhere: Restored,
    path: Sequence[Restored],
    check: Restored,
) -> None:
    """Print what each layer restores alone, and how the choice was made."""
    alone = Table(title="one layer alone")
    for name in ("layer", "restored of the full text", "answer NLL, nats"):
        alone.add_column(name, justify="right")
    for each in sorted(ranked, key=lambda each: each.layers):
        name = str(each.layers[0])
        picked = each.layers[0] in path[-1].layers
        alone.add_row(name, *figures(each), style="bold" if picked else None)
    sets = Table(title=f"sets, {len(study.probes)} probes")
    for name in ("mounted", "restored of the full text", "answer NLL, nats"):
        sets.add_column(name, justify="right")
    sets.add_row("nothing read", "0 %", f"{mean(study.none):.3f}")
    for each in path:
        sets.add_row(" ".join(map(str, each.layers)), *figures(each))
    sets.add_row("every candidate", *figures(everywhere))
    sets.add_row("full text", "100 %", f"{mean(study.full):.3f}")
    sets.add_row(f"the choice on {check.share.n} held-out probes", *figures(check), style="bold")
    console = Console(highlight=False)
    console.print(alone)
    console.print(sets)


def figures(each: Restored) -> tuple[str, str]:
    """Lay out a share with its interval, and the NLL."""
    low_high = each.share.interval
    interval = "" if low_high is None else f" ({low_high[0]:.1%} to {low_high[1]:.1%})"
    return f"{each.value:.1%}{interval}", f"{each.nll:.3f}"


if __name__ == "__main__":
    with ending(disk="scores of finished layer sets are kept beside --out"):
        main()
