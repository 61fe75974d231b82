"""Start a script as a user would, with the `deepspeed` or `accelerate` command, and clean up behind it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from world import ROOT, environment, free_port

SHM = "from deepspeed.accelerator import get_accelerator as a; a().create_op_builder('ShareMemCommBuilder').load()"
CACHE = ROOT / ".cache" / "torch_extensions"
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Ended:
    """A launch that came to its end: exit code, and stdout and stderr of all ranks."""

    code: int
    output: str


def build_op() -> None:
    """The op that DeepSpeed wants at start on CPU: built once in one process, or the ranks wait for each other."""
    if (CACHE / "deepspeed_shm_comm" / "deepspeed_shm_comm.so").is_file():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / "deepspeed_shm_comm" / "lock").unlink(missing_ok=True)
    subprocess.run([sys.executable, "-c", SHM], env=_env(), check=True, timeout=600, capture_output=True)


def deepspeed(ranks: int, script: list[str], timeout: float = 240) -> Ended:
    """`deepspeed --num_gpus RANKS SCRIPT...`, to the end."""
    port = free_port()
    return _run([str(BIN / "deepspeed"), "--num_gpus", str(ranks), "--master_port", str(port), *script], port, timeout)


def accelerate(ranks: int, config: Path, script: list[str], timeout: float = 240) -> Ended:
    """`accelerate launch --use_deepspeed ... SCRIPT...` with a DeepSpeed JSON, to the end."""
    port = free_port()
    options = ["--use_deepspeed", "--deepspeed_config_file", str(config), "--num_machines", "1"]
    world = ["--num_processes", str(ranks), "--main_process_port", str(port)]
    return _run([str(BIN / "accelerate"), "launch", *options, *world, *script], port, timeout)


def steps(log: Path) -> list[dict]:
    """The step events in a folder that `monitor.dir` named."""
    lines = [json.loads(line) for line in (log / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


def _env() -> dict[str, str]:
    path = os.pathsep.join([str(BIN), os.environ.get("PATH", "")])
    return environment(TORCH_EXTENSIONS_DIR=str(CACHE), PATH=path)


def _run(command: list[str], port: int, timeout: float) -> Ended:
    """Run to the end; at the time-out kill all and fail. `port`: the master's."""
    process = subprocess.Popen(
        command, env=_env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output = process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
        pytest.fail(f"hung: {' '.join(command)}\n{output[-3000:]}")
    finally:  # DeepSpeed's CPU op leaves 69 MB a rank in shared memory
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            left.unlink(missing_ok=True)
    return Ended(process.returncode, output)
