"""From a summary to lines, ticks and cells in percent of a drawing area; page.py and png.py draw them.

Lines are of the replicas in focus (those named, or else the most suspicious one) and, in grey, of all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from ds_byzantine.report.model import Summary
from ds_byzantine.report.series import Column, Values
from ds_byzantine.report.words import power

MOST_ROWS = 64  # of the heat map

MOST_FOCUS = 3

LEVELS = 6  # shades of the heat map

Point = tuple[float, float]


@dataclass(frozen=True)
class Tick:
    """A label at `at` percent: from the left, or from the top."""

    at: float
    text: str


@dataclass(frozen=True)
class Line:
    """A curve, in pieces, as points (x, y) in data units. `focus`: 1 for the first replica in focus, 0 for others."""

    name: str
    focus: int
    pieces: tuple[tuple[Point, ...], ...]


@dataclass(frozen=True)
class Mark:
    """A step that matters: "since", "decided" or "resumed"."""

    kind: str
    step: int


@dataclass(frozen=True)
class Axis:
    """Data units to percent: 0 at the low end, 100 at the high one. Values beyond the ends are drawn at them."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value lies, 0 to 100."""
        low, high, v = self.low, self.high, value
        if self.log:
            low, high, v = math.log(low), math.log(high), math.log(max(v, low))
        share = (v - low) / (high - low) if high > low else 0.5
        return 100 * min(1.0, max(0.0, share))

    def ticks(self, most: int = 6) -> list[float]:
        """Round numbers between the ends."""
        return _log_ticks(self.low, self.high, most) if self.log else _even_ticks(self.low, self.high, most)


@dataclass(frozen=True)
class Chart:
    """A line chart. `bound`: a horizontal line with its label."""

    title: str
    about: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    bound: tuple[float, str] | None = None
    powers: bool = False  # ticks are exponents of ten

    def tick_text(self, value: float) -> str:
        """The label of a tick of the y axis."""
        return power(value) if self.powers else tick_text(value)


@dataclass(frozen=True)
class HeatMap:
    """Replica x step. `cells`: (row, first step, step after the last, level); level 0 is never far, LEVELS - 1 always.

    Args:
        dropped: cells in which a row was not finite.
        quarantined: cells in which the replica was left out.
        rows: the replica of each row, and whether it is in focus.
        left_out: replicas that are not shown.
    """

    x: Axis
    rows: tuple[tuple[int, int], ...]
    cells: tuple[tuple[int, int, int, int], ...]
    dropped: tuple[tuple[int, int, int], ...]
    quarantined: tuple[tuple[int, int, int], ...]
    marks: tuple[Mark, ...]
    left_out: int


def focus_of(summary: Summary) -> dict[tuple[int, int], int]:
    """The replicas to point out, those named or else the most suspicious one: (index, of how many) -> 1, 2, 3."""
    suspect = summary.suspect
    suspicious = suspect is not None and (suspect.log10_e is None or suspect.log10_e > 0)
    cases = summary.cases or ((suspect,) if suspect is not None and suspicious else ())
    found = dict.fromkeys((case.replica, case.of) for case in cases)
    return {key: i + 1 for i, key in enumerate(list(found)[:MOST_FOCUS])}


def marks_of(summary: Summary) -> tuple[Mark, ...]:
    """When the trouble began, when it was decided, when the job was resumed; those within the steps shown."""
    found = [Mark("resumed", step) for step, _ in summary.resumptions]
    found += [Mark("since", c.since) for c in summary.cases if c.since is not None]
    found += [Mark("decided", c.decided) for c in summary.cases if c.decided is not None]
    first, last = summary.first or 0, summary.last or 0
    return tuple(dict.fromkeys(m for m in found if first <= m.step <= last))[:12]


def charts(summary: Summary) -> dict[str, Chart]:
    """The charts for which there are data, by name."""
    made = {
        "evidence": _evidence(summary),
        "loss": _single(summary, lambda c: c.loss, "Training loss", "Of the first replica.", sparse=False),
        "distances": _replicas(
            summary, lambda c: c.distances, "Distance to the aggregate", "Of each replica's gradient, logarithmic."
        ),
        "regime": _regime(summary),
        "norms": _replicas(summary, lambda c: c.norms, "Norm of the gradient", "Of each replica, logarithmic."),
        "cosine": _single(
            summary, lambda c: c.cosine_min, "Smallest cosine", "Between the gradients of any two replicas."
        ),
    }
    return {name: chart for name, chart in made.items() if chart is not None}


def heat_map(summary: Summary) -> HeatMap | None:
    """Who was how far from the aggregate when; None with one replica or without distances."""
    n = summary.most_replicas
    if n < 2 or not any(v is not None for c in summary.columns for v in c.farness):
        return None
    focus = {replica: level for (replica, _), level in reversed(focus_of(summary).items())}
    shown = _rows_shown(summary, n)
    cells, dropped, gone = [], [], []
    for column, (start, end) in zip(summary.columns, _spans(summary.columns), strict=True):
        for row, replica in enumerate(shown):
            if replica >= len(column.farness):
                continue
            value = column.farness[replica]
            if column.dropped[replica]:
                dropped.append((row, start, end))
            elif column.quarantined[replica]:
                gone.append((row, start, end, 0))
            elif value is not None:
                cells.append((row, start, end, min(LEVELS - 1, int(value * LEVELS))))
    return HeatMap(
        x=_steps_axis(summary, cells=True),
        rows=tuple((replica, focus.get(replica, 0)) for replica in shown),
        cells=tuple(_merged(cells)),
        dropped=tuple(dropped),
        quarantined=tuple(span[:3] for span in _merged(gone)),
        marks=marks_of(summary),
        left_out=n - len(shown),
    )


def tick_text(value: float) -> str:
    """A number on an axis."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,g}"


# -- which -------------------------------------------------------------------------------------------------------------


def _evidence(summary: Summary) -> Chart | None:
    bound = summary.bound
    lines = _lines(summary, lambda c: c.evidence)
    if bound is None or not lines:
        return None
    top = max(y for line in lines for piece in line.pieces for _, y in piece)
    high = max(bound * 1.15, min(top * 1.05, 4 * bound))
    over = " Values beyond the frame are drawn at its edge." if top > high else ""
    return Chart(
        title="Evidence against each replica",
        about="The e-value: what one would have won by betting, at fair odds, that the replica is bad. 1 means nothing."
        + over,
        x=_steps_axis(summary),
        y=Axis(-0.5 * bound, high),
        lines=lines,
        marks=marks_of(summary),
        bound=(bound, f"named at {power(bound)}"),
        powers=True,
    )


def _regime(summary: Summary) -> Chart | None:
    chart = _single(
        summary,
        lambda c: c.regime_ratio,
        "Regime ratio R",
        "Noise against signal: below 1 a rule has something to work with.",
        log=True,
    )
    if chart is None:
        return None
    axis = Axis(min(chart.y.low, 0.5), max(chart.y.high, 2.0), log=True)
    return Chart(chart.title, chart.about, chart.x, axis, chart.lines, chart.marks, (1.0, "R = 1"))


def _single(
    summary: Summary,
    value: Callable[[Column], float | None],
    title: str,
    about: str,
    *,
    log: bool = False,
    sparse: bool = True,
) -> Chart | None:
    """One line; `sparse`: missing values were not computed, which is no gap."""
    points = [(_middle(c), value(c)) for c in summary.columns]
    if sparse:
        points = [(x, y) for x, y in points if y is not None]
    pieces = _pieces((x, y if y is None or y > 0 or not log else None) for x, y in points)
    if not pieces:
        return None
    line = Line(title, 0, pieces)
    return Chart(title, about, _steps_axis(summary), _values_axis([line], log=log), (line,), marks_of(summary))


def _replicas(summary: Summary, values: Callable[[Column], Values], title: str, about: str) -> Chart | None:
    lines = _lines(summary, values, positive=True)
    if not lines or summary.most_replicas < 2:
        return None
    return Chart(title, about, _steps_axis(summary), _values_axis(lines, log=True), lines, marks_of(summary))


def _lines(summary: Summary, values: Callable[[Column], Values], *, positive: bool = False) -> tuple[Line, ...]:
    """One line for each replica, a new one where n changes; those in focus last, so that they lie on top."""
    focus, out = focus_of(summary), []
    shown = _rows_shown(summary, summary.most_replicas)
    for n, group in groupby(summary.columns, key=lambda c: len(c.farness)):
        rows = ((_middle(c), values(c)) for c in group)
        table = [(x, row) for x, row in rows if any(v is not None for v in row)]  # others were not computed
        for replica in (i for i in shown if i < n):
            points = ((x, row[replica]) for x, row in table)
            pieces = _pieces((x, y if y is None or y > 0 or not positive else None) for x, y in points)
            if pieces:
                out.append(Line(f"replica {replica}", focus.get((replica, n), 0), pieces))
    return tuple(sorted(out, key=lambda line: (line.focus > 0, -line.focus)))


def _rows_shown(summary: Summary, n: int) -> list[int]:
    """All replicas, or the MOST_ROWS most suspicious ones."""
    if n <= MOST_ROWS:
        return list(range(n))
    focus = {replica for replica, _ in focus_of(summary)}
    facts = {r.replica: (r.strongest or 0.0, r.farthest or 0.0) for r in summary.replicas}
    worst = sorted(range(n), key=lambda i: (i in focus, *facts.get(i, (0.0, 0.0))), reverse=True)
    return sorted(worst[:MOST_ROWS])


# -- where -------------------------------------------------------------------------------------------------------------


def _middle(column: Column) -> float:
    return (column.first + column.last) / 2


def _pieces(points: Iterable[tuple[float, float | None]]) -> tuple[tuple[Point, ...], ...]:
    """Runs of points without a gap."""
    out: list[list[Point]] = [[]]
    for x, y in points:
        if y is None or not abs(y) < 1e300 or 0 < abs(y) < 1e-300:
            out.append([])
        else:
            out[-1].append((x, y))
    return tuple(tuple(piece) for piece in out if piece)


def _spans(columns: Sequence[Column]) -> list[tuple[int, int]]:
    """From each column's first step to the next one's, so that no gap is left where not all steps were written."""
    starts = [c.first for c in columns]
    return [
        (start, min(end, c.last + max(1, 2 * (c.last - c.first + 1))))
        for c, start, end in zip(columns, starts, [*starts[1:], columns[-1].last + 1] if columns else [], strict=True)
    ]


def _merged(cells: Iterable[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Neighbouring cells of one level as one."""
    out: list[tuple[int, int, int, int]] = []
    for row, start, end, level in sorted(cells):
        if out and out[-1][0] == row and out[-1][2] == start and out[-1][3] == level:
            out[-1] = (row, out[-1][1], end, level)
        else:
            out.append((row, start, end, level))
    return out


def _steps_axis(summary: Summary, *, cells: bool = False) -> Axis:
    first, last = summary.first or 0, summary.last or 0
    return Axis(first, last + 1 if cells else max(last, first + 1))


def _values_axis(lines: Sequence[Line], *, log: bool) -> Axis:
    values = [y for line in lines for piece in line.pieces for _, y in piece]
    low, high = min(values), max(values)
    if log:
        return Axis(low / 1.15, high * 1.15, log=True)
    space = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Axis(low - space, high + space)


def _even_ticks(low: float, high: float, most: int) -> list[float]:
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    raw = span / most
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5)):
        inside = [f * 10.0**d for d in decades for f in factors if low <= f * 10.0**d <= high]
        if len(inside) >= 3:
            return inside[:: math.ceil(len(inside) / most)]
    return _even_ticks(low, high, most)
