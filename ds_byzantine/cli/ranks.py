"""Start ranks on this machine with a module of ours, and end them: shared by the commands that launch."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ds_byzantine._names import REHEARSAL


@contextmanager
def started(
    program: str, arguments: Sequence[str], ranks: int, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Real ranks that run a program, until the block is left in whatever way; then nothing of them is left behind.

    Args:
        program: a module, run as `python -m` would, or the path of a script; by the `deepspeed` launcher or, where
            it is missing, by torchrun.
        arguments: of the program.
        ranks: processes on this machine.
        log: takes what they print.
        environment: variables to add.
    """
    port = _free_port()
    with log.open("w") as out:
        process = subprocess.Popen(
            _command(program, arguments, ranks, port, log.parent),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**_environment(ranks), **(environment or {})},
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _end(process)
            for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
                left.unlink(missing_ok=True)


def tail(log: Path) -> str:
    """The last lines that the ranks printed."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "Last lines:\n" + "\n".join(lines[-12:]) if lines else "They printed nothing."


def _command(program: str, arguments: Sequence[str], ranks: int, port: int, folder: Path) -> list[str]:
    script = Path(program).is_file()
    launcher = shutil.which("deepspeed", path=os.pathsep.join([_bin(), os.environ.get("PATH", "")]))
    if launcher is not None:
        options = [f"--num_gpus={ranks}", f"--master_port={port}", f"--hostfile={folder / 'none'}"]
        return [launcher, *options, *([] if script else ["--module"]), program, *arguments]
    options = [f"--nproc_per_node={ranks}", f"--master_port={port}", *([] if script else ["-m"])]
    return [sys.executable, "-m", "torch.distributed.run", *options, program, *arguments]


def _environment(ranks: int) -> dict[str, str]:
    env = {**os.environ, "PATH": os.pathsep.join([_bin(), os.environ.get("PATH", "")])}
    env.setdefault("OMP_NUM_THREADS", "1")
    env.pop(REHEARSAL, None)  # of a rehearsal that this command is not
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
