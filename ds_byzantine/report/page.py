"""One static HTML page: no script, nothing loaded from elsewhere, light and dark, wide and narrow.

Text is HTML around drawing areas that stretch (`preserveAspectRatio="none"`), so it has one size at every width. The
template escapes whatever it prints: host names and the like come from a file that others may have written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from ds_byzantine.report import words
from ds_byzantine.report.charts import LEVELS, Axis, Chart, HeatMap, Line, Mark, Tick, charts, heat_map, tick_text
from ds_byzantine.report.model import Summary

if TYPE_CHECKING:
    from jinja2 import Template

SCALE = 1000  # units of a drawing area, in both directions

MARK_WORDS = {"since": "trouble begins", "decided": "named", "resumed": "resumed"}


@dataclass(frozen=True)
class Curve:
    """An SVG path. `kind`: "f1" to "f3" in focus, "other", or "one" for the only line of a chart."""

    path: str
    kind: str
    name: str


@dataclass(frozen=True)
class Label:
    """A line's name beside its end, `at` percent from the top."""

    at: float
    text: str
    kind: str


@dataclass(frozen=True)
class Plot:
    """A line chart as the template needs it. Positions are percent from the left or from the top."""

    name: str
    title: str
    about: str
    curves: tuple[Curve, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[tuple[float, str], ...]
    bound: tuple[float, str] | None
    labels: tuple[Label, ...]


@dataclass(frozen=True)
class Heat:
    """The heat map as the template needs it: a path for each level, one for dropped rows."""

    height: int
    rows: int
    shown: int
    levels: tuple[str, ...]
    dropped: str
    quarantined: str
    labels: tuple[Label, ...]
    x_ticks: tuple[Tick, ...]
    marks: tuple[tuple[float, str], ...]
    left_out: int


def render(summary: Summary, *, refresh: int | None = None) -> str:
    """The page.

    Args:
        summary: what to show.
        refresh: seconds after which a browser loads the page anew, while a run is watched.
    """
    heat = heat_map(summary)
    made = charts(summary)
    return _template().render(
        s=summary,
        refresh=refresh,
        headline=words.headline(summary),
        lead=words.lead(summary),
        tiles=tiles(summary),
        todo=words.what_to_do(summary),
        doubts=words.not_proved(summary),
        facts=words.facts(summary),
        notes=words.notes(summary),
        plots={name: _plot(name, chart) for name, chart in made.items()},
        heat=_heat(heat) if heat else None,
        key=_key(made, heat),
        cost=cost_rows(summary),
        replicas=_replica_rows(summary),
        any_dropped=any(r.dropped_steps for r in summary.replicas),
    )


def write(summary: Summary, path: str | os.PathLike[str], *, refresh: int | None = None) -> Path:
    """Write the page so that a reader never sees half of it.

    Returns:
        The path.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    part.write_text(render(summary, refresh=refresh), encoding="utf-8")
    part.replace(target)
    return target


def tiles(summary: Summary) -> list[tuple[str, str]]:
    """The key figures: (label, value)."""
    s, case = summary, (summary.cases[0] if summary.cases else summary.suspect)
    out = []
    if case is not None and s.cases:
        where = words.place(case.ranks, case.hosts)
        out += [("where", where), ("since", f"step {case.since}" if case.since is not None else "")]
        out += [("evidence", _evidence(case.log10_e, case.bound))]
        out += [("by chance", words.one_in(case.log10_chance) if case.log10_chance else "")]
    elif case is not None:
        suspicious = case.log10_e is None or case.log10_e > 0
        out += [("most suspicious", f"replica {case.replica}")] if suspicious else []
        out += [("largest evidence", _evidence(case.log10_e, case.bound))]
    first, last = s.loss
    if last is not None:
        out.append(("training loss", f"{words.number(first)} → {words.number(last)}"))
    if s.cost.share is not None:
        out.append(("rule + exchange", f"{words.percent(s.cost.share)} of a step"))
    if s.cost.ratio is not None:
        out.append(("bytes", f"x{words.number(s.cost.ratio, 2)} of stock"))
    return [(label, value) for label, value in out if value]


def cost_rows(summary: Summary) -> list[tuple[str, str, str, str]]:
    """Rows of the overhead table: what, median, 95th percentile, against the step or stock."""
    c, number = summary.cost, words.number
    rows = []
    step = c.step_ms[0]
    for name, (middle, high) in (("exchange", c.exchange_ms), ("rule", c.rule_ms), ("whole step", c.step_ms)):
        if middle is not None:
            share = words.percent(middle / step) if step and name != "whole step" else ""
            rows.append((name, f"{number(middle)} ms", f"{number(high)} ms", share))
    if c.bytes is not None:
        against = f"x{number(c.ratio, 2)} of stock ({words.size(c.stock_bytes)})" if c.ratio is not None else ""
        rows.append(("bytes sent", words.size(c.bytes), "", against))
    return rows


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"number": words.number, "power": words.power, "percent": words.percent, "SCALE": SCALE}
    folder = files("ds_byzantine.report") / "templates"
    environment.globals["style"] = (folder / "page.css").read_text(encoding="utf-8")
    return environment.from_string((folder / "page.html.j2").read_text(encoding="utf-8"))


def _evidence(log10_e: float | None, bound: float | None) -> str:
    if log10_e is None:
        return ""
    return words.power(log10_e) + (f", bound {words.power(bound)}" if bound is not None else "")


def _replica_rows(summary: Summary) -> list[tuple[str, ...]]:
    """Replica, ranks, hosts, devices, strongest evidence, farthest in, dropped in, state."""
    return [
        (
            str(r.replica),
            words.listed(r.ranks),
            words.listed(r.hosts),
            words.listed(sorted(set(r.devices))),
            "" if r.strongest is None else words.power(r.strongest),
            "" if r.farthest is None else words.percent(r.farthest),
            f"{r.dropped_steps:,}" if r.dropped_steps else "",
            words.state(r),
        )
        for r in summary.replicas
    ]


# -- drawing -----------------------------------------------------------------------------------------------------------


def _plot(name: str, chart: Chart) -> Plot:
    several = len(chart.lines) > 1
    curves = tuple(Curve(_path(line, chart), _kind(line.focus, several), line.name) for line in chart.lines)
    ends = [
        Label(100 - chart.y.at(line.pieces[-1][-1][1]), line.name, f"f{line.focus}")
        for line in chart.lines
        if line.focus
    ]
    return Plot(
        name=name,
        title=chart.title,
        about=chart.about,
        curves=curves,
        x_ticks=_x_ticks(chart.x),
        y_ticks=tuple(Tick(round(100 - chart.y.at(v), 2), chart.tick_text(v)) for v in chart.y.ticks()),
        marks=_marks(chart.marks, chart.x),
        bound=(round(100 - chart.y.at(chart.bound[0]), 2), chart.bound[1]) if chart.bound else None,
        labels=tuple(_apart(ends)),
    )


def _kind(focus: int, several: bool) -> str:
    return f"f{focus}" if focus else "other" if several else "one"


def _path(line: Line, chart: Chart) -> str:
    parts = []
    for piece in line.pieces:
        spots = [f"{_units(chart.x.at(x))} {_units(100 - chart.y.at(y))}" for x, y in piece]
        parts.append("M" + "L".join(spots) + ("h.1" if len(spots) == 1 else ""))  # a lone point becomes a dot
    return "".join(parts)


def _heat(heat: HeatMap) -> Heat:
    rows, tall = len(heat.rows), len(heat.rows) <= 16
    height = max(66, min(22 * rows, 480))
    fill = 0.88 if tall else 1.0
    levels = tuple(
        "".join(_cell(heat.x, row, start, end, fill) for row, start, end, found in heat.cells if found == level)
        for level in range(LEVELS)
    )
    every = 1 if tall else math.ceil(rows / 16)
    labels = [
        Label(round(100 * (i + fill / 2) / rows, 2), str(replica), _kind(focus, True))
        for i, (replica, focus) in enumerate(heat.rows)
        if focus or i % every == 0
    ]
    return Heat(
        height=height,
        rows=rows * 10,
        shown=rows,
        levels=levels,
        quarantined="".join(_cell(heat.x, row, start, end, fill) for row, start, end in heat.quarantined),
        dropped="".join(_cell(heat.x, row, start, end, fill) for row, start, end in heat.dropped),
        labels=tuple(_without_collisions(labels, 100 * 13 / height)),
        x_ticks=_x_ticks(heat.x),
        marks=_marks(heat.marks, heat.x),
        left_out=heat.left_out,
    )


def _cell(x: Axis, row: int, start: int, end: int, fill: float) -> str:
    left, right = _units(x.at(start)), _units(x.at(end))
    return f"M{left} {row * 10}H{right}v{10 * fill:g}H{left}z"


def _units(percent: float) -> str:
    return f"{percent * SCALE / 100:.1f}".removesuffix(".0")


def _x_ticks(x: Axis) -> tuple[Tick, ...]:
    return tuple(Tick(round(x.at(v), 2), tick_text(v)) for v in x.ticks() if float(v).is_integer())


def _marks(marks: Sequence[Mark], x: Axis) -> tuple[tuple[float, str], ...]:
    return tuple((round(x.at(mark.step), 2), mark.kind) for mark in marks)


def _apart(labels: Iterable[Label], least: float = 9.0) -> list[Label]:
    """Labels moved so that they do not overlap."""
    out: list[Label] = []
    for label in sorted(labels, key=lambda one: one.at):
        at = max(label.at, out[-1].at + least) if out else label.at
        out.append(Label(round(at, 2), label.text, label.kind))
    over = max(0.0, out[-1].at - 98) if out else 0.0
    return [Label(round(one.at - over, 2), one.text, one.kind) for one in out]


def _without_collisions(labels: Sequence[Label], least: float) -> list[Label]:
    """Labels in focus, and the others that are not too near to one of them."""
    focus = [one.at for one in labels if one.kind != "other"]
    return [one for one in labels if one.kind != "other" or all(abs(one.at - at) >= least for at in focus)]


def _key(made: dict[str, Chart], heat: HeatMap | None) -> list[tuple[str, str]]:
    """What the vertical marks mean: (kind, words), with steps."""
    marks = next((c.marks for c in made.values()), heat.marks if heat else ())
    steps = {kind: [m.step for m in marks if m.kind == kind] for kind in MARK_WORDS}
    return [(kind, f"{text} (step {words.listed(steps[kind])})") for kind, text in MARK_WORDS.items() if steps[kind]]
