"""`ds-byzantine drill`: what an attack does to a clean run, to the mean and to the rule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ds_byzantine.cli.output import Json, console, grid, print_json

if TYPE_CHECKING:
    from ds_byzantine.cli.rehearsal import Cell

EXAMPLE = "Example: ds-byzantine drill sign_flip -n 5 -f 1     All attacks on all rules: ds-byzantine drill all -n 8"


def command(
    what: Annotated[str, typer.Argument(metavar="NAME|FILE|all", help="An attack, a drill file, or all attacks.")],
    replicas: Annotated[int, typer.Option("--replicas", "-n", min=2, help="Ranks to start on this machine.")] = 5,
    faulty: Annotated[int, typer.Option("--faulty", "-f", min=1, help="Bad replicas, the last ones.")] = 1,
    rule: Annotated[
        list[str] | None,
        typer.Option(help='Rule to try; may be repeated. Left out: the default, with "all" every rule.'),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 40,
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, data and attack.")] = 0,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Results; runs that are there already are not repeated.")
    ] = Path("runs/drill"),
    timeout: Annotated[float, typer.Option(min=10, help="Seconds for all of it.")] = 7200.0,
    as_json: Json = False,
) -> None:
    """Rehearse an attack: train a tiny language model clean, attacked with the mean, and attacked with the rule.

    All runs share one launched world of real ranks. Exit code 1 if the rule did not hold. With "all": every attack on
    every rule that fits, a table and a heat map.
    """
    from ds_byzantine.attacks.catalog import ATTACKS
    from ds_byzantine.cli import rehearsal
    from ds_byzantine.errors import ConfigError

    everything = what == "all"
    attacks, fitting = rehearsal.every_pair(replicas)
    if not everything and what in rehearsal.ASIDE:
        raise ConfigError(
            f"drill: {what} spoils data, not gradients: call flip_labels in your script; see docs/drills.md."
        )
    if not everything and what not in ATTACKS and not what.endswith(".json"):
        raise ConfigError(f'drill: no attack is called "{what}". Known: {", ".join(attacks)}; or a .json file, or all.')
    rules = rule or (fitting if everything else ["centered_clip"])
    options = {"steps": steps, "stage": stage, "seed": seed}
    compared = ["mean", *(one for one in rules if one != "mean")]
    runs = rehearsal.table_for(attacks if everything else [what], compared, replicas, faulty, **options)
    results = _run(runs, replicas, out, timeout, quiet=as_json)
    cells = rehearsal.cells(results, replicas)
    held = all(cell.held and not cell.wrong for cell in cells if cell.rule != "mean")
    if everything:
        rehearsal.write_matrix(cells, out)
    if as_json:
        print_json({"ok": held, "clean": results["clean"]["held_out"], "out": str(out), "cells": _plain(cells)})
    else:
        _print(cells, float(results["clean"]["held_out"]), seed, out, everything)
    raise typer.Exit(0 if held or everything else 1)


def _run(runs: list[dict[str, Any]], n: int, out: Path, timeout: float, *, quiet: bool) -> dict[str, dict[str, Any]]:
    from rich.progress import Progress

    from ds_byzantine.cli import rehearsal

    with Progress(disable=quiet, transient=True) as bar:
        task = bar.add_task(f"{len(runs)} runs on {n} ranks", total=len(runs))
        return rehearsal.run_world(runs, n, out, timeout, lambda done, total: bar.update(task, completed=done))


def _print(cells: list[Cell], clean: float, seed: int, out: Path, everything: bool) -> None:
    shown = console()
    if everything:
        from ds_byzantine.cli.rehearsal import matrix_rows

        rules, rows = matrix_rows(cells)
        table = grid("attack", *rules)
        for row in rows:
            table.add_row(*row)
        shown.print(f"Held-out loss over the clean one ({clean:.3f}); @ the step in which the bad replica was named")
        shown.print(table)
        shown.print(f"{out}/matrix.md  {out}/matrix.html")
        return
    table = grid("run", "held-out loss", "against clean", "bad replica named", right=("held-out loss", "against clean"))
    table.add_row("clean, stock DeepSpeed", f"{clean:.3f}", "", "")
    for cell in cells:
        named = f"in step {cell.named}" if cell.named is not None else "no"
        wrong = f"; wrongly named: {', '.join(map(str, cell.wrong))}" if cell.wrong else ""
        table.add_row(f"attacked, {cell.rule}", f"{cell.loss:.3f}", f"{cell.excess:+.1%}", named + wrong)
    shown.print(table)
    for cell in cells:
        if cell.rule != "mean":
            verdict = "held" if cell.held else "did not hold"
            shown.print(f"{'ok  ' if cell.held else 'FAIL'} {cell.rule} {verdict} against {cell.attack} (f={cell.f})")
    shown.print(f"seed {seed}; events of each run: {out}/events/<run>, e.g. for `ds-byzantine report`")


def _plain(cells: list[Cell]) -> list[dict[str, Any]]:
    def number(value: float) -> float | None:
        return round(value, 6) if value == value and abs(value) != float("inf") else None

    return [
        {
            "rule": cell.rule, "attack": cell.attack, "f": cell.f, "loss": number(cell.loss),
            "excess": number(cell.excess), "held": cell.held, "named_at": cell.named, "wrong": list(cell.wrong),
        }
        for cell in cells
    ]  # fmt: skip
