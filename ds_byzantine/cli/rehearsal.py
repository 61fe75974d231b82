"""Rehearsals: what an attack does to a clean run, to the mean and to the rule, in one launched world. No torch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ds_byzantine.attacks.catalog import ATTACKS
from ds_byzantine.cli.ranks import started
from ds_byzantine.errors import ByzantineError, HostStateError
from ds_byzantine.plan import rules_that_fit

STEPS, STAGE, RATE, SEED = 40, 2, 0.2, 0
TOLERANCE = 0.10
ASIDE = ("label_flip",)  # a hook for data, not for gradients

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Cell:
    """One attack on one rule.

    Args:
        rule, attack, f: what ran.
        clean: held-out loss of stock DeepSpeed without an attack.
        loss: held-out loss under attack.
        named: step in which the bad replica was named; None if it was not.
        wrong: healthy replicas that were named.
    """

    rule: str
    attack: str
    f: int
    clean: float
    loss: float
    named: int | None
    wrong: tuple[int, ...]

    @property
    def excess(self) -> float:
        """Loss over that of the clean run, minus 1."""
        return self.loss / self.clean - 1.0

    @property
    def held(self) -> bool:
        """Whether the loss stayed within `TOLERANCE` of the clean one (false for NaN)."""
        return self.excess <= TOLERANCE


def table_for(drills: Sequence[Any], rules: Sequence[str], n: int, f: int, **options: Any) -> list[dict[str, Any]]:
    """The runs of a rehearsal: clean, and every rule under every drill. The last replica is bad unless a drill says.

    Args:
        drills: as the "drill" key of the section takes them.
        rules: names; "mean" runs with f=0, as the comparison.
        n, f: replicas and bad ones.
        options: steps, stage, lr, seed of all runs.
    """
    base = {"steps": STEPS, "stage": STAGE, "lr": RATE, "seed": SEED, **options}
    runs: list[dict[str, Any]] = [{**base, "name": "clean"}]
    for drill in drills:
        spec = {"name": drill} if isinstance(drill, str) and not drill.endswith(".json") else drill
        for rule in rules:
            bad = 0 if rule == "mean" else f
            section = {"rule": rule, "f": bad, "drill": _on_last(spec, n, max(f, 1))}
            runs.append({**base, "name": f"{rule}-f{f}-{_label(drill)}", "section": section, "bad": f})
    return runs


def every_pair(n: int) -> tuple[list[str], list[str]]:
    """All attacks, and all rules that hold for n replicas with one bad one."""
    return [name for name in sorted(ATTACKS) if name not in ASIDE], list(rules_that_fit(n, 1))


def run_world(
    runs: Sequence[Mapping[str, Any]], n: int, out: Path, timeout: float, progress: Progress
) -> dict[str, dict[str, Any]]:
    """Launch n ranks that work through the runs, and collect the results. Results in `out` are not made again.

    Args:
        timeout: seconds for all of it.
        progress: called with (runs done, runs) now and then.

    Raises:
        HostStateError: the ranks ended before all runs were done; names the log.
    """
    out.mkdir(parents=True, exist_ok=True)
    table = out / "table.json"
    table.write_text(json.dumps(list(runs)), encoding="utf-8")
    log = out / "launch.log"
    names = [str(run["name"]) for run in runs]

    def done() -> int:
        return sum(made(out, run) for run in runs)

    if done() == len(runs):
        return _results(out, names)
    with started("ds_byzantine.cli.rehearsal_job", [str(table), str(out)], n, log) as process:
        end = time.monotonic() + timeout
        while process.poll() is None and time.monotonic() < end:
            progress(done(), len(runs))
            time.sleep(0.5)
        late = process.poll() is None
    missing = len(runs) - done()
    if missing:
        why = f"were stopped after {timeout:.0f} s" if late else f"ended with exit code {process.returncode}"
        raise HostStateError(
            f"drill: the ranks {why} with {missing} of {len(runs)} runs to go; their output is in {log}. The "
            "same command goes on from there."
        )
    return _results(out, names)


def made(out: Path, run: Mapping[str, Any]) -> bool:
    """Whether the result of exactly this run lies in `out`."""
    path = out / f"{run['name']}.json"
    if not path.exists():
        return False
    found = json.loads(path.read_text(encoding="utf-8"))
    return all(found.get(key) == value for key, value in run.items())


def cells(results: Mapping[str, Mapping[str, Any]], n: int) -> list[Cell]:
    """What each attack did to each rule."""
    clean = float(results["clean"]["held_out"])
    found = []
    for name, one in results.items():
        if name == "clean":
            continue
        section = one["section"]
        bad = set(section["drill"]["replicas"])
        steps = [step for step, replica, _ in one["named"] if replica in bad]
        wrong = tuple(replica for _, replica, kind in one["named"] if replica not in bad and kind != "duplicate")
        found.append(
            Cell(
                section["rule"],
                section["drill"]["name"],
                int(one["bad"]),
                clean,
                float(one["held_out"]),
                min(steps) if steps else None,
                wrong,
            )
        )
    return found


def _results(out: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {name: json.loads((out / f"{name}.json").read_text(encoding="utf-8")) for name in names}


def _on_last(spec: Any, n: int, count: int) -> dict[str, Any]:
    if isinstance(spec, str):
        path = Path(spec)
        if not path.is_file():
            raise ByzantineError(f"drill: no such file: {spec}. Give the name of an attack or an existing JSON file.")
        spec = json.loads(path.read_text(encoding="utf-8"))
    return {"replicas": list(range(n - count, n)), **spec}


def _label(drill: Any) -> str:
    if isinstance(drill, str):
        return Path(drill).stem if drill.endswith(".json") else drill
    return str(drill.get("name", "drill"))


# -- all attacks on all rules ------------------------------------------------------------------------------------------


def matrix_rows(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """The names of the rules, and one row of words per attack."""
    rules = list(dict.fromkeys(cell.rule for cell in cells))
    attacks = list(dict.fromkeys(cell.attack for cell in cells))
    found = {(cell.attack, cell.rule): cell for cell in cells}
    return rules, [[attack, *(_words(found.get((attack, rule))) for rule in rules)] for attack in attacks]


def write_matrix(cells: Sequence[Cell], out: Path) -> None:
    """matrix.md and matrix.html (a heat map) in `out`."""
    rules, rows = matrix_rows(cells)
    lines = [f"| attack | {' | '.join(rules)} |", "|---" * (len(rules) + 1) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    (out / "matrix.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = {(cell.attack, cell.rule): cell for cell in cells}
    head = "".join(f"<th>{escape(rule)}</th>" for rule in rules)
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>"
        + "".join(
            f'<td style="background:{_color(found.get((row[0], rule)))}">{escape(text)}</td>'
            for rule, text in zip(rules, row[1:], strict=True)
        )
        + "</tr>"
        for row in rows
    )
    (out / "matrix.html").write_text(PAGE.format(head=head, body=body), encoding="utf-8")


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Rules against attacks</title>
<meta name="viewport" content="width=device-width">
<style>body{{font:14px system-ui,sans-serif;margin:2rem;color:#1c1c1c;background:#fff}}
div{{overflow-x:auto}}td,th{{padding:.3rem .6rem;text-align:right;white-space:nowrap}}th{{font-weight:600}}
</style><h1>Rules against attacks</h1><p>Held-out loss over that of the clean run; @ the step in which the bad one was
named. Green: within 2%; red: 50% and more, or not a number.</p><div><table><tr><th></th>{head}</tr>{body}</table></div>
"""


def _words(cell: Cell | None) -> str:
    if cell is None:
        return ""
    size = f"{cell.excess:+.0%}" if abs(cell.excess) < 10 else ("NaN" if cell.loss != cell.loss else ">+999%")
    return size + (f" @{cell.named}" if cell.named is not None else "") + (" wrong" if cell.wrong else "")


def _color(cell: Cell | None) -> str:
    if cell is None:
        return "transparent"
    share = 1.0 if not cell.excess < 0.5 else max(0.0, (cell.excess - 0.02) / 0.48)
    return f"hsl({round(130 * (1 - share))} 60% 82%)"
