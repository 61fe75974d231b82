"""All attacks on all rules: a table in Markdown, and a heat map as HTML and PNG. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ds_byzantine.cli.rehearsal import Cell

CAPTION = "held-out loss over that of the clean run; @ the step in which the bad replica was named"
LEAST, MOST = 0.02, 0.50  # excess that is green, and red


def rows_for(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """The names of the rules, and one row of words per attack.

    Args:
        cells: of one f.
    """
    rules, attacks = _axes(cells)
    found = {(cell.attack, cell.rule): cell for cell in cells}
    return rules, [[attack, *(_words(found.get((attack, rule))) for rule in rules)] for attack in attacks]


def by_f(cells: Sequence[Cell]) -> dict[int, list[Cell]]:
    """The cells for each number of bad replicas."""
    return {f: [cell for cell in cells if cell.f == f] for f in sorted({cell.f for cell in cells})}


def write(cells: Sequence[Cell], out: Path) -> list[Path]:
    """matrix.md, matrix.html and, where matplotlib is installed, matrix.png in `out`.

    Returns:
        The files.
    """
    clean = next(iter(cells)).clean
    tables, pages = [], []
    for f, some in by_f(cells).items():
        rules, rows = rows_for(some)
        title = f"{_counted(f)}; the clean loss is {clean:.3f}"
        lines = [f"| attack | {' | '.join(rules)} |", "|---" * (len(rules) + 1) + "|"]
        tables.append("\n".join([title, "", *lines, *(f"| {' | '.join(row)} |" for row in rows)]))
        pages.append(f"<h2>{escape(title)}</h2><div><table>{_table(some)}</table></div>")
    (out / "matrix.md").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
    (out / "matrix.html").write_text(PAGE.format(caption=CAPTION, tables="".join(pages)), encoding="utf-8")
    drawn = _draw(cells, out / "matrix.png")
    return [out / "matrix.md", out / "matrix.html", *([out / "matrix.png"] if drawn else [])]


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Rules against attacks</title>
<meta name="viewport" content="width=device-width">
<style>body{{font:14px system-ui,sans-serif;margin:2rem;color:#1c1c1c;background:#fff}}h2{{font-size:1rem}}
div{{overflow-x:auto}}td,th{{padding:.3rem .6rem;text-align:right;white-space:nowrap}}th{{font-weight:600}}
</style><h1>Rules against attacks</h1><p>Each cell: {caption}. Green: within 2%; red: 50% and more, or not a
number.</p>{tables}</html>
"""


def _table(cells: Sequence[Cell]) -> str:
    rules, rows = rows_for(cells)
    found = {(cell.attack, cell.rule): cell for cell in cells}
    head = "<tr><th></th>" + "".join(f"<th>{escape(rule)}</th>" for rule in rules) + "</tr>"
    return head + "".join(
        f"<tr><th>{escape(row[0])}</th>"
        + "".join(
            f'<td style="background:{_color(found.get((row[0], rule)))}">{escape(text)}</td>'
            for rule, text in zip(rules, row[1:], strict=True)
        )
        + "</tr>"
        for row in rows
    )


def _draw(cells: Sequence[Cell], path: Path) -> bool:
    """The heat map as PNG. Returns whether matplotlib is there."""
    try:
        from matplotlib import rc_context
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
    except ImportError:
        return False
    parts = by_f(cells)
    sizes = [_axes(some) for some in parts.values()]
    widest = max(len(rules) for rules, _ in sizes)
    heights = [0.3 * len(attacks) for _, attacks in sizes]
    style: Any = {"text.parse_math": False, "font.size": 8}
    with rc_context(style):
        figure = Figure(figsize=(1.6 + 0.72 * widest, sum(heights) + 1.9 * len(parts)), dpi=100, layout="constrained")
        axes = figure.subplots(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
        colours = LinearSegmentedColormap.from_list("loss", ["#8fd19e", "#f7e8a4", "#e58b82"]).with_extremes(bad="#fff")
        for ax, (f, some) in zip(axes, parts.items(), strict=True):
            rules, rows = rows_for(some)
            found = {(cell.attack, cell.rule): cell for cell in some}
            shares = [[_share(found.get((row[0], rule))) for rule in rules] for row in rows]
            ax.imshow(shares, cmap=colours, vmin=0, vmax=1, aspect="auto")
            for y, row in enumerate(rows):
                for x, text in enumerate(row[1:]):
                    ax.text(x, y, text, ha="center", va="center", fontsize=6.5)
            ax.set_xticks(range(len(rules)), rules, rotation=40, ha="left")
            ax.set_yticks(range(len(rows)), [row[0] for row in rows])
            ax.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
            ax.set_frame_on(False)
            ax.set_xlabel(f"{_counted(f)}: {CAPTION}")
        figure.savefig(path)
    return True


def _axes(cells: Sequence[Cell]) -> tuple[list[str], list[str]]:
    return list(dict.fromkeys(cell.rule for cell in cells)), list(dict.fromkeys(cell.attack for cell in cells))


def _counted(f: int) -> str:
    return f"{f} bad replica{'s' if f > 1 else ''}"


def _words(cell: Cell | None) -> str:
    if cell is None:
        return ""
    size = f"{cell.excess:+.0%}" if abs(cell.excess) < 10 else ("NaN" if cell.loss != cell.loss else ">+999%")
    return size + (f" @{cell.named}" if cell.named is not None else "") + (" wrong" if cell.wrong else "")


def _share(cell: Cell | None) -> float:
    """0 for a clean loss, 1 for a ruined one, NaN for no run."""
    if cell is None:
        return float("nan")
    return 1.0 if not cell.excess < MOST else max(0.0, (cell.excess - LEAST) / (MOST - LEAST))


def _color(cell: Cell | None) -> str:
    return "transparent" if cell is None else f"hsl({round(130 * (1 - _share(cell)))} 60% 82%)"
