"""The drawing of an episode: names of threads beside an SVG of lanes, bars, forks and mounts.

Everything stands at its place without a script; the page's script only moves it sideways, along
the other axis or when somebody zooms.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

from octopus_trl.report.lanes import Lanes
from octopus_trl.trace import Trace

WIDTH = 1200.0  # px of the drawing before anyone zooms
ROW, BAR = 30.0, 18.0  # px from row to row, and of a bar
TOP = 8.0
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_HATCH = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6"/><path d="M0 0V6"/></pattern></defs>'
)
_GOLDEN_ANGLE = 137.508  # neighbours on a colour wheel that is cut by it never look alike


@dataclass(frozen=True, slots=True)
class Read:
    """What one thread mounted of another before one segment.

    Attributes:
        reader: that segment.
        source: thread that was read.
        segments: what became readable of it, ascending.
        last: the one that ends highest.
    """

    reader: int
    source: int
    segments: list[int]
    last: int


def reads_of(trace: Trace) -> list[Read]:
    """Give the reads of an episode: one for each segment and thread whose segments it mounts."""
    reads = []
    for segment in trace.segments:
        by_thread: dict[int, list[int]] = {}
        for mount in segment.mounts:
            by_thread.setdefault(trace.segments[mount].thread, []).append(mount)
        for source, mounted in sorted(by_thread.items()):
            last = max(mounted, key=lambda at: trace.segments[at].end)
            reads.append(Read(segment.id, source, sorted(mounted), last))
    return reads


def hue(thread: int) -> int:
    """Give the colour of a thread, in degrees."""
    return round(thread * _GOLDEN_ANGLE + 210) % 360


def text(value: object) -> str:
    """Escape a value for markup; characters that no document may hold are replaced."""
    return html.escape(_CONTROL.sub("\ufffd", str(value)))


def names(trace: Trace, lanes: Lanes) -> str:
    """Give the column of threads: number, task, status, indented by depth."""
    depth: dict[int, int] = {}
    out = [f'<ol id="names" style="height:{height(lanes):.0f}px">']
    for thread in trace.threads:  # a parent comes before its children
        depth[thread.id] = 0 if thread.parent is None else depth[thread.parent] + 1
        row = lanes.first_row.get(thread.id)
        if row is None:
            continue
        task = thread.task or ("root" if thread.parent is None else "")
        out.append(
            f'<li data-thread="{thread.id}" class="{text(thread.status)}" '
            f'style="top:{TOP + row * ROW:.0f}px;--hue:{hue(thread.id)};--depth:{depth[thread.id]}"'
            f' title="{text(f"thread {thread.id}, {thread.status}: {task}")}"><i></i>'
            f"<b>{thread.id}</b> <span>{text(task)}</span></li>"
        )
    out.append("</ol>")
    return "\n".join(out)


def height(lanes: Lanes) -> float:
    """Give the height of the drawing in px."""
    return TOP + lanes.num_rows * ROW + 4


def drawing(trace: Trace, lanes: Lanes) -> str:
    """Give the SVG."""
    longest = max(segment.end for segment in trace.segments)
    scale = WIDTH / longest
    across = [round(segment.start * scale, 2) for segment in trace.segments]
    ends = [round(segment.end * scale, 2) for segment in trace.segments]
    tops = [TOP + row * ROW for row in lanes.rows]
    size = f'width="{WIDTH + 24:.0f}" height="{height(lanes):.0f}"'
    out = [
        f'<svg id="drawing" {size} role="group" aria-label="threads over tokens">',
        _HATCH,
        *_stripes(trace, lanes),
        '<g id="grid"></g>',
    ]
    for segment in trace.segments:
        if segment.parent is None:
            continue
        parent = trace.segments[segment.parent]
        if lanes.rows[parent.id] == lanes.rows[segment.id]:
            y = tops[segment.id] + BAR / 2
            out.append(  # a jump past what was mounted; over time, a wait
                f'<line class="gap" data-gap="{segment.id}" data-from="{parent.id}" y1="{y:g}" '
                f'y2="{y:g}" x1="{ends[parent.id]}" x2="{across[segment.id]}"/>'
            )
            continue
        kind = "fork" if parent.thread != segment.thread else "back"
        y1, y2 = tops[parent.id] + BAR / 2, tops[segment.id] + BAR / 2
        out.append(
            f'<path class="{kind}" style="--hue:{hue(segment.thread)}" data-edge="{segment.id}" '
            f'data-from="{parent.id}" data-y1="{y1:g}" data-y2="{y2:g}" '
            f'd="M{ends[parent.id]} {y1:g} V{y2:g} H{across[segment.id]}"/>'
        )
    for segment in trace.segments:
        at = segment.id
        left = " rewound" if at in lanes.rewound else ""
        out.append(
            f'<rect class="bar {segment.kind}{left}" tabindex="-1" data-segment="{at}" '
            f'x="{across[at]}" y="{tops[at]:g}" width="{max(ends[at] - across[at], 0.5):.2f}" '
            f'height="{BAR:g}" rx="1.5"><title>segment {at}, thread {segment.thread}, '
            f"{segment.kind}, {len(segment.tokens):,} tokens at {segment.start:,}</title></rect>"
        )
    reads = reads_of(trace)
    for lent in sorted({mount for read in reads for mount in read.segments}):
        out.append(
            f'<rect class="lent" style="--hue:{hue(trace.segments[lent].thread)}" '
            f'data-lent="{lent}" x="{across[lent]}" y="{tops[lent] + BAR + 1:g}" '
            f'width="{max(ends[lent] - across[lent], 0.5):.2f}" height="3"/>'
        )
    for read in reads:
        y1, y2 = tops[read.last] + BAR / 2, tops[read.reader] + BAR / 2
        x1, x2 = ends[read.last], across[read.reader]
        tokens = sum(len(trace.segments[at].tokens) for at in read.segments)
        reader = trace.segments[read.reader].thread
        bend = 28 + abs(x2 - x1) / 3
        out.append(
            f'<path class="mount" style="--hue:{hue(read.source)}" data-mount="{read.last}" '
            f'data-source="{read.source}" data-reader="{read.reader}" data-y1="{y1:g}" '
            f'data-y2="{y2:g}" d="M{x1} {y1:g} C{x1 + bend:.2f} {y1:g} {x2} {(y1 + y2) / 2:g} '
            f'{x2} {y2:g}"><title>thread {reader} reads {tokens:,} tokens of thread {read.source}'
            "</title></path>"
        )
    out.append("</svg>")
    return "\n".join(out)


def _stripes(trace: Trace, lanes: Lanes) -> list[str]:
    """Draw a band behind the rows of every other thread."""
    begins = sorted(lanes.first_row.values())
    ends = [*begins[1:], lanes.num_rows]
    return [
        f'<rect class="band" x="0" width="100%" y="{TOP + lo * ROW - 6:g}" '
        f'height="{(hi - lo) * ROW:g}"/>'
        for number, (lo, hi) in enumerate(zip(begins, ends, strict=True))
        if number % 2 == 0
    ]
