"""One rank of a launched world: runs a table of training jobs in one process and leaves their results in a folder.

`worker.py JOBS_JSON RESULTS_DIR`; rank and world come from the environment that the launcher sets. Starting a rank
costs 10 to 20 s of imports, so one world runs many jobs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def main(jobs_file: str, results: str) -> None:
    import deepspeed

    torch.set_num_threads(1)
    # The CPU shared-memory all-reduce is JIT-built at the first init and used by inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False, timeout=timedelta(seconds=90))
    rank = torch.distributed.get_rank()
    for job in json.loads(Path(jobs_file).read_text()):
        path = Path(results) / f"{job['name']}.rank{rank}.pt"
        try:
            outcome = run(job)
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        torch.save(outcome, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        if rank == 0:
            print(f"[world] {job['name']}: {outcome.get('error') or 'done'}"[:300], flush=True)


def run(job: dict) -> dict:
    """Run one job: function `kind` of `module`; the keys of a training job are listed in jobs.py."""
    module = importlib.import_module(job.get("module", "jobs"))
    return getattr(module, job.get("kind", "train"))(job)


@contextmanager
def quiet_exit():
    """gloo aborts now and then at interpreter exit, after all results are out: leave without the destructors."""
    code = 0
    try:
        yield
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    arguments = [a for a in sys.argv[1:] if not a.startswith("--local_rank")]
    with quiet_exit():
        main(*arguments)
