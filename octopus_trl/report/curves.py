"""Reward, branching, lengths and divergence of runs over their steps: a PNG and an HTML page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

from octopus_trl.errors import ConfigError
from octopus_trl.report.files import write_file
from octopus_trl.report.runs import Run, smooth

PANELS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("reward", (("reward", "reward"),)),
    (
        "an episode",
        (
            ("episode/forks", "forks"),
            ("episode/mounts", "mounts"),
            ("episode/rewinds", "rewinds"),
        ),
    ),
    ("tokens an episode", (("episode/explored_tokens", "all"), ("episode/owned_tokens", "owned"))),
    ("tokens read by mount", (("episode/mounted_tokens", "mounted"),)),
    ("dedup ratio", (("packing/dedup_ratio", "dedup ratio"),)),
    (
        "rollout-training KL",
        (
            ("rollout_kl/mean", "all owned"),
            ("rollout_kl/mounted", "after a mount"),
            ("rollout_kl/rewound", "rewound"),
        ),
    ),
    ("gradient norm", (("grad_norm", "gradient norm"),)),
    ("seconds a step", (("time/generate_s", "generate"), ("time/train_s", "train"))),
)
LOGARITHMIC = "rollout-training KL"
STYLES = ("-", "--", ":")  # a run has a colour, a figure of a panel a stroke
TABLE = (
    "reward",
    "episode/forks",
    "episode/mounts",
    "episode/rewinds",
    "episode/owned_tokens",
    "packing/dedup_ratio",
    "rollout_kl/mean",
    "grad_norm",
)


def write_report(runs: Sequence[Run], output: Path, *, window: int = 10) -> list[Path]:
    """Draw the curves of some runs.

    Args:
        output: folder; gets `curves.png` and `report.html`, which needs no other file.
        window: steps of the moving mean that is drawn over the single steps.

    Returns:
        The files written.

    Raises:
        ConfigError: matplotlib is missing, no run is given, the window is below 1, or the folder
            cannot be written.
    """
    if not runs or window < 1:
        raise ConfigError(f"{len(runs)} runs, window={window}: give at least one run and step")
    picture = _draw(runs, window)
    page = _page(runs, picture, window).encode()
    return [
        write_file(output / "curves.png", picture),
        write_file(output / "report.html", page),
    ]


def _draw(runs: Sequence[Run], window: int) -> bytes:
    if util.find_spec("matplotlib") is None:
        raise ConfigError('curves need matplotlib: pip install "octopus_trl[eval]"')
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(2, 4)
    for axis, (title, lines) in zip(axes.flat, PANELS, strict=True):
        for number, run in enumerate(runs):
            for shade, (key, label) in enumerate(lines):
                steps, values = run.series(key)
                if title == LOGARITHMIC:
                    # A step without a difference has no place on a logarithmic axis.
                    kept = [(s, v) for s, v in zip(steps, values) if v > 0]
                    steps, values = [s for s, _ in kept], [v for _, v in kept]
                if not values:
                    continue
                several = len(lines) > 1
                color = f"C{number % 10}" if len(runs) > 1 else f"C{shade}"
                name = ", ".join([run.name] * (len(runs) > 1) + [label] * several)
                few = len(values) <= window  # the dots are what there is to see
                axis.plot(
                    *(steps, values, "."),
                    color=color,
                    alpha=0.8 if few else 0.25,
                    markersize=8 if few else 4,
                )
                stroke = STYLES[shade % len(STYLES)] if len(runs) > 1 else "-"
                axis.plot(steps, smooth(values, window), stroke, color=color, label=name)
        axis.set_title(title, loc="left", fontsize="medium", fontweight="bold")
        axis.set_xlabel("optimizer step")
        axis.grid(visible=True, alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if title == LOGARITHMIC:
            axis.set_yscale("log")
        if len(runs) * len(lines) > 1 and axis.lines:
            axis.legend(fontsize="small", frameon=False)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=110)
    return target.getvalue()


def _page(runs: Sequence[Run], picture: bytes, window: int) -> str:
    rows = []
    for key in TABLE:
        cells = []
        for run in runs:
            _, values = run.series(key)
            if not values:
                cells += ["–", "–"]
                continue
            most = _end(len(values), window)
            cells += [f"{sum(part) / most:.4g}" for part in (values[:most], values[-most:])]
        numbers = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f"<tr><th>{html.escape(key)}</th>{numbers}</tr>")
    heads = "".join(
        f'<th colspan="2">{html.escape(run.name)}, {len(run.rows)} steps</th>' for run in runs
    )
    ends = "".join(
        f"<th>first {most}</th><th>last {most}</th>"
        for most in (_end(len(run.rows), window) for run in runs)
    )
    names = html.escape(", ".join(run.name for run in runs))
    encoded = base64.b64encode(picture).decode("ascii")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{names}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --soft: #888; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 100rem; }}
body {{ margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.2rem; }} p {{ color: var(--soft); }}
img {{ max-width: 100%; background: #fff; border: 1px solid var(--line); border-radius: 8px; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; margin-top: 1rem; }}
td, th {{ padding: .2rem .9rem; text-align: right; border-bottom: 1px solid var(--line); }}
th {{ font-weight: 600; }} tr > th:first-child {{ text-align: left; font-weight: 400; }}
</style></head><body>
<h1>{names}</h1>
<p>Dots are steps, lines the mean of the last {window} steps.</p>
<img alt="curves over optimizer steps" src="data:image/png;base64,{encoded}">
<table>
<tr><th></th>{heads}</tr>
<tr><th>mean of steps</th>{ends}</tr>
{"".join(rows)}
</table></body></html>
"""


def _end(steps: int, window: int) -> int:
    """Give the steps of either end of a run: as many as the window, and none that is in both."""
    return max(1, min(window, steps // 2))
