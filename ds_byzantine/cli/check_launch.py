"""Start real ranks on this machine and compare the rule "mean" with stock DeepSpeed."""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ds_byzantine.cli.check_installed import Finding
from ds_byzantine.cli.ranks import started, tail

WORKER = "ds_byzantine.cli.check_worker"

TOLERANCE = 1e-5  # largest difference of a weight over the largest change of a weight: float32 sums in another order

STEPS = 2


def compare(ranks: int, timeout: float, stages: Sequence[int] = (0, 1, 2, 3)) -> list[Finding]:
    """Train a tiny model twice for each ZeRO stage: stock, and with `"rule": "mean", "f": 0`.

    Args:
        ranks: processes on this machine.
        timeout: seconds; then all of them are killed.
        stages: ZeRO stages.
    """
    with tempfile.TemporaryDirectory(prefix="ds-byzantine-check-") as folder:
        began = time.monotonic()
        problem = _launch(ranks, timeout, stages, Path(folder))
        found = [_finding(stage, ranks, Path(folder)) for stage in stages]
        if problem:
            done = [one for one in found if one.status != "SKIP"]
            fix = "see the last lines above; run the script of your job with stock DeepSpeed first"
            return [*done, Finding("FAIL", "launch", problem, fix)]
        took = f"{ranks} ranks, {STEPS} steps, {time.monotonic() - began:.0f} s"
        return [*found, Finding("OKAY", "launch", took)]


def judge(stage: int, results: Sequence[dict[str, object]]) -> Finding:
    """What the ranks found for one stage.

    Args:
        results: by rank: "error", or "difference", "change" (of the weights), "bound" and "stock_bound".
    """
    what = f"ZeRO-{stage}: mean equals stock"
    errors = [f"rank {rank}: {r['error']}" for rank, r in enumerate(results) if r.get("error")]
    if errors:
        return Finding("FAIL", what, errors[0], "train with stock DeepSpeed first; if that works, report this")
    if not all(r["bound"] for r in results):
        return Finding(
            "FAIL", what, "the section did not take effect", "call ds_byzantine.install() before initialize()"
        )
    if any(r["stock_bound"] for r in results):
        return Finding("FAIL", what, "an engine without a section was changed", "report this")
    differences = [float(str(r["difference"])) for r in results]
    worst = math.nan if any(map(math.isnan, differences)) else max(differences)  # max() would step over a NaN
    change = min(float(str(r["change"])) for r in results)
    if not change > 0:
        return Finding("FAIL", what, "the weights did not change, so nothing was compared", "report this")
    share = worst / change
    detail = f"largest difference {share:.1e} of the largest change, allowed {TOLERANCE:.0e}"
    if share <= TOLERANCE:
        return Finding("OKAY", what, detail)
    return Finding("FAIL", what, detail, "do not train with this combination; report it with `ds-byzantine env`")


def _finding(stage: int, ranks: int, folder: Path) -> Finding:
    files = [folder / f"stage{stage}.rank{rank}.json" for rank in range(ranks)]
    if not all(file.is_file() for file in files):
        return Finding("SKIP", f"ZeRO-{stage}", "not reached")
    found = judge(stage, [json.loads(file.read_text()) for file in files])
    if found.status == "OKAY" and not _recorded(folder / f"log{stage}"):
        return Finding("FAIL", found.what, f"events.jsonl does not hold the {STEPS} steps", "is the disk full?")
    return found


def _recorded(log: Path) -> bool:
    """Whether rank 0 wrote every step."""
    from ds_byzantine.report.read import read

    story = read(log)
    return [sorted(segment.steps) for segment in story.segments] == [list(range(STEPS))]


def _launch(ranks: int, timeout: float, stages: Sequence[int], folder: Path) -> str:
    """Run the ranks to their end. Returns what went wrong, or nothing."""
    log = folder / "output.txt"
    with started(WORKER, [str(folder), ",".join(map(str, stages))], ranks, log) as process:
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"not done after {timeout:.0f} s and killed. {tail(log)}"
    return "" if code == 0 else f"the ranks failed with exit code {code}. {tail(log)}"
