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
    ("tokens an episode", (("episode/tokens", "all"), ("episode/owned_tokens", "owned"))),
    ("dedup ratio", (("packing/dedup_ratio", "dedup ratio"),)),
    ("rollout-training KL", (("rollout_kl/mean", "KL"),)),
    ("gradient norm", (("grad_norm", "gradient norm"),)),
)
LOGARITHMIC = "rollout-training KL"
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
        ConfigError: matplotlib is missing, no run is given or the window is below 1.
    """
    if not runs or window < 1:
        raise ConfigError(f"{len(runs)} runs, window={window}: give at least one run and step")
    picture = _draw(runs, window)
    output.mkdir(parents=True, exist_ok=True)
    files = [output / "curves.png", output / "report.html"]
    files[0].write_bytes(picture)
    files[1].write_text(_page(runs, picture, window), encoding="utf-8")
    return files


def _draw(runs: Sequence[Run], window: int) -> bytes:
    if util.find_spec("matplotlib") is None:
        raise ConfigError('curves need matplotlib: pip install "octopus_trl[eval]"')
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(2, 3)
    for axis, (title, lines) in zip(axes.flat, PANELS, strict=True):
        for number, run in enumerate(runs):
            for shade, (key, label) in enumerate(lines):
                steps, values = run.series(key)
                if title == LOGARITHMIC:
                    # A step without a difference has no place on a logarithmic axis.
                    kept = [(s, v) for s, v in zip(steps, values) if v > 0]
                    steps, values = [s for s, _ in kept], [v for _, v in kept]
                color = f"C{(number * len(lines) + shade) % 10}"
                name = f"{run.name}: {label}" if len(runs) > 1 else label
                axis.plot(steps, values, ".", color=color, alpha=0.3, markersize=4)
                axis.plot(steps, smooth(values, window), color=color, label=name)
        axis.set_title(title)
        axis.set_xlabel("optimizer step")
        axis.grid(visible=True, alpha=0.3)
        if title == LOGARITHMIC:
            axis.set_yscale("log")
        if len(runs) * len(lines) > 1:
            axis.legend(fontsize="small")
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=110)
    return target.getvalue()


def _page(runs: Sequence[Run], picture: bytes, window: int) -> str:
    rows = []
    for run in runs:
        for key in TABLE:
            _, values = run.series(key)
            if values:
                head, tail = values[:window], values[-window:]
                cells = (
                    html.escape(run.name),
                    html.escape(key),
                    str(len(values)),
                    f"{sum(head) / len(head):.4g}",
                    f"{sum(tail) / len(tail):.4g}",
                )
                rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    names = html.escape(", ".join(run.name for run in runs))
    encoded = base64.b64encode(picture).decode("ascii")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{names}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; }}
img {{ max-width: 100%; }}
td, th {{ padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #ddd; }}
td:nth-child(-n+2), th:nth-child(-n+2) {{ text-align: left; }}
</style></head><body>
<h1>{names}</h1>
<img alt="curves over optimizer steps" src="data:image/png;base64,{encoded}">
<table>
<tr><th>run</th><th>figure</th><th>steps</th>
<th>first {window}</th><th>last {window}</th></tr>
{"".join(rows)}
</table></body></html>
"""
