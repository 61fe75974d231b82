"""The report in a terminal. Built from `Text`, never from markup: names come from a file that is not trusted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ds_byzantine.report import words
from ds_byzantine.report.charts import LEVELS, heat_map
from ds_byzantine.report.model import Replica, Summary
from ds_byzantine.report.page import cost_rows

MOST_LISTED = 16  # replicas in the table and the heat map; of more only a few are shown
FEW = 8

TONES = {"named": "red", "quiet": "green"}

_BLOCKS, _ASCII = " ░▒▓█", " .:*#"


def view(summary: Summary, width: int = 100, *, unicode: bool = True) -> RenderableType:
    """Everything that fits a screen.

    Args:
        width: columns of the terminal.
        unicode: False where the terminal can show ASCII only.
    """
    tone = TONES.get(summary.status, "yellow")
    parts: list[RenderableType] = [_verdict(summary, tone)]
    if summary.steps and summary.run.replicas > 1:
        parts += [_replicas(summary, tone)]
        parts += _heat(summary, width, tone, _BLOCKS if unicode else _ASCII)
    if summary.steps:
        parts.append(_figures(summary))
    parts += [Text(note, style="dim") for note in words.notes(summary)]
    return Group(*parts)


def _verdict(summary: Summary, tone: str) -> Panel:
    text = Text()
    if summary.run.drill:
        text.append(f"Drill: {summary.run.drill}\n", style="yellow")
    text.append(words.headline(summary), style=f"bold {tone}")
    for sentence in words.lead(summary):
        text.append(f"\n{sentence}")
    text.append("\n\nWhat to do now", style="bold")
    for i, step in enumerate(words.what_to_do(summary), 1):
        text.append(f"\n{i}. {step}")
    title = Text(summary.name, style="bold") if summary.name else None
    return Panel(text, title=title, title_align="left", border_style=tone, padding=(0, 1))


def _replicas(summary: Summary, tone: str) -> Table:
    shown = _worst(summary.replicas)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("replica", "ranks", "hosts"):
        table.add_column(column, overflow="fold")
    for column in ("evidence", "farthest in", "NaN or Inf in", ""):
        table.add_column(column, justify="right" if column else "left")
    for r in shown:
        cells = (
            str(r.replica),
            words.listed(r.ranks),
            words.listed(r.hosts),
            "" if r.strongest is None else words.power(r.strongest),
            "" if r.farthest is None else words.percent(r.farthest),
            f"{r.dropped_steps:,}" if r.dropped_steps else "",
            words.state(r),
        )
        table.add_row(*map(Text, cells), style=f"bold {tone}" if words.state(r) else "")
    if len(shown) < len(summary.replicas):
        table.add_row("...", Text(f"{len(summary.replicas) - len(shown)} more"), style="dim")
    return table


def _worst(replicas: Sequence[Replica]) -> list[Replica]:
    """All, or those with the most against them."""
    if len(replicas) <= MOST_LISTED:
        return list(replicas)
    key = [(r.named, r.strongest or 0.0, r.farthest or 0.0, -r.replica) for r in replicas]
    chosen = sorted(range(len(replicas)), key=lambda i: key[i], reverse=True)[:FEW]
    return [replicas[i] for i in sorted(chosen)]


def _heat(summary: Summary, width: int, tone: str, shades: str) -> list[RenderableType]:
    """A row for each replica; as many characters as fit, each standing for the columns below it."""
    heat = heat_map(summary)
    if heat is None:
        return []
    wide = max(10, min(width - 14, round(heat.x.high - heat.x.low), 120))
    of = {row: replica for row, (replica, _) in enumerate(heat.rows)}
    grid: dict[int, list[list[int]]] = {row: [[] for _ in range(wide)] for row in of}
    lost = {(row, at) for row, start, end in heat.dropped for at in _places(heat.x.at, start, end, wide)}
    for row, start, end, level in heat.cells:
        for at in _places(heat.x.at, start, end, wide):
            grid[row][at].append(level)
    gone = {(row, at) for row, start, end in heat.quarantined for at in _places(heat.x.at, start, end, wide)}
    listed = {r.replica for r in _worst(summary.replicas)}
    lines = []
    for row, cells in grid.items():
        if of[row] not in listed and len(of) > MOST_LISTED:
            continue
        line = Text(f"{of[row]:>9}  ")
        for at, levels in enumerate(cells):
            mean = sum(levels) / len(levels) / (LEVELS - 1) if levels else 0.0
            shade = shades[round(mean * (len(shades) - 1))]
            line.append("!" if (row, at) in lost else "-" if (row, at) in gone else shade)
        line.stylize(tone if heat.rows[row][1] else "", 11)
        lines.append(line)
    title = f"\nreplica    steps {summary.first} to {summary.last}: the darker, the farther"
    title += ("; - in quarantine" if gone else "") + ("; ! NaN or Inf" if lost else "")
    return [Text(title, style="dim"), *lines]


def _places(at: Callable[[float], float], start: int, end: int, wide: int) -> range:
    left = int(at(start) * wide / 100)
    return range(left, max(left + 1, min(wide, round(at(end) * wide / 100))))


def _figures(summary: Summary) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("", "")
    first, last = summary.loss
    if last is not None:
        table.add_row("loss", f"{words.number(first)} at first, {words.number(last)} at last")
    if summary.regime_ratio is not None:
        above = words.percent(summary.regime_above or 0.0)
        table.add_row("R", f"{words.number(summary.regime_ratio)} in the median, above 1 in {above} of the steps")
    for what, middle, high, share in cost_rows(summary):
        parts = [middle, f"95th percentile {high}" if high else "", share if not high else f"{share} of a step"]
        table.add_row(what, ", ".join(p for p in parts if p and p != " of a step"))
    if summary.unsafe_steps:
        table.add_row("skipped", f"{words.count(summary.unsafe_steps, 'step')} with more than f rows not finite")
    for label, value in words.facts(summary):
        table.add_row(label, Text(value))
    return table
