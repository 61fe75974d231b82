"""Start a world of real processes that runs a table of jobs, and collect the results."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment(**extra: str) -> dict[str, str]:
    """The environment of a rank: one thread, CPU, the package importable, no warnings of other libraries."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **extra,
    }


def run_world(
    jobs: list[dict],
    ranks: int,
    timeout: float = 600,
    env: dict[str, str] | None = None,
    each: Callable[[int], dict[str, str]] = lambda rank: {},
) -> dict[str, list]:
    """Run the jobs one after the other in one world of `ranks` processes.

    Args:
        env: added to the environment of every rank; `each` gives what one rank has beside it.

    Returns:
        job name -> the results of all ranks; a job that did not end has an "error" and the end of stderr as "trace".
    """
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "jobs.json"
        table.write_text(json.dumps(jobs))
        port = str(free_port())
        processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "worker.py"), str(table), folder],
                env=environment(
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(ranks),
                    LOCAL_SIZE=str(ranks),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=port,
                    **(env or {}),
                    **each(rank),
                ),
                start_new_session=True,
                stdout=None if rank == 0 else subprocess.DEVNULL,
                stderr=(Path(folder) / f"stderr{rank}").open("w"),
            )
            for rank in range(ranks)
        ]
        late = _wait(processes, timeout)
        found: dict[str, list] = {}
        for job in jobs:
            files = [Path(folder) / f"{job['name']}.rank{rank}.pt" for rank in range(ranks)]
            what = f"the world was killed after {timeout:.0f} s" if late else "the world ended"
            found[job["name"]] = [
                torch.load(file, weights_only=False) if file.exists() else {"error": what, "trace": _tail(folder, rank)}
                for rank, file in enumerate(files)
            ]
        return found


def _tail(folder: str, rank: int) -> str:
    return (Path(folder) / f"stderr{rank}").read_text()[-2000:]


def _wait(processes: list[subprocess.Popen], timeout: float) -> bool:
    """Wait for all; kill all when one fails or the time is over. Whether the time was over."""
    import time

    end = time.monotonic() + timeout
    while time.monotonic() < end:
        codes = [p.poll() for p in processes]
        if all(code is not None for code in codes):
            return False
        if any(code not in (None, 0) for code in codes):
            time.sleep(5)  # let the others write what they have
            break
        time.sleep(0.2)
    late = time.monotonic() >= end
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return late
