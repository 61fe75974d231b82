"""The charts of the page as PNG files, for slides and tickets. Needs matplotlib (the extra `report`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ds_byzantine.report.charts import LEVELS, Chart, HeatMap, Mark, charts, heat_map
from ds_byzantine.report.model import Summary
from ds_byzantine.report.records import ReportError

COLOURS = {1: "#c42b25", 2: "#a65b00", 3: "#7338b0"}
CALM, OTHER, LOST, INK = "#2260a5", "#a3adba", "#7338b0", "#1a232e"
STYLES = {"since": ":", "decided": "-", "resumed": "--"}
WORDS = {"since": "trouble begins", "decided": "named", "resumed": "resumed"}
SHADES = (0.05, 0.14, 0.27, 0.44, 0.66, 1.0)


def write(summary: Summary, folder: str | os.PathLike[str]) -> list[Path]:
    """One file for each chart for which there are data.

    Args:
        folder: created if missing.

    Returns:
        The files.

    Raises:
        ReportError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReportError(
            f"PNG files need matplotlib, which cannot be imported here ({words_of(error)}). Install it with: "
            'pip install "ds_byzantine[report]". --html needs nothing more.'
        ) from None
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    style: Any = {"text.parse_math": False, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    with rc_context(style):
        for name, chart in charts(summary).items():
            figure = Figure(figsize=(8, 4 if name == "evidence" else 3.2), dpi=150, layout="constrained")
            _draw(figure.add_subplot(), chart, calm=not summary.cases)
            figure.savefig(out / f"{name}.png")
            written.append(out / f"{name}.png")
        heat = heat_map(summary)
        if heat is not None:
            figure = Figure(figsize=(8, 1.6 + min(0.25 * len(heat.rows), 6)), dpi=150, layout="constrained")
            _draw_heat(figure.add_subplot(), heat, calm=not summary.cases)
            figure.savefig(out / "farthest.png")
            written.append(out / "farthest.png")
    return written


def words_of(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _draw(axes: Any, chart: Chart, *, calm: bool) -> None:
    several = len(chart.lines) > 1
    if chart.y.log:
        axes.set_yscale("log")
    for line in chart.lines:
        colour = _colour(line.focus, calm) if line.focus else OTHER if several else CALM
        width = 2.0 if line.focus or not several else 0.9
        for piece in line.pieces:
            x = [p[0] for p in piece]
            y = [min(max(p[1], chart.y.low), chart.y.high) for p in piece]
            axes.plot(x, y, color=colour, linewidth=width, marker="." if len(piece) == 1 else "")
        if line.focus:
            axes.annotate(
                line.name, (x[-1], y[-1]), xytext=(6, 0), textcoords="offset points", color=colour, va="center"
            )
    if chart.bound:
        axes.axhline(chart.bound[0], color=INK, linestyle="--", linewidth=1.2)
        axes.annotate(
            chart.bound[1], (0.01, chart.bound[0]), xycoords=("axes fraction", "data"), va="bottom", fontsize=9
        )
    ticks = chart.y.ticks()
    axes.set_yticks(ticks, [chart.tick_text(v) for v in ticks], minor=False)
    axes.minorticks_off()
    axes.set_ylim(chart.y.low, chart.y.high)
    axes.set_xlim(chart.x.low, chart.x.high)
    axes.grid(axis="y", color="#e9edf2")
    axes.set_xlabel("optimizer step")
    axes.set_title(chart.title, loc="left", fontweight="bold")
    _draw_marks(axes, chart.marks)


def _draw_heat(axes: Any, heat: HeatMap, *, calm: bool) -> None:
    colour = _colour(1, calm)
    for level in range(LEVELS):
        for row, start, end, found in heat.cells:
            if found == level:
                axes.broken_barh(
                    [(start, end - start)], (row - 0.45, 0.9), color=colour, alpha=SHADES[level], linewidth=0
                )
    for row, start, end in heat.quarantined:
        axes.broken_barh([(start, end - start)], (row - 0.45, 0.9), color=OTHER, alpha=0.55, linewidth=0)
    for row, start, end in heat.dropped:
        axes.broken_barh([(start, end - start)], (row - 0.45, 0.9), color=LOST, linewidth=0)
    every = max(1, len(heat.rows) // 16)
    shown = [i for i, (_, focus) in enumerate(heat.rows) if focus or i % every == 0]
    axes.set_yticks(shown, [str(heat.rows[i][0]) for i in shown])
    axes.set_ylim(len(heat.rows) - 0.5, -0.5)
    axes.set_xlim(heat.x.low, heat.x.high)
    axes.set(xlabel="optimizer step", ylabel="replica")
    axes.set_title("Who was farthest (the darker, the farther)", loc="left", fontweight="bold")
    _draw_marks(axes, heat.marks)


def _draw_marks(axes: Any, marks: tuple[Mark, ...]) -> None:
    for mark in marks:
        axes.axvline(mark.step, color=INK, linestyle=STYLES[mark.kind], linewidth=1.2)
        place = {"xycoords": ("data", "axes fraction"), "xytext": (2, 0), "textcoords": "offset points"}
        look = {"va": "bottom", "fontsize": 8, "color": INK, "bbox": {"fc": "#ffffffb0", "lw": 0, "pad": 0.6}}
        axes.annotate(WORDS[mark.kind], (mark.step, 0.02), rotation=90, **look, **place)


def _colour(focus: int, calm: bool) -> str:
    return CALM if calm else COLOURS[focus]
