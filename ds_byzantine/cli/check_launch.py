"""Start real ranks on this machine and compare the rule "mean" with stock DeepSpeed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ds_byzantine.cli.check_installed import Finding

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
    port = _free_port()
    log = folder / "output.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            _command(ranks, port, stages, folder),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=_environment(ranks),
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"not done after {timeout:.0f} s and killed. {_tail(log)}"
        finally:
            _end(process)
            for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
                left.unlink(missing_ok=True)
    return "" if code == 0 else f"the ranks failed with exit code {code}. {_tail(log)}"


def _command(ranks: int, port: int, stages: Sequence[int], folder: Path) -> list[str]:
    """The `deepspeed` launcher; torchrun where it is missing."""
    arguments = [str(folder), ",".join(map(str, stages))]
    launcher = shutil.which("deepspeed", path=os.pathsep.join([_bin(), os.environ.get("PATH", "")]))
    if launcher is not None:
        options = [f"--num_gpus={ranks}", f"--master_port={port}", f"--hostfile={folder / 'none'}", "--module"]
        return [launcher, *options, WORKER, *arguments]
    options = [f"--nproc_per_node={ranks}", f"--master_port={port}", "-m"]
    return [sys.executable, "-m", "torch.distributed.run", *options, WORKER, *arguments]


def _environment(ranks: int) -> dict[str, str]:
    env = {**os.environ, "PATH": os.pathsep.join([_bin(), os.environ.get("PATH", "")])}
    env.setdefault("OMP_NUM_THREADS", "1")
    import torch

    if torch.cuda.device_count() < ranks and not torch.xpu.device_count():
        env["DS_ACCELERATOR"] = "cpu"
    return env


def _bin() -> str:
    return str(Path(sys.executable).parent)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "Last lines:\n" + "\n".join(lines[-12:]) if lines else "They printed nothing."


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and all that it started."""
    for sign, wait in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        end = time.monotonic() + wait
        try:
            os.killpg(process.pid, sign)
            while time.monotonic() < end:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.1)
        except (ProcessLookupError, PermissionError):
            break
    process.wait()
