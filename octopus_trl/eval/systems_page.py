"""`docs/systems.md`: what the mechanism's metrics gave here, beside the paper's figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octopus_trl.errors import ConfigError
from octopus_trl.eval.extra_kv import PASTES

Line = Mapping[str, Any]
KINDS = ("episodes", "crossings", "probes")
FILE = "mechanism.jsonl"


@dataclass(frozen=True, slots=True)
class Row:
    """A figure's row: what it is called, how it is shown, and what the paper says of it."""

    name: str
    form: str
    paper: str = "–"


HEAD = """\
# Systems and the mechanism, measured here

Written by `python scripts/mechanism.py table --write` from the `mechanism.jsonl` files of
`data/records`; edit those by running the commands again. Each figure has its 95 % interval and n;
`octopus_trl/eval/metrics.py` leads to each definition. Everything is at **small** scale: a policy
of 9M parameters in a made-up world, or a pretrained model of 135M parameters on made-up passages,
on CPU cores. Paper figures are the Octopus report's own, of Qwen3.5-4B on web search."""

SWAPPED = """\
The shipped policy (`data/policy/tiny-hybrid`) was warm-started under a mount with a jump and under
nothing else. The other rows swap the setting at test time on the same weights, questions and seeds
(`python scripts/evaluate.py --episodes 150 FLAGS --output runs/systems/NAME`); the paper's systems
were trained as they run, so that its figures and these answer different questions."""
# Settings of `scripts/evaluate.py` on one set of weights, in the order of the page.
SETTINGS: dict[str, tuple[str, str]] = {
    "mount-jump": ("none: `exchange: mount`, `position: jump`", "49.6 % (bcp-octopus)"),
    "mount-unshifted": ("`--position unshifted`", "–"),
    "mount-rerotate": ("`--position rerotate`", "–"),
    "mount-reencode": ("`--position reencode`", "–"),
    "splice": ("`--exchange splice`", "–"),
    "transcript": ("`--exchange transcript`", "–"),
    "summary": ("`--exchange summary`", "37.1 % (bcp-summary)"),
    "flat": ("`--agent flat`", "26.0 % (bcp-flat-32k)"),
    "compact": ("`--recipe recipes/tiny-hybrid/grpo/config_compact.yaml`", "–"),
    "hidden": ("`--tools-exposed false`", "–"),
    "no-fork": ("`--disable fork`", "50.8 → 29.1 % (fork-disabled)"),
}
EPISODES = {
    "hijack": Row(
        "next turns that pursue the sibling's task",
        "{:.1%}",
        "57.9 % transcript; 55.2 % splice; 2.7 % mount",
    ),
    "mounts": Row("mounts an episode", "{:.2f}", "23.9"),
    "mounts_ahead": Row("mounts with the sibling ahead", "{:.1%}", "52 %"),
    "extra_kv_share": Row(
        "extra KV, share of what was read", "{:.0%}", "+100 % transcript, splice; 0 mount"
    ),
    "extra_kv_tokens": Row("extra KV, tokens an episode", "{:.0f}"),
    "extra_kv_pages": Row("extra KV, pages of 16 an episode", "{:.1f}"),
    "kl_live": Row("rollout-training KL, live mounts", "{:.2g}", "4.45e-4"),
    "kl_dropped": Row("the same, mounts dropped", "{:.2g}", "0.0142"),
}
READING_ROWS = {
    "answer_nll": Row("answer, nats", "{:.2f}"),
    "retained_information": Row("retained information", "{:.1%}"),
    "recall": Row("exact-identifier recall", "{:.3f}"),
    "recall_ahead": Row("recall, sibling ahead", "{:.3f}"),
    "recall_behind": Row("recall, sibling behind", "{:.3f}"),
    "argmax_agreement": Row("argmax agreement with full text", "{:.1%}"),
    "drift": Row("drift, nats a token", "{:+.3f}"),
    "hijack_choice": Row("sibling's words likelier than own", "{:.1%}"),
    "extra_kv_share": Row("extra KV", "{:.0%}"),
}
# (figure, reading) -> paper
PAPER: dict[tuple[str, str], str] = {
    ("retained_information", "mount"): "92.2 %",
    ("recall", "transcript"): "0.760",
    ("recall_ahead", "mount"): "0.613",
    ("recall_behind", "mount"): "0.612",
    ("recall_ahead", "unshifted"): "0.449",
    ("recall_behind", "unshifted"): "0.521",
    ("argmax_agreement", "mount"): "96.9 % (dense), 98.5 % (Mamba-2)",
    ("drift", "transcript"): "+0.196",
    ("drift", "mount"): "+0.007",
    ("hijack_choice", "transcript"): "57.9 % (drawn turns)",
    ("hijack_choice", "splice"): "55.2 % (drawn turns)",
    ("hijack_choice", "mount"): "2.7 % (drawn turns)",
    ("extra_kv_share", "transcript"): "+100 %",
    ("extra_kv_share", "splice"): "+100 %",
    ("extra_kv_share", "mount"): "0 pages",
}
# What the paper says one reading does against another: figure, the smaller, the larger, in words.
ORDERS = (
    ("hijack_choice", "mount", "transcript", "a mount hijacks less than a transcript"),
    ("hijack_choice", "mount", "splice", "a mount hijacks less than a splice"),
    ("drift", "mount", "transcript", "a mount moves the reader less than a transcript"),
    ("retained_information", "unshifted", "mount", "jumping past the span tells more than staying"),
    ("recall", "unshifted", "mount", "jumping past the span recalls more than staying"),
    ("recall_ahead", "unshifted", "mount", "the same where the sibling is ahead"),
    ("recall", "mount", "transcript", "the full text recalls more than a mount"),
)


def load_lines(records: Path) -> list[Line]:
    """Read every `mechanism.jsonl` below a folder; of equal measurements the last line counts.

    Raises:
        ConfigError: a line is none of `scripts/mechanism.py`, or there is none at all.
    """
    found: dict[tuple[Any, ...], Line] = {}
    for path in sorted(records.rglob(FILE)):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                line = json.loads(text)
                key = _key(line)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{path}:{number}: is no line of scripts/mechanism.py ({error}); remove it"
                ) from error
            found.pop(key, None)
            found[key] = line
    if not found:
        raise ConfigError(f"{records}: no {FILE} below it; run scripts/mechanism.py with --out")
    return list(found.values())


def page(lines: Sequence[Line]) -> str:
    """Lay the lines out in Markdown: systems, drawn episodes, then each set of probes."""
    parts = [HEAD]
    episodes = {line["name"]: line for line in lines if line["kind"] == "episodes"}
    if episodes:
        parts += [
            "## One policy under every setting",
            SWAPPED,
            _systems(episodes),
            _drawn(episodes),
        ]
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        if line["kind"] != "episodes":
            groups.setdefault(_key(line)[:-1], []).append(line)
    orders: list[str] = []
    for group in groups.values():
        title = _title(group[0])
        parts += [f"## {title}", _readings(group), _how(group)]
        orders += _orders(group, title)
    if orders:
        parts += ["## What the paper's orders come to here", "\n".join([*_ORDER_HEAD, *orders])]
    return "\n\n".join(parts) + "\n"


_ORDER_HEAD = (
    "*Holds* and *reversed* where the two intervals are disjoint, *open* where they overlap.\n",
    "| the paper's order | where | smaller, by the paper | larger | here |",
    "|---|---|---|---|---|",
)


def _key(line: Line) -> tuple[Any, ...]:
    """Give what tells a measurement from another; the reading comes last."""
    kind = line["kind"]
    if kind not in KINDS:
        raise KeyError(f"kind {kind!r}")
    for name in ("figures", "n", "command", "date", "commit", "hardware"):
        line[name]
    if kind == "probes":
        layers = tuple(line["mount_layers"])
        return kind, line["model"], layers, line["probes"], line["seed"], line["reading"]
    return kind, line["model"], line["name"], line.get("reading")


def _systems(episodes: Mapping[str, Line]) -> str:
    rows = [
        "| flags | name | right, held-out questions | n | paper, BrowseComp-Plus |",
        "|---|---|---|---|---|",
    ]
    for name, (text, paper) in SETTINGS.items():
        if name in episodes:
            line = episodes[name]
            shown = _show(line, "accuracy", "{:.1%}")
            rows.append(f"| {text} | `{name}` | {shown} | {line['n']} | {paper} |")
    return "\n".join(rows)


def _drawn(episodes: Mapping[str, Line]) -> str:
    reads = {name for name, line in episodes.items() if line["figures"]["mounts"]["value"]}
    names = [name for name in SETTINGS if name in episodes and name in {*reads, *PASTES}]
    rows = ["| figure | paper | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for key, row in EPISODES.items():
        cells = [_show(episodes[name], key, row.form) for name in names]
        rows.append(f"| {row.name} | {row.paper} | " + " | ".join(cells) + " |")
    lines = [episodes[name] for name in names]
    return "\n".join(rows) + "\n\n" + _how(lines)


def _readings(group: Sequence[Line]) -> str:
    names = [line["reading"] for line in group]
    rows = ["| figure | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for key, row in READING_ROWS.items():
        if not any(key in line["figures"] for line in group):
            continue
        cells = []
        for line in group:
            cell = _show(line, key, row.form)
            if paper := PAPER.get((key, line["reading"])):
                cell += f"; paper {paper}"
            cells.append(cell)
        rows.append(f"| {row.name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _title(line: Line) -> str:
    if line["kind"] == "crossings":
        return f"Crossings of `{line['name']}`: a sibling's text put in where none was read"
    layers = line["mount_layers"]
    mounted = f"layers {_ranges(layers)} mount"
    return f"`{line['model']}`, {line['probes']} probes, {mounted}"


def _how(lines: Sequence[Line]) -> str:
    commands = dict.fromkeys(
        f"n = {line['n']}: `{line['command']}` ({line['hardware']}, {line['date']}, "
        f"{line['commit']})"
        for line in lines
    )
    return "\n".join(f"- {text}" for text in commands)


def _orders(group: Sequence[Line], title: str) -> Iterator[str]:
    by_reading = {line["reading"]: line for line in group}
    for figure, small, large, words in ORDERS:
        pair = [by_reading.get(name, {}).get("figures", {}).get(figure) for name in (small, large)]
        if any(one is None or one["interval_95"] is None for one in pair):
            continue
        less, more = pair
        verdict = "open"
        if less["interval_95"][1] < more["interval_95"][0]:
            verdict = "**holds**"
        elif more["interval_95"][1] < less["interval_95"][0]:
            verdict = "**reversed**"
        form = READING_ROWS[figure].form
        cells = [_show(by_reading[name], figure, form) for name in (small, large)]
        yield f"| {words} | {title} | {cells[0]} | {cells[1]} | {verdict} |"


def _show(line: Line, key: str, form: str) -> str:
    figure = line["figures"].get(key)
    if figure is None or figure["value"] is None:
        return "–"
    text = form.format(figure["value"])
    if figure["interval_95"] is not None and figure["interval_95"][0] != figure["interval_95"][1]:
        low, high = (form.format(bound) for bound in figure["interval_95"])
        text += f" ({low} to {high})"
    return text


def _ranges(layers: Sequence[int]) -> str:
    """Write layers as ranges.

    >>> _ranges([0, 1, 2, 5])
    '0–2, 5'
    """
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][1] == layer - 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(str(lo) if lo == hi else f"{lo}–{hi}" for lo, hi in parts)
