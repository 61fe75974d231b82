"""`ds-byzantine report`: who is named, since when, and how sure that is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_byzantine.cli.output import Json, console, print_json

if TYPE_CHECKING:
    from ds_byzantine.report.model import Summary
    from ds_byzantine.report.read import Reader

EXAMPLE = "Example: ds-byzantine report runs/byzantine --html report.html"


@dataclass(frozen=True)
class Wanted:
    """What to make of the events."""

    name: str
    html: Path | None
    png: Path | None
    as_json: bool
    refresh: int | None


def command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", exists=True, help="Folder of a run (monitor.dir), or its events.jsonl.")
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write one self-contained HTML page.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="DIR", file_okay=False, help="Write the charts as PNG (needs matplotlib).")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between looks while watching.")] = 2.0,
    fail_if_named: Annotated[bool, typer.Option("--fail-if-named", help="Exit code 1 if a replica is named.")] = False,
    as_json: Json = False,
) -> None:
    """Report on a run: which replica is named since which step with which evidence, distances, loss and overhead.

    Reads events.jsonl, also while it grows and after a kill. With --watch and --json: one line of JSON at each change.
    """
    from ds_byzantine.report.read import Reader, find

    wanted = Wanted(str(run), html, png, as_json, max(1, round(interval)) if watch else None)
    if watch:
        summary = _follow(run, wanted, interval)
    else:
        reader = Reader(find(run))
        reader.poll()
        summary = _summary(reader, wanted)
        _print(summary, wanted, _write(summary, wanted))
    raise typer.Exit(1 if fail_if_named and summary is not None and summary.cases else 0)


def _summary(reader: Reader, wanted: Wanted) -> Summary:
    from ds_byzantine.report.model import summarize
    from ds_byzantine.report.records import clean

    return summarize(reader.story, clean(wanted.name))


def _write(summary: Summary, wanted: Wanted) -> list[Path]:
    written = []
    if wanted.html is not None:
        from ds_byzantine.report import page

        written.append(page.write(summary, wanted.html, refresh=wanted.refresh))
    if wanted.png is not None:
        from ds_byzantine.report import png

        written += png.write(summary, wanted.png)
    return written


def _print(summary: Summary, wanted: Wanted, written: list[Path]) -> None:
    if wanted.as_json:
        print_json(_as_json(summary, written))
        return
    from ds_byzantine.report.terminal import view

    out = console()
    out.print(view(summary, out.width, unicode=_unicode(out.encoding)))
    for path in written:
        out.print(f"written: {path}", soft_wrap=True)


def _as_json(summary: Summary, written: list[Path]) -> dict[str, Any]:
    from ds_byzantine.report import words

    said = {"headline": words.headline(summary), "sentences": words.lead(summary)}
    return {"ok": not summary.cases, **said, **summary.as_json(), "written": [str(p) for p in written]}


def _follow(run: Path, wanted: Wanted, interval: float) -> Summary | None:
    """Show the run anew whenever something was added, until Ctrl-C; the last summary."""
    from ds_byzantine.report.read import EVENTS, Reader

    reader = Reader(run / EVENTS if run.is_dir() else run)
    seen: list[Summary] = []

    def look(show: Callable[[Summary], None]) -> None:
        """Read on, and show what changed, for ever."""
        while True:
            if (reader.path.exists() and reader.poll()) or not seen:
                seen[:] = [_summary(reader, wanted)]
                _write(seen[0], wanted)
                show(seen[0])
            time.sleep(interval)

    try:
        if wanted.as_json:
            look(lambda summary: typer.echo(json.dumps(_as_json(summary, []))))
        else:
            _live(look)
    except KeyboardInterrupt:
        pass
    if wanted.html is not None and seen:  # without the refresh
        from ds_byzantine.report import page

        page.write(seen[0], wanted.html)
    return seen[0] if seen else None


def _live(look: Callable[[Callable[[Summary], None]], None]) -> None:
    from rich.live import Live

    from ds_byzantine.report.terminal import view

    out = console()
    if not out.is_terminal:
        look(lambda summary: out.print(view(summary, out.width, unicode=_unicode(out.encoding))))
        return
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        look(lambda summary: live.update(view(summary, out.width, unicode=_unicode(out.encoding)), refresh=True))


def _unicode(encoding: str) -> bool:
    return encoding.lower().startswith("utf")
