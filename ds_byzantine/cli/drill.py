"""`ds-byzantine drill`: what an attack does to a clean run, to the mean and to the rule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ds_byzantine.cli.output import Json, console, grid, print_json
from ds_byzantine.errors import ConfigError

if TYPE_CHECKING:
    from ds_byzantine.cli.rehearsal import Cell
    from ds_byzantine.cli.rehearsal_script import Script

EXAMPLE = (
    "Examples: ds-byzantine drill sign_flip -n 5 -f 1     "
    "your script: ds-byzantine drill bit_flip --script train.py -- --deepspeed ds.json --output_dir {run}     "
    "all attacks on all rules: ds-byzantine drill all -n 7 -f 1 -f 2"
)


def command(
    what: Annotated[str, typer.Argument(metavar="NAME|FILE|all", help="An attack, a drill file, or all attacks.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENTS]", help='Of the script; "{run}" becomes the folder of each run.'),
    ] = None,
    replicas: Annotated[int, typer.Option("--replicas", "-n", min=2, help="Ranks to start on this machine.")] = 5,
    faulty: Annotated[
        list[int] | None,
        typer.Option("--faulty", "-f", min=1, help='Bad replicas, the last ones: 1. With "all" may be repeated.'),
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(help='Rule to try, or e.g. nnm+median; may be repeated. "all": every rule; a script: its own.'),
    ] = None,
    script: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Rehearse with your own training script.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 40,
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, data and attack.")] = 0,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Results; runs that are there already are not repeated.")
    ] = Path("runs/drill"),
    timeout: Annotated[float, typer.Option(min=10, help="Seconds for all of it; for each run of a script.")] = 7200.0,
    as_json: Json = False,
) -> None:
    """Rehearse an attack: train a tiny language model clean, attacked with the mean, and attacked with the rule.

    All runs share one launched world of real ranks. Exit code 1 if the rule did not hold. With "all": every attack on
    every rule that fits, a table and a heat map. With --script your own script runs three times, and the section of its
    DeepSpeed JSON decides which rule is tried.
    """
    from ds_byzantine.cli import rehearsal
    from ds_byzantine.cli.rehearsal_script import Script

    _check(what, script, arguments, faulty, rule)
    if script is not None:
        wanted = Script(script, tuple(arguments or ()), replicas, out, timeout)
        _script(wanted, what, rule[0] if rule else None, faulty[0] if faulty else None, as_json)
    everything = what == "all"
    bad = sorted(set(faulty or [1]))
    rules = rule or (rehearsal.every_rule(replicas, bad) if everything else ["centered_clip"])
    options: dict[str, Any] = {"controls": everything, "steps": steps, "stage": stage, "seed": seed}
    compared = ["mean", *(one for one in rules if one != "mean")]
    runs = rehearsal.table_for(rehearsal.every_attack() if everything else [what], compared, replicas, bad, **options)
    results = _run(runs, replicas, out, timeout, quiet=as_json)
    cells, clean = rehearsal.cells(results), float(results["clean"]["held_out"])
    if everything:
        _matrix(cells, clean, out, as_json)
    label = f"seed {seed}; events of each run: {out}/events/<run>, e.g. for `ds-byzantine report`"
    _show(cells, clean, "held-out loss", label, out, as_json)


def _check(
    what: str, script: Path | None, arguments: list[str] | None, faulty: list[int] | None, rule: list[str] | None
) -> None:
    """Raise ConfigError for what does not go together."""
    from ds_byzantine.attacks.catalog import ATTACKS
    from ds_byzantine.cli import rehearsal

    if what in rehearsal.ASIDE:
        raise ConfigError(
            f"drill: {what} spoils data, not gradients: call flip_labels in your script; see docs/drills.md."
        )
    if what != "all" and what not in ATTACKS and not what.endswith(".json"):
        known = ", ".join(rehearsal.every_attack())
        raise ConfigError(f'drill: no attack is called "{what}". Known: {known}; or a .json file, or all.')
    if rule and set(rule) == {"mean"}:
        raise ConfigError("drill: the mean is the comparison that is always made; name the rule to try with --rule.")
    if script is None and arguments:
        raise ConfigError(f"drill: {' '.join(arguments)}: only a script (--script) takes arguments.")
    if script is not None and (what == "all" or len(faulty or []) > 1 or len(rule or []) > 1):
        raise ConfigError("drill: with --script name one attack, at most one -f and at most one --rule.")


def _run(runs: list[dict[str, Any]], n: int, out: Path, timeout: float, *, quiet: bool) -> dict[str, dict[str, Any]]:
    from rich.progress import Progress

    from ds_byzantine.cli import rehearsal

    with Progress(disable=quiet, transient=True) as bar:
        task = bar.add_task(f"{len(runs)} runs on {n} ranks", total=len(runs))
        return rehearsal.run_world(runs, n, out, timeout, lambda done, total: bar.update(task, completed=done))


def _script(wanted: Script, what: str, rule: str | None, f: int | None, as_json: bool) -> NoReturn:
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ds_byzantine.cli.rehearsal_script import rehearse

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, disable=as_json, transient=True) as bar:
        task = bar.add_task("clean run: starting", total=None)

        def tell(name: str, steps: int) -> None:
            bar.update(task, description=f"{name} run: {steps} steps")

        clean, cells = rehearse(wanted, what, rule, f, tell)
    label = (
        f"training loss of replica 0 over the last tenth of {clean.steps} steps; events and logs: {wanted.out}/<run>"
    )
    if clean.named:
        label += f"\nwithout the attack replica {clean.named[0][1]} is named ({clean.named[0][2]}): look at that first"
    _show(cells, clean.loss, "training loss", label, wanted.out, as_json)


def _show(cells: list[Cell], clean: float, loss: str, label: str, out: Path, as_json: bool) -> NoReturn:
    held = _held(cells)
    if as_json:
        print_json({"ok": held, "clean": _number(clean), "out": str(out), "cells": _plain(cells)})
        raise typer.Exit(0 if held else 1)
    shown = console()
    table = grid("run", loss, "against clean", "bad replica named", right=(loss, "against clean"))
    table.add_row("clean, the mean", f"{clean:.3f}", "", "")
    for cell in cells:
        named = f"in step {cell.named}" if cell.named is not None else "no"
        wrong = f"; wrongly named: {', '.join(map(str, cell.wrong))}" if cell.wrong else ""
        table.add_row(f"attacked, {cell.rule}", f"{cell.loss:.3f}", f"{cell.excess:+.1%}", named + wrong)
    shown.print(table)
    for cell in cells:
        if cell.rule != "mean":
            verdict = "held" if cell.held else "did not hold"
            shown.print(f"{'ok  ' if cell.held else 'FAIL'} {cell.rule} {verdict} against {cell.attack} (f={cell.f})")
    if all(cell.held for cell in cells if cell.rule == "mean"):
        shown.print("note: the mean held as well, so this drill shows little")
    shown.print(label)
    raise typer.Exit(0 if held else 1)


def _matrix(cells: list[Cell], clean: float, out: Path, as_json: bool) -> NoReturn:
    from ds_byzantine.cli import matrix

    files = [str(path) for path in matrix.write(cells, out)]
    held = _held(cells)
    if as_json:
        print_json({"ok": True, "held": held, "clean": _number(clean), "cells": _plain(cells), "written": files})
        raise typer.Exit(0)
    shown = console()
    for f, some in matrix.by_f(cells).items():
        rules, rows = matrix.rows_for(some)
        table = grid("attack", *rules)
        for row in rows:
            table.add_row(*row)
        shown.print(f"f={f}: {matrix.CAPTION} (clean loss {clean:.3f})")
        shown.print(table)
    shown.print("  ".join(files))
    raise typer.Exit(0)


def _held(cells: list[Cell]) -> bool:
    """Whether every rule kept its loss and named no healthy replica; the mean is the comparison, not judged."""
    return all(cell.held and not cell.wrong for cell in cells if cell.rule != "mean")


def _plain(cells: list[Cell]) -> list[dict[str, Any]]:
    return [
        {
            "rule": cell.rule, "attack": cell.attack, "f": cell.f, "loss": _number(cell.loss),
            "excess": _number(cell.excess), "held": cell.held, "named_at": cell.named, "wrong": list(cell.wrong),
        }
        for cell in cells
    ]  # fmt: skip


def _number(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
