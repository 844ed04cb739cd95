"""One episode as a page: a lane a thread, forks, mounts as arcs, left branches greyed.

The page needs no other file and no network. Segments are drawn, never tokens, so that an episode of
hundreds of thousands of tokens stays small; texts lie in one JSON block and are shown on demand.
What a corpus or a model wrote reaches the page as escaped JSON or escaped markup, and the script
puts it into text nodes only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from octopus_trl.errors import ConfigError
from octopus_trl.eval.trace_statistics import count_mounts
from octopus_trl.report.drawing import drawing, names, text
from octopus_trl.report.files import write_file
from octopus_trl.report.lanes import Lanes, lay_out
from octopus_trl.trace import Trace

Decode = Callable[[Sequence[int]], str]


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
    page = episode_page(trace, decode=decode, page_size=page_size)
    write_file(output, page.encode())


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
        "TITLE": text(trace.episode_id),
        "HEAD": _head(trace, lanes, page_size),
        "NAMES": names(trace, lanes),
        "DRAWING": drawing(trace, lanes),
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
    segments: list[dict[str, Any]] = []
    clock: dict[int, float] = {}
    for segment in trace.segments:
        begun = 0.0 if segment.parent is None else times[segment.parent]
        # After a rewind a thread goes on from an earlier segment, at a later time.
        begun = max(begun or 0.0, clock.get(segment.thread, 0.0))
        clock[segment.thread] = max(begun, segment.time_s or 0.0)
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
        f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in facts.items()
    )
    question = text(trace.meta.get("question") or "")
    return f'<p id="question">{question}</p><dl id="facts">{cells}</dl>'


def _json(data: Mapping[str, Any]) -> str:
    """Encode for a script element: no byte of it can end the element or open a comment."""
    encoded = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for char in "<>&":
        encoded = encoded.replace(char, f"\\u{ord(char):04x}")
    return encoded
