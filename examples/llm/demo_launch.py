"""Start a DeepSpeed job on CPU ranks, show its progress, and end all its processes whatever happens."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

STALL = 600.0  # seconds without a new line in metrics.jsonl after which a job counts as hung
HEARTBEAT = 15.0  # seconds of silence after which a line says that the job is alive
BUILD = "from deepspeed.accelerator import get_accelerator as a; a().create_op_builder('ShareMemCommBuilder').load()"


class LaunchError(RuntimeError):
    """A job did not end as it should. `log_tail`: the last lines that it wrote."""

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(message)
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        self.log_tail = "\n".join(lines[-25:])


def environment(cache: Path) -> dict[str, str]:
    """The environment of the ranks: CPU, one thread each, private build folder for DeepSpeed's compiled ops."""
    return {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(cache / "torch_extensions"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "TOKENIZERS_PARALLELISM": "false",
    }


def build_ops(cache: Path, console: Console) -> None:
    """Compile the op that DeepSpeed wants at start on CPU, once and in one process: ranks would wait for each other."""
    done = cache / "torch_extensions" / "deepspeed_shm_comm" / "deepspeed_shm_comm.so"
    done.parent.mkdir(parents=True, exist_ok=True)
    with open(cache / "torch_extensions.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (done.parent / "lock").unlink(missing_ok=True)  # left by a killed build; DeepSpeed would wait for it for ever
        if done.is_file():
            return
        console.print("[bold]DeepSpeed[/] compiling its CPU communication op (under a minute, once)")
        log = cache / "build.log"
        with console.status("compiling"), open(log, "w") as out:
            built = subprocess.run([sys.executable, "-c", BUILD], env=environment(cache), stdout=out, stderr=out)
    if built.returncode:
        raise LaunchError(f"DeepSpeed's CPU op did not compile; is a C++ compiler installed? Log: {log}", log)


def launch(
    command: list[str], ranks: int, folder: Path, cache: Path, steps: int, number: tuple[int, int], console: Console
) -> None:
    """Run `deepspeed --num_gpus RANKS COMMAND`, printing a line a step.

    Args:
        command: script and arguments; it writes `<folder>/metrics.jsonl`.
        ranks: processes.
        folder: also gets `log.txt`, what the ranks print.
        cache: folder for compiled ops.
        steps: how many the job makes, for the progress.
        number: (this run, all runs).
        console: where to print.

    Raises:
        LaunchError: the job failed or hung.
    """
    log = folder / "log.txt"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    runner = [str(Path(sys.executable).parent / "deepspeed"), f"--num_gpus={ranks}", f"--master_port={port}"]
    with open(log, "w") as out:
        job = subprocess.Popen(runner + command, stdout=out, stderr=out, env=environment(cache), start_new_session=True)
        try:
            _follow(job, folder / "metrics.jsonl", _Progress(steps, number, console))
        except TimeoutError:
            raise LaunchError(f"No step for {STALL:.0f} s: the job hangs. Log: {log}", log) from None
        finally:
            _end(job)
            _free_shared_memory(port)
    if job.returncode:
        raise LaunchError(f"The job failed with exit code {job.returncode}. Log: {log}", log)


def _free_shared_memory(port: int) -> None:
    """Remove what DeepSpeed's CPU op leaves behind: 69 MB a rank in shared memory, which is main memory."""
    for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        left.unlink(missing_ok=True)


class _Progress:
    """One line a step, and a sign of life in between."""

    def __init__(self, steps: int, number: tuple[int, int], console: Console) -> None:
        self.steps, self.number, self.console = steps, number, console
        self.began = self.spoke = time.monotonic()
        self.first: float | None = None
        self.heldout = ""

    def record(self, record: dict[str, object]) -> None:
        loss = record["loss"]
        shown = f"{loss:.3f}" if isinstance(loss, float) else "not finite"
        step, now = int(str(record["step"])), time.monotonic()
        if record["kind"] == "heldout":
            self.heldout = f"  held-out {shown}"
            return
        self.first = self.first or now
        if step % max(1, self.steps // 20) == 0 or step == self.steps:
            line = f"  run {self.number[0]}/{self.number[1]}  step {step:>3}/{self.steps}  loss {shown}{self.heldout}"
            self.console.print(line + self._left(step, now), highlight=False)
            self.spoke, self.heldout = now, ""

    def _left(self, step: int, now: float) -> str:
        if step < 3 or self.first is None:
            return ""
        pace = (now - self.first) / (step - 1)
        start = self.first - self.began
        left = pace * (self.steps - step) + (self.number[1] - self.number[0]) * (start + pace * self.steps)
        return f"  about {left:.0f} s left" if left < 90 else f"  about {left / 60:.0f} min left"

    def silence(self) -> None:
        now = time.monotonic()
        if now - self.spoke >= HEARTBEAT:
            what = "starting the ranks, loading the model" if self.first is None else "working"
            line = f"  run {self.number[0]}/{self.number[1]}  {what} ({now - self.began:.0f} s)"
            self.console.print(line, style="dim", highlight=False)
            self.spoke = now


def _follow(job: subprocess.Popen[bytes], metrics: Path, progress: _Progress) -> None:
    position, last = 0, time.monotonic()
    while True:
        ended = job.poll() is not None
        if metrics.is_file():
            with open(metrics, "rb") as file:
                file.seek(position)
                whole, newline, _ = file.read().rpartition(b"\n")
            for line in whole.splitlines():
                progress.record(json.loads(line))
                last = time.monotonic()
            position += len(whole) + len(newline)
        if ended:
            return
        if time.monotonic() - last > STALL:
            raise TimeoutError
        progress.silence()
        time.sleep(0.3)


def _end(job: subprocess.Popen[bytes]) -> None:
    """Terminate the launcher and its ranks; kill what is left after ten seconds."""
    for sign, wait in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(job.pid, sign)
        except ProcessLookupError:
            break
        end = time.monotonic() + wait
        while time.monotonic() < end and _alive(job.pid):
            job.poll()
            time.sleep(0.1)
    job.wait()


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
