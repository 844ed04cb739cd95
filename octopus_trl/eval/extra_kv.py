"""What reading a sibling costs in KV, counted from recorded episodes.

| exchange, position | KV entries that hold the sibling's text a second time |
|---|---|
| `mount`: `jump`, `unshifted`; `splice` | none: its pages are read where they lie |
| `mount`: `rerotate` | its keys and values once more, on the layers that mount |
| `mount`: `reencode` | its text prefilled again behind the reader, on every attention layer |
| `transcript` | the pasted tool text, on every attention layer |
| `summary` | the tool text with the commit lines, on every attention layer |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octopus_trl.eval.intervals import mean, ratio
from octopus_trl.trace import Trace

PASTES = ("transcript", "summary")


@dataclass(frozen=True, slots=True)
class KvSize:
    """What KV entries weigh.

    Attributes:
        page_size: tokens of a page.
        token_bytes: of one token's keys and values on all attention layers.
        mounted_bytes: the same on the layers that mount.
    """

    page_size: int = 16
    token_bytes: int = 0
    mounted_bytes: int = 0

    def part(self, position: str) -> float:
        """Give the part of a token's entries that a second copy of it holds."""
        if position != "rerotate" or not self.token_bytes:
            return 1.0
        return self.mounted_bytes / self.token_bytes


def extra_kv(traces: Sequence[Trace], size: KvSize | None = None) -> dict[str, Any]:
    """Give what reads cost an episode: tokens, pages and bytes, and the share of what was read.

    A read is a turn's set of `read_thread` calls that gave text. Its extra tokens follow the
    module's table; its pages are those tokens over the page size, rounded up. `share` is Σ extra
    entries / Σ entries of the spans that were read, an entry being a token on one attention layer:
    +100 % where all of it is held twice (under `summary` nothing says what the span would have
    been). Bootstrap over episodes. Paper: extra-kv, +100 % for transcript and splice, 0 pages for a
    mount.

    Args:
        size: without it bytes are left out, and every attention layer is taken to mount.
    """
    size = size or KvSize()
    counted = np.asarray([_of(trace, size) for trace in traces], dtype=np.int64).reshape(-1, 4)
    tokens, pages, num_bytes, spans = counted.T.tolist()
    held = [size.part(trace.position) * extra for trace, extra in zip(traces, tokens, strict=True)]
    figures = {
        "extra_kv_tokens": mean(tokens),
        "extra_kv_pages": mean(pages),
        "extra_kv_share": ratio(held, spans),
    }
    if size.token_bytes:
        figures["extra_kv_bytes"] = mean(num_bytes)
    return {name: figure.as_json() for name, figure in figures.items()}


def extra_tokens(exchange: str, position: str, span: int, told: int) -> int:
    """Give the tokens that a read holds a second time.

    Args:
        span: tokens of the sibling's span.
        told: tokens of the tool text that the reader was given.
    """
    if exchange in PASTES:
        return told
    return span if exchange == "mount" and position in ("rerotate", "reencode") else 0


def _of(trace: Trace, size: KvSize) -> tuple[int, int, int, int]:
    """Count one episode: extra tokens, pages and bytes, tokens of the spans read."""
    weight = size.mounted_bytes if trace.position == "rerotate" else size.token_bytes
    tokens = pages = spans = 0
    for span, told in _reads(trace):
        extra = extra_tokens(trace.exchange, trace.position, span, told)
        tokens, spans = tokens + extra, spans + span
        pages += -(-extra // size.page_size)
    return tokens, pages, tokens * weight, spans


def _reads(trace: Trace) -> list[tuple[int, int]]:
    """Give span and tool text of each read, in tokens; a read whose result was never given is none.

    Spans come from the episode's `read` events; `summary` has none, its spans count as 0.
    """
    spans: dict[int, int] = {}  # thread -> tokens that its calls of this turn read
    told_by: dict[int, int] = {}
    for segment in trace.segments:
        if segment.kind == "tool" and segment.parent is not None:
            if trace.segments[segment.parent].thread == segment.thread:
                # A later one is the note of a rewind to this turn.
                told_by.setdefault(segment.parent, len(segment.tokens))
    reads = []
    for event in trace.events:
        thread = event.get("thread")
        if not isinstance(thread, int):
            continue
        if event.get("type") == "read":
            spans[thread] = spans.get(thread, 0) + int(event["tokens"])
        elif event.get("type") == "turn":
            asked = ["read_thread", "ok"] in map(list, event.get("calls", []))
            span, told = spans.pop(thread, 0), told_by.get(event.get("segment", -1), 0)
            if asked and told and (span or trace.exchange == "summary"):
                reads.append((span, told))
    return reads
