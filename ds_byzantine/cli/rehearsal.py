"""Rehearsals: what an attack does to a clean run, to the mean and to the rule, in one launched world. No torch."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_byzantine.attacks.catalog import ATTACKS
from ds_byzantine.cli.output import read_json
from ds_byzantine.cli.ranks import started
from ds_byzantine.config import parse_section
from ds_byzantine.errors import ByzantineError, HostStateError
from ds_byzantine.plan import plan, rules_that_fit

STEPS, STAGE, RATE, SEED = 40, 2, 0.2, 0
TOLERANCE = 0.10
AFTER_NNM = ("geometric_median", "median", "trimmed_mean")
ASIDE = ("label_flip",)  # a hook for data, not for gradients

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Cell:
    """One attack on one rule.

    Args:
        rule: names of the pre-aggregations and of the rule, joined by "+".
        attack: its name; "none" for the rule without an attack.
        f: bad replicas, and what the rule was told to tolerate (the mean: 0).
        clean: loss of stock DeepSpeed without an attack.
        loss: loss under attack.
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
        """How much larger the loss is than that of the clean run, as a share of the size of that one."""
        if self.clean == 0.0:
            return 0.0 if self.loss == 0.0 else math.copysign(math.inf, self.loss)
        return (self.loss - self.clean) / abs(self.clean)

    @property
    def held(self) -> bool:
        """Whether the loss stayed within `TOLERANCE` of the clean one (false for NaN)."""
        return self.excess <= TOLERANCE


def table_for(
    drills: Sequence[Any],
    rules: Sequence[str],
    n: int,
    faulty: Sequence[int],
    *,
    controls: bool = False,
    **options: Any,
) -> list[dict[str, Any]]:
    """The runs of a rehearsal: clean, and every rule under every drill; bad are the last f replicas unless it says.

    Args:
        drills: as the "drill" key of the section takes them.
        rules: names; "nnm+median" is the median after the pre-aggregation nnm; "mean" runs with f=0, as the comparison.
        n: replicas.
        faulty: numbers of bad replicas. With more than one of them rules that do not hold for f are left out there.
        controls: every rule without an attack too.
        options: steps, stage, lr, seed of all runs.

    Raises:
        InfeasibleError: a rule does not hold for n and f.
    """
    base = {"ranks": n, "steps": STEPS, "stage": STAGE, "lr": RATE, "seed": SEED, **options}
    runs: list[dict[str, Any]] = [{**base, "name": "clean"}]
    for rule in rules:
        if rule != "mean":
            parse_section(section_for(rule))  # an unknown name is refused here, one that does not hold for f below
    for f in faulty:
        kept = [rule for rule in rules if len(faulty) == 1 or _holds(rule, n, f)]
        for drill in [*([None] if controls else []), *drills]:
            for rule in kept:
                if drill is None and rule == "mean":
                    continue  # that is the clean run
                section = {**section_for(rule), "f": 0 if rule == "mean" else f}
                if drill is not None:
                    section["drill"] = on_last(spec_of(drill), n, max(f, 1))
                plan(parse_section(section), n, stage=base["stage"])
                runs.append({**base, "name": f"{rule}-f{f}-{_label(drill)}", "section": section, "bad": f})
    return runs


def section_for(rule: str) -> dict[str, Any]:
    """The keys of the section for "median" or "nnm+median"."""
    *pre, last = rule.split("+")
    return {"rule": last, "pre": pre}


def spec_of(drill: Any) -> dict[str, Any]:
    """The object behind the name of an attack, a .json file or an object.

    Raises:
        ByzantineError: no such file.
    """
    if not isinstance(drill, str):
        return dict(drill)
    if not drill.endswith(".json"):
        return {"name": drill}
    path = Path(drill)
    if not path.is_file():
        raise ByzantineError(f"drill: no such file: {drill}. Give the name of an attack or an existing JSON file.")
    return read_json(path)


def on_last(spec: Mapping[str, Any], n: int, count: int) -> dict[str, Any]:
    """The drill with its bad replicas spelled out: the last `count` of n where it does not say."""
    return {"replicas": list(range(n - count, n)), **spec}


def every_attack() -> list[str]:
    """Names of the attacks on gradients."""
    return [name for name in sorted(ATTACKS) if name not in ASIDE]


def every_rule(n: int, faulty: Sequence[int]) -> list[str]:
    """The mean, the rules that hold for n replicas with one of these numbers of bad ones, and nnm before some."""
    fitting = {rule for f in faulty for rule in rules_that_fit(n, f)} - {"mean"}
    return ["mean", *sorted(fitting), *(f"nnm+{rule}" for rule in AFTER_NNM)]


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


def cells(results: Mapping[str, Mapping[str, Any]]) -> list[Cell]:
    """What each attack did to each rule."""
    clean = float(results["clean"]["held_out"])
    return [_cell(one, clean) for name, one in results.items() if name != "clean"]


def judged(named: Sequence[Sequence[Any]], bad: Sequence[int]) -> tuple[int | None, tuple[int, ...]]:
    """From [step, replica, evidence] of all verdicts: when a bad replica was named, and which healthy ones were.

    A copy and its original are both named, for the rows cannot say which is which.
    """
    steps = [step for step, replica, _ in named if replica in bad]
    wrong = tuple(replica for _, replica, kind in named if replica not in bad and kind != "duplicate")
    return min(steps) if steps else None, wrong


def _cell(found: Mapping[str, Any], clean: float) -> Cell:
    section = found["section"]
    drill = section.get("drill") or {"name": "none", "replicas": []}
    named, wrong = judged(found["named"], drill["replicas"])
    rule = "+".join([*section.get("pre", []), section["rule"]])
    return Cell(rule, drill["name"], int(found["bad"]), clean, float(found["held_out"]), named, wrong)


def _results(out: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    return {name: json.loads((out / f"{name}.json").read_text(encoding="utf-8")) for name in names}


def _holds(rule: str, n: int, f: int) -> bool:
    return rule == "mean" or rule.split("+")[-1] in rules_that_fit(n, f)


def _label(drill: Any) -> str:
    if drill is None:
        return "none"
    if isinstance(drill, str):
        return Path(drill).stem if drill.endswith(".json") else drill
    return str(drill.get("name", "drill"))
