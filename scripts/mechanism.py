"""Measure what a read does to its reader, on probes or on recorded episodes.

    python scripts/mechanism.py probes --model smollm2 --mount-layers all -n 100
    python scripts/mechanism.py probes --model data/policy/tiny-hybrid --probes seal
    python scripts/mechanism.py traces runs/eval/traces.jsonl --model data/policy/tiny-hybrid --kl
    python scripts/mechanism.py table --write

`probes` scores passages that only a sibling holds under every reading (none, transcript, mount,
unshifted, ...; `octopus_trl/eval/readings.py`) with any causal LM that `prepare_model` takes.
`traces` takes episodes: hijacking, mounts that are ahead, extra KV, with `--kl` the KL of rollout
against training with live and with dropped mounts, with `--crossings` the probes that their turns
make. Each prints a JSON line a reading or file (to `--out` too) and a table; every figure has its
interval and n, and its definition in `octopus_trl/eval/`. `table` writes `docs/systems.md` from the
lines in data/records.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from octopus_trl.report.ending import ending, importing

with importing():
    import torch
    from rich.console import Console
    from rich.table import Table
    from transformers import AutoTokenizer

    from octopus_trl import score_traces
    from octopus_trl.agent.chat import Chat
    from octopus_trl.agent.tools import offered
    from octopus_trl.errors import ConfigError
    from octopus_trl.eval.crossings import crossings_of
    from octopus_trl.eval.errands import errand_probes
    from octopus_trl.eval.extra_kv import KvSize, extra_kv, extra_tokens
    from octopus_trl.eval.hijacking import hijack_share, judge_with
    from octopus_trl.eval.intervals import mean, ratio, share, share_by_example
    from octopus_trl.eval.judge_models import ServerModel
    from octopus_trl.eval.mechanism import Scored, as_json, figures_of, score_probes
    from octopus_trl.eval.mount_kl import mount_kl
    from octopus_trl.eval.probes import Probe, read_probes, station_probes
    from octopus_trl.eval.readings import READINGS, check_readings
    from octopus_trl.eval.seal_join_backend import load_world
    from octopus_trl.eval.seal_probes import seal_probes
    from octopus_trl.eval.systems_page import load_lines, page
    from octopus_trl.eval.trace_statistics import count_mounts
    from octopus_trl.models import spec_of
    from octopus_trl.models.packed import MountMode
    from octopus_trl.trace import Trace
    from octopus_trl.trace_files import read_traces
    from octopus_trl.train.choices import score_last
    from octopus_trl.train.measured import circumstances, load_measured
    from octopus_trl.train.startup import hush_libraries, load_pretrained

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "systems.md"
DEFAULT_READINGS = ("none", "transcript", "mount", "unshifted", "rerotate", "reencode")
TELL_EVERY = 10  # probes


def main() -> None:
    asked = arguments()
    hush_libraries()
    if asked.what == "table":
        text = page(load_lines(asked.records))
        if asked.write:
            DOCUMENT.write_text(text, encoding="utf-8")
        else:
            print(text, end="")
        return
    if asked.out is not None and asked.out.is_dir():
        raise ConfigError(f"--out {asked.out}: is a folder; name a file")
    check_readings(asked.readings)
    found = measure_probes(asked) if asked.what == "probes" else measure_traces(asked)
    stamp = circumstances(sys.argv)
    lines = []
    for line in found:  # each is kept at once: a file that fails costs none before it
        lines.append({**line, **stamp})
        print(json.dumps(lines[-1]), flush=True)
        if asked.out is not None:
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            with asked.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(lines[-1]) + "\n")
    Console(stderr=True, highlight=False).print(table_of(lines))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(dest="what", required=True)
    probes = parts.add_parser("probes", help="score passages that only a sibling holds")
    traces = parts.add_parser("traces", help="measure recorded episodes")
    table = parts.add_parser("table", help="lay out what data/records holds")
    for part in (probes, traces):
        part.add_argument(
            "--model", required=part is probes, help="folder, hub name, .gguf, smollm2"
        )
        part.add_argument("--mount-layers", default="attention", help="attention, all or 3,5-9")
        part.add_argument("--readings", nargs="+", default=list(DEFAULT_READINGS))
        part.add_argument("--seed", type=int, default=0)
        part.add_argument("--page-size", type=int, default=16)
        part.add_argument("--out", type=Path, help="file that the JSON lines are added to")
    probes.add_argument(
        "--probes", default="station", help="station, errand, seal or a .jsonl file"
    )
    probes.add_argument("--data", default="data/seal_join", help="world of the seal probes")
    probes.add_argument("-n", type=int, default=100, help="probes, half with the sibling ahead")
    traces.add_argument("traces", type=Path, nargs="+", help="traces.jsonl, or folders with one")
    traces.add_argument("--limit", type=int, help="the first N episodes of each by question id")
    traces.add_argument("--kl", action="store_true", help="score live and dropped mounts")
    traces.add_argument("--crossings", action="store_true", help="score what their turns would be")
    traces.add_argument("--judge-url", help="OpenAI-compatible server that judges hijacking too")
    traces.add_argument("--judge-model", help="name of its model")
    table.add_argument("--records", type=Path, default=ROOT / "data" / "records")
    table.add_argument("--write", action="store_true", help="write docs/systems.md")
    return parser.parse_args()


def measure_probes(asked: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Score probes under every reading; a line a reading."""
    model, tokenizer = load_measured(asked.model, asked.mount_layers)
    probes = draw_probes(asked, tokenizer)
    scored = score(model, probes, asked.readings)
    common = {
        "kind": "probes",
        "model": asked.model,
        "mount_layers": list(spec_of(model).mount_layers),
        "probes": Path(asked.probes).stem,
        "seed": asked.seed,
        "n": len(probes),
    }
    size = kv_size(model, asked.page_size)
    return [
        {
            **common,
            "reading": name,
            "figures": as_json(figures_of(scored, name)) | held_twice(probes, name, size),
        }
        for name in asked.readings
    ]


def draw_probes(asked: argparse.Namespace, tokenizer: Any) -> list[Probe]:
    """Give the probes asked for: half with the sibling ahead of the reader, half behind it."""
    if asked.n < 2:
        raise ConfigError(f"-n {asked.n}: must be at least 2, half of them have the sibling ahead")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    begin = tuple(tokenizer("").input_ids)
    halves = (asked.n - asked.n // 2, asked.n // 2)
    drawn: list[Probe] = []
    if asked.probes == "seal":
        world = load_world(asked.data, snippet_tokens=0).world
        for part, (num, pages) in enumerate(zip(halves, (1, 3), strict=True)):
            seed = 2 * asked.seed + part
            drawn += seal_probes(world, tokenizer, num, seed=seed, sibling_pages=2, own_pages=pages)
    elif asked.probes in ("station", "errand"):
        for part, (num, own) in enumerate(zip(halves, (2, 8), strict=True)):
            seed = 2 * asked.seed + part
            if asked.probes == "station":
                drawn += station_probes(
                    encode, num, seed=seed, sibling_facts=4, own_facts=own, begin=begin
                )
            else:
                drawn += errand_probes(
                    encode, num, seed=seed, sibling_searches=4, own_searches=own, begin=begin
                )
    else:
        drawn = list(read_probes(Path(asked.probes), encode, begin=begin))[: asked.n]
    return drawn


def score(model: Any, probes: Sequence[Probe], readings: Sequence[str]) -> Scored:
    """Score probes, saying now and then how far it is."""
    scored = Scored()
    for lo in range(0, len(probes), TELL_EVERY):
        part = probes[lo : lo + TELL_EVERY]
        score_probes(part, readings, lambda traces: score_last(model, traces), into=scored)
        print(f"{lo + len(part)}/{len(probes)} probes", file=sys.stderr, flush=True)
    return scored


def kv_size(model: Any, page_size: int) -> KvSize:
    """Give what KV entries of a prepared model weigh, as its weights are held."""
    spec = spec_of(model)
    layer = 2 * spec.num_kv_heads * spec.head_dim * next(model.parameters()).element_size()
    return KvSize(page_size, layer * len(spec.attention_layers), layer * len(spec.mount_layers))


def held_twice(probes: Sequence[Probe], name: str, size: KvSize) -> dict[str, Any]:
    """Give the share of the siblings' KV entries that a reading holds a second time."""
    how = READINGS[name]
    spans = [len(probe.sibling) for probe in probes]
    part = size.part(how.position)
    held = [part * extra_tokens(how.exchange, how.position, span, span) for span in spans]
    return as_json({"extra_kv_share": ratio(held, spans)})


def measure_traces(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure files of episodes; a line a file, and one a reading of their crossings."""
    if (asked.kl or asked.crossings) and asked.model is None:
        raise ConfigError("--kl and --crossings score episodes: name a --model")
    model, tokenizer = None, None
    if asked.kl or asked.crossings:
        model, tokenizer = load_measured(asked.model, asked.mount_layers)
    elif asked.model is not None:
        tokenizer = load_pretrained(AutoTokenizer.from_pretrained, "--model", asked.model)
    for path in asked.traces:
        traces, setting = episodes_in(path, asked.limit)
        name = path.name if path.is_dir() else path.parent.name
        common = {"model": asked.model, "name": name, "setting": setting, "n": len(traces)}
        heat = float(setting.get("temperature", 1.0))
        figures = figures_of_episodes(traces, asked, tokenizer, model, heat)
        yield {"kind": "episodes", **common, "figures": figures}
        if asked.crossings:
            assert model is not None, "loaded above"
            crossings = crossings_of(traces, seed=asked.seed)
            scored = score(model, crossings, asked.readings)
            for reading in asked.readings if crossings else ():
                yield {
                    "kind": "crossings",
                    **common,
                    "n": len(crossings),
                    "seed": asked.seed,
                    "reading": reading,
                    "figures": as_json(figures_of(scored, reading)),
                }


def episodes_in(path: Path, limit: int | None) -> tuple[list[Trace], dict[str, Any]]:
    """Read episodes, in the order of their questions, and the setting beside them.

    Raises:
        ConfigError: there are none.
    """
    file = path / "traces.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{file}: no traces there; give an output of scripts/evaluate.py")
    traces = sorted(read_traces(file), key=lambda trace: trace.prompt_id)[:limit]
    if not traces:
        raise ConfigError(f"{file}: holds no episode")
    beside = file.with_name("setting.json")
    setting = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    return traces, {key: value for key, value in setting.items() if value not in (None, [])}


def figures_of_episodes(
    traces: Sequence[Trace], asked: argparse.Namespace, tokenizer: Any, model: Any, heat: float
) -> dict[str, Any]:
    """Give what drawn episodes tell: answers, hijacking, sides, storage, KL at `heat`."""
    figures: dict[str, Any] = {}
    graded = [trace.reward == 1.0 for trace in traces if trace.reward is not None]
    figures |= as_json({"accuracy": share(graded)})
    if tokenizer is not None:
        chat = Chat(tokenizer, offered(primitives=True, corpus=True), compact=True)

        def read_calls(tokens: Sequence[int]) -> Any:
            return chat.read_turn(tokens).calls

        figures |= as_json({"hijack": hijack_share(traces, read_calls)})
        if asked.judge_url is not None:
            if asked.judge_model is None:
                raise ConfigError("--judge-url without --judge-model: name the model it runs")
            judge = judge_with(ServerModel(asked.judge_url, asked.judge_model), chat.words)
            figures |= as_json({"hijack_judged": hijack_share(traces, read_calls, judge=judge)})
    counts = [count_mounts(trace) for trace in traces]
    ahead = share_by_example([late for _, late in counts], [num for num, _ in counts])
    figures |= as_json({"mounts": mean([num for num, _ in counts]), "mounts_ahead": ahead})
    size = KvSize(asked.page_size) if model is None else kv_size(model, asked.page_size)
    figures |= extra_kv(traces, size)
    if asked.kl:
        modes: tuple[MountMode, ...] = ("live", "dropped")
        for mounts in modes:
            found = mount_kl(traces, partial(scores_of, model, mounts, heat))
            figures |= as_json({f"{name}_{mounts}": one for name, one in found.items()})
    return figures


@torch.no_grad()
def scores_of(
    model: Any, mounts: MountMode, temperature: float, traces: Sequence[Trace]
) -> list[list[list[float]]]:
    """Score every segment of episodes, a few episodes a pass."""
    scores: list[list[list[float]]] = []
    for lo in range(0, len(traces), TELL_EVERY):
        part = traces[lo : lo + TELL_EVERY]
        found = score_traces(model, part, mounts=mounts, temperature=temperature)
        scores += [[segment.tolist() for segment in trace] for trace in found]
        print(f"{lo + len(part)}/{len(traces)} episodes, {mounts}", file=sys.stderr, flush=True)
    return scores


def table_of(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Lay figures out, a row each: figure by figure, so that readings stand below each other."""
    table = Table(title="mechanism")
    for name in ("figure", "of"):
        table.add_column(name)
    for name in ("value", "95 %", "n"):
        table.add_column(name, justify="right")
    for key in dict.fromkeys(name for line in lines for name in line["figures"]):
        for line in lines:
            if (figure := line["figures"].get(key)) is not None and figure["value"] is not None:
                bounds = figure["interval_95"]
                interval = "–" if bounds is None else f"{bounds[0]:.3g} to {bounds[1]:.3g}"
                of = str(line.get("reading", line.get("name")))
                table.add_row(key, of, f"{figure['value']:.3g}", interval, str(figure["n"]))
    return table


if __name__ == "__main__":
    with ending(disk="the lines before it are kept"):
        main()
