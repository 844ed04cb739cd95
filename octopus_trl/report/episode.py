"""One episode as a page: a lane a thread, forks, mounts as arcs, left branches greyed.

The page needs no other file and no network. Segments are drawn, never tokens, so that an episode of
hundreds of thousands of tokens stays small; texts lie in one JSON block and are shown on demand.
What a corpus or a model wrote reaches the page as escaped JSON or escaped markup, and the script
puts it into text nodes only.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from octopus_trl.errors import ConfigError
from octopus_trl.eval.trace_statistics import count_mounts
from octopus_trl.report.lanes import Lanes, lay_out
from octopus_trl.trace import Trace

Decode = Callable[[Sequence[int]], str]

WIDTH = 1400.0  # px of the drawing before anyone zooms
MARGIN = 90.0  # px on the left, for the names of threads
ROW, BAR = 30.0, 18.0  # px from row to row, and of a bar
TOP = 26.0
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")


def write_episode(
    trace: Trace, output: Path, *, decode: Decode | None = None, page_size: int = 16
) -> None:
    """Write the page of one episode, whole or not at all.

    Args:
        decode: text of some token ids; without it ids are shown.
        page_size: tokens of a KV page, to count those that threads share.

    Raises:
        ConfigError: page_size is below 1, or the file cannot be written.
    """
    text = episode_page(trace, decode=decode, page_size=page_size)
    beside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(output)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written ({error}); give another path") from error
    finally:
        if beside.is_file():
            beside.unlink()


def episode_page(trace: Trace, *, decode: Decode | None = None, page_size: int = 16) -> str:
    """Give the page of one episode as text.

    Raises:
        ConfigError: page_size is below 1.
    """
    if page_size < 1:
        raise ConfigError(f"page_size={page_size}: must be at least 1")
    lanes = lay_out(trace)
    data = episode_data(trace, lanes, decode=decode, page_size=page_size)
    parts = resources.files("octopus_trl.report")
    script = parts.joinpath("episode.js").read_text(encoding="utf-8")
    fields = {
        "TITLE": _text(trace.episode_id),
        "HEAD": _head(trace, lanes, page_size),
        "DRAWING": _drawing(trace, lanes),
        "DATA": _json(data),
        # Only this very script may run: markup that slipped through would stay inert.
        "SHA": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii"),
        "SCRIPT": script,
    }
    template = parts.joinpath("episode.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: fields[match[1]], template)


def episode_data(
    trace: Trace, lanes: Lanes, *, decode: Decode | None, page_size: int
) -> dict[str, Any]:
    """Give what the page's script shows of each segment: place, text, log-probs, calls, readers."""
    calls = {
        event["segment"]: [f"{name} ({outcome})" for name, outcome in event.get("calls", [])]
        for event in trace.events
        if event.get("type") == "turn" and isinstance(event.get("segment"), int)
    }
    times = [segment.time_s for segment in trace.segments]
    segments = []
    for segment in trace.segments:
        begun = 0.0 if segment.parent is None else times[segment.parent]
        fed = segment.kind == "tool" and segment.parent is not None
        row: dict[str, Any] = {
            "thread": segment.thread,
            "parent": segment.parent,
            "kind": segment.kind,
            "start": segment.start,
            "length": len(segment.tokens),
            "mounts": segment.mounts,
            "time": [begun, segment.time_s],
            "rewound": segment.id in lanes.rewound,
            "calls": calls.get(segment.parent if fed else segment.id, []),
            "heirs": lanes.heirs[segment.id],
            "readers": lanes.readers[segment.id],
            "pages": math.ceil(len(segment.tokens) / page_size),
            "text": decode(segment.tokens) if decode else None,
        }
        if decode is None or segment.kind == "action":
            row["tokens"] = segment.tokens
        if segment.kind == "action":
            row["pieces"] = [decode([token]) for token in segment.tokens] if decode else None
            row["logps"] = segment.logps and [round(logp, 4) for logp in segment.logps]
        segments.append(row)
    threads = [
        {"id": t.id, "parent": t.parent, "task": t.task, "status": t.status} for t in trace.threads
    ]
    return {
        "episode": trace.episode_id,
        "left": MARGIN,
        "width": WIDTH,
        "threads": threads,
        "segments": segments,
        "timed": all(time is not None for time in times) and any(times),
    }


def _head(trace: Trace, lanes: Lanes, page_size: int) -> str:
    """Give the line of figures and the list of threads."""
    lengths = trace.lengths
    shared = [
        size for size, *by in zip(lengths, lanes.heirs, lanes.readers, strict=True) if any(by)
    ]
    facts = {
        "reward": "none" if trace.reward is None else f"{trace.reward:g}",
        "answer": trace.meta.get("result"),
        "threads": len(trace.threads),
        "tokens": f"{sum(lengths):,}",
        "sampled": f"{trace.num_owned:,}",
        "mounts": count_mounts(trace)[0],
        "rewound tokens": f"{sum(lengths[segment] for segment in lanes.rewound):,}",
        f"KV pages of {page_size} that threads share": f"{sum(shared) // page_size:,}",
        "exchange": f"{trace.exchange}, {trace.position}",
        "policy version": trace.policy_version,
    }
    if trace.truncated:
        facts["truncated"] = "yes"
    cells = "".join(
        f"<span><b>{_text(name)}</b> {_text(value)}</span>" for name, value in facts.items()
    )
    question = _text(trace.meta.get("question") or "")
    return f'<p id="question">{question}</p><p id="facts">{cells}</p>'


def _drawing(trace: Trace, lanes: Lanes) -> str:
    """Draw lanes, bars, tree edges and mounts as SVG; the script only moves them sideways."""
    longest = max(segment.end for segment in trace.segments)
    scale = WIDTH / longest

    def across(place: float) -> float:
        return round(MARGIN + place * scale, 2)

    def down(segment: int) -> float:
        return TOP + lanes.rows[segment] * ROW

    height = TOP + lanes.num_rows * ROW + 8
    size = f'width="{MARGIN + WIDTH + 20:.0f}" height="{height:.0f}"'
    out = [f'<svg id="drawing" {size} role="img" aria-label="threads over tokens">']
    for thread in trace.threads:
        row = lanes.first_row.get(thread.id)
        if row is None:
            continue
        y = TOP + row * ROW
        out.append(
            f'<g class="lane" data-thread="{thread.id}"><line class="rule" x1="0" x2="100%" '
            f'y1="{y - 6:.1f}" y2="{y - 6:.1f}"/><text class="name" x="4" y="{y + 13:.1f}">thread '
            f"{thread.id}<title>{_text(thread.status)}{_text(': ' + thread.task)}</title></text>"
            f'<text class="status" x="4" y="{y + 24:.1f}">{_text(thread.status)}</text></g>'
        )
    for segment in trace.segments:
        if segment.parent is not None and _is_bend(trace, lanes, segment.id):
            x, y = across(segment.start), down(segment.id) + BAR / 2
            parent = trace.segments[segment.parent]
            px, py = across(parent.end), down(parent.id) + BAR / 2
            kind = "fork" if parent.thread != segment.thread else "back"
            out.append(
                f'<path class="{kind}" data-edge="{segment.id}" data-from="{parent.id}" '
                f'd="M{px} {py} V{y} H{x}"/>'
            )
    for segment in trace.segments:
        x, y = across(segment.start), down(segment.id)
        width = max(len(segment.tokens) * scale, 0.5)
        left = " rewound" if segment.id in lanes.rewound else ""
        out.append(
            f'<rect class="{segment.kind}{left}" tabindex="0" data-segment="{segment.id}" '
            f'x="{x}" y="{y:.1f}" width="{width:.2f}" height="{BAR:.0f}">'
            f"<title>segment {segment.id}, thread {segment.thread}, {segment.kind}, "
            f"{len(segment.tokens):,} tokens at {segment.start:,}</title></rect>"
        )
    for segment in trace.segments:
        for mount in segment.mounts:
            source = trace.segments[mount]
            x1, y1 = across((source.start + source.end) / 2), down(mount) + BAR / 2
            x2, y2 = across(segment.start), down(segment.id) + BAR / 2
            bow = min(60.0, 14 + abs(y2 - y1) / 2)
            out.append(
                f'<path class="mount" data-mount="{mount}" data-reader="{segment.id}" '
                f'd="M{x1} {y1} C{x1} {y1 - bow} {x2} {y2 - bow} {x2} {y2}">'
                f"<title>thread {segment.thread} mounts segment {mount} of thread {source.thread}"
                "</title></path>"
            )
    out.append("</svg>")
    return "\n".join(out)


def _is_bend(trace: Trace, lanes: Lanes, segment: int) -> bool:
    """Whether a tree edge leaves its row: a fork, or a branch beside the one that was left."""
    parent = trace.segments[segment].parent
    return parent is not None and lanes.rows[parent] != lanes.rows[segment]


def _json(data: Mapping[str, Any]) -> str:
    """Encode for a script element: no byte of it can end the element or open a comment."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _text(value: object) -> str:
    return html.escape(_CONTROL.sub("\ufffd", str(value)))
