"""A rehearsal with the user's own script: clean, attacked with the mean, and attacked with its rule. No torch."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from ds_byzantine._names import REHEARSAL
from ds_byzantine.cli.ranks import started, tail
from ds_byzantine.cli.rehearsal import Cell, judged, on_last, section_for, spec_of
from ds_byzantine.config import parse_section
from ds_byzantine.drills.scenario import DrillConfig
from ds_byzantine.errors import ConfigError, HostStateError
from ds_byzantine.report.read import EVENTS, Reader, Story, read

TAIL = 0.1  # share of the steps, the last ones, over which the loss is averaged
PLACE = "{run}"  # in the script's arguments: the folder of this of the three runs
STOCK: dict[str, Any] = {"rule": "mean", "f": 0, "pre": [], "scope": "tensor", "on_suspect": "log", "drill": None}

KEYS, DONE = "section.json", "done.json"
LATE = "was stopped after"

Tell = Callable[[str, int], None]


@dataclass(frozen=True)
class Script:
    """What to launch.

    Args:
        path: of the script.
        arguments: of the script; "{run}" in them becomes the folder of the run.
        ranks: processes on this machine.
        out: folder for the runs clean, mean and rule; what is there already is not run again.
        timeout: seconds for each run.
    """

    path: Path
    arguments: tuple[str, ...]
    ranks: int
    out: Path
    timeout: float


@dataclass(frozen=True)
class Ran:
    """What one run of the script left behind.

    Args:
        loss: mean training loss of the first replica over the last tenth of the steps; NaN if it was not finite.
        steps: optimizer steps.
        replicas, f: as the job settled them.
        rule: as the job settled it.
        named: [step, replica, evidence] of the verdicts.
    """

    loss: float
    steps: int
    replicas: int
    f: int
    rule: str
    named: tuple[tuple[int, int, str], ...]


def rehearse(script: Script, drill: Any, rule: str | None, f: int | None, tell: Tell) -> tuple[Ran, list[Cell]]:
    """Launch the script three times and compare.

    The mean goes last: only a run with the section's own rule tells how many replicas it takes to be bad.

    Args:
        drill: as the "drill" key of the section takes it.
        rule: in place of the section's; "nnm+median" is the median after nnm.
        f: in place of the section's.
        tell: called with the name of the run and its optimizer steps so far.

    Returns:
        The clean run; what the attack did to the mean and to the rule.

    Raises:
        HostStateError: the script failed, or ended without a step or a loss; names the log.
    """
    spec = spec_of(drill)
    DrillConfig.load(spec)
    if rule is not None:
        parse_section(section_for(rule))
    own: dict[str, Any] = {} if rule is None else section_for(rule)
    if f is not None:
        own["f"] = f
    clean = _run(script, "clean", STOCK, tell)
    held = _run(script, "rule", {**own, "drill": spec}, tell)
    if held.rule == "mean":
        raise ConfigError(
            "drill: the rule of the script's section is the mean itself. Name the rule to try with --rule."
        )
    attack = on_last(spec, held.replicas, max(held.f, 1))
    mean = _run(script, "mean", {**STOCK, "drill": attack}, tell, may_fail=True)
    return clean, [_cell(one, name, attack, held.f, clean.loss) for one, name in ((mean, "mean"), (held, held.rule))]


def _cell(ran: Ran, rule: str, attack: Mapping[str, Any], f: int, clean: float) -> Cell:
    named, wrong = judged(ran.named, attack["replicas"])
    return Cell(rule, str(attack["name"]), f, clean, ran.loss, named, wrong)


def _run(script: Script, name: str, keys: Mapping[str, Any], tell: Tell, *, may_fail: bool = False) -> Ran:
    folder = script.out / name
    request = {**keys, "monitor": {"dir": str(folder.resolve())}}
    wanted = {
        "script": _digest(script.path),
        "arguments": list(script.arguments),
        "ranks": script.ranks,
        "keys": request,
    }
    wanted["files"] = {one: _digest(Path(one)) for one in script.arguments if Path(one).is_file()}
    stamp = folder / DONE
    failed = _found(stamp, wanted)
    if failed is not None:
        return _ran(folder, failed=bool(failed))
    failed = _launch(script, folder, request, lambda steps: tell(name, steps))
    if failed and (not may_fail or not (folder / EVENTS).exists() or failed.startswith(LATE)):
        raise HostStateError(f"drill: the {name} run of {script.path} {failed}. {tail(folder / 'launch.log')}")
    ran = _ran(folder, failed=bool(failed))  # raises if there is nothing to compare: then it is run again next time
    part = stamp.with_suffix(".part")
    part.write_text(json.dumps({**wanted, "failed": failed}, indent=1), encoding="utf-8")
    part.replace(stamp)
    return ran


def _launch(script: Script, folder: Path, request: Mapping[str, Any], tell: Callable[[int], None]) -> str:
    """Run the script to its end. Returns what went wrong, or nothing."""
    keys = folder / KEYS
    if folder.exists() and any(folder.iterdir()) and not keys.is_file():
        raise ConfigError(f"drill: {folder} holds something else already. Name another folder with --out.")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    keys.write_text(json.dumps(request, indent=1), encoding="utf-8")
    arguments = [one.replace(PLACE, str(folder)) for one in script.arguments]
    environment = {REHEARSAL: str(keys.resolve())}
    reader, end = Reader(folder / EVENTS), time.monotonic() + script.timeout
    with started(str(script.path), arguments, script.ranks, folder / "launch.log", environment) as process:
        while process.poll() is None and time.monotonic() < end:
            if reader.path.exists() and reader.poll():
                tell(_steps(reader.story))
            time.sleep(0.5)
        if process.poll() is None:
            return f"{LATE} {script.timeout:.0f} s"
    return f"ended with exit code {process.returncode}" if process.returncode else ""


def _ran(folder: Path, *, failed: bool) -> Ran:
    log = folder / "launch.log"
    if not (folder / EVENTS).exists():
        raise HostStateError(
            f"drill: the script ended, but nothing was aggregated in it: does it call deepspeed.initialize? {tail(log)}"
        )
    story = read(folder)
    steps = [story.segments[-1].steps[k] for k in sorted(story.segments[-1].steps)]
    run = story.segments[-1].run
    if not steps or run.replicas < 2:
        raise HostStateError(
            f"drill: the script ended after {len(steps)} aggregated steps on {run.replicas} replicas; a rehearsal "
            f"needs at least one step and two replicas. {tail(log)}"
        )
    losses = [step.loss for step in steps]
    if all(math.isnan(loss) for loss in losses):
        raise HostStateError(
            "drill: no loss went through engine.backward (the pipeline engine has none), so the runs cannot be "
            f"compared. The events are in {folder}; `ds-byzantine report` shows them."
        )
    last = losses[-max(1, round(TAIL * len(losses))) :]
    return Ran(
        math.nan if failed else sum(last) / len(last),
        len(steps),
        run.replicas,
        run.f or 0,
        run.rule.replace(" ", ""),
        tuple((verdict.step, verdict.replica, verdict.kind) for verdict, _ in story.verdicts),
    )


def _steps(story: Story) -> int:
    return len(story.segments[-1].steps) if story.segments else 0


def _found(stamp: Path, wanted: Mapping[str, Any]) -> str | None:
    """How exactly this run ended when it was made; None if it was not."""
    try:
        found = json.loads(stamp.read_text(encoding="utf-8"))
        failed = str(found.pop("failed"))
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return failed if found == json.loads(json.dumps(wanted)) else None


def _digest(path: Path) -> str:
    """Where a file lies and what is in it."""
    return f"{path.resolve()} {sha256(path.read_bytes()).hexdigest()}"
