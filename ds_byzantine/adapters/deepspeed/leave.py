""" "on_suspect": "checkpoint_exit": save, write verdict.json and end all ranks with one exit code.

The verdict is reached inside the optimizer step, alike on all ranks. The checkpoint is written when the host's step
has returned, so that all its counters agree.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_byzantine.adapters._patch import Bindings
from ds_byzantine.monitor.events import SCHEMA, VerdictEvent

logger = logging.getLogger("ds_byzantine")

EXIT_CODE = 86  # unused by the shell, by signals (128 + n) and by sysexits.h (64 to 78)


class Leave:
    """Ends the job after a verdict.

    Args:
        engine: the host's engine.
        directory: `monitor.dir`; the checkpoint goes into its folder "checkpoint".
    """

    def __init__(self, engine: Any, directory: str) -> None:
        self.engine = engine
        self.directory = Path(directory)
        self.pending: list[VerdictEvent] = []

    def bind(self, bindings: Bindings) -> None:
        """Look for a verdict after each `step`, or `train_batch` of a pipeline."""
        name = "train_batch" if getattr(self.engine, "pipeline_parallelism", False) else "step"
        bindings.bind(self.engine, name, self._then_leave(getattr(self.engine, name)))

    def _then_leave(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self.pending:
                self.leave()
            return result

        return step

    def leave(self) -> None:
        """Save a checkpoint and the verdict and end the process; a collective call.

        Raises:
            SystemExit: with `EXIT_CODE`, always.
        """
        tag = f"global_step{int(self.engine.global_steps)}"
        self.engine.save_checkpoint(str(self.directory / "checkpoint"), tag=tag)
        if dist.get_rank() == 0:
            self._write(tag)
            for verdict in self.pending:
                logger.error(
                    "%s. The job ends with exit code %d; checkpoint %s/checkpoint/%s, verdict %s/verdict.json. Drain "
                    "%s, then resume from the checkpoint.",
                    verdict.why, EXIT_CODE, self.directory, tag, self.directory, " and ".join(verdict.hosts),
                )  # fmt: skip
        dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        dist.destroy_process_group()  # gloo may abort in the interpreter's exit otherwise, with another code
        raise SystemExit(EXIT_CODE)

    def _write(self, tag: str) -> None:
        found = {
            "schema": SCHEMA,
            "exit_code": EXIT_CODE,
            "checkpoint": str(self.directory / "checkpoint"),
            "tag": tag,
            "verdicts": [asdict(verdict) for verdict in self.pending],
        }
        path = self.directory / "verdict.json"
        path.with_suffix(".part").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        path.with_suffix(".part").replace(path)
