"""What happened since the last optimizer step, gathered bucket by bucket."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ds_byzantine.monitor.events import StepEvent


class Recorder:
    """Sums over the buckets of one step.

    Args:
        replicas: n.
    """

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.reset()

    def reset(self) -> None:
        """Start a new step."""
        self.global_distances = torch.zeros(self.replicas, dtype=torch.float64)  # known alike on all ranks
        self.local_distances = torch.zeros(self.replicas, dtype=torch.float64)  # of this rank's chunks: to be summed
        self.nonfinite = [0] * self.replicas
        self.unsafe: dict[str, list[int]] = {}
        self.tensors: set[str] = set()
        self.stock_bytes = 0
        self.milliseconds = {"exchange": 0.0, "rule": 0.0}

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the wall-clock time of the block to `what` ("exchange" or "rule")."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.milliseconds[what] += (time.perf_counter() - start) * 1e3

    def saw(self, tensor: str, finite_N: Tensor, f: int) -> None:
        """Note which rows of a tensor were finite."""
        self.tensors.add(tensor)
        lost = (~finite_N).nonzero()[:, 0].tolist()
        for replica in lost:
            self.nonfinite[replica] += 1
        if len(lost) > f:
            self.unsafe[tensor] = lost

    def own(self) -> Tensor:
        """What this rank knows for its own chunks only, as numbers to be summed over the ranks: [2n + 1] float64."""
        return torch.cat([self.local_distances, torch.tensor([*self.nonfinite, len(self.unsafe)]).double()])

    def take(self, sums: Tensor, *, flags: bool) -> None:
        """Take over the sums of all ranks' `own`; of the flags too, if this rank did not know those of all chunks."""
        n = self.replicas
        self.local_distances = sums[:n]
        if not flags:
            return
        self.nonfinite = [int(count) for count in sums[n : 2 * n]]
        if sums[-1] > 0 and not self.unsafe:
            self.unsafe["a piece at another rank"] = [i for i, count in enumerate(self.nonfinite) if count]

    def event(self, step: int, distances_N: Tensor | None, sent: int) -> StepEvent:
        """The finished step. `distances_N`: squared, summed over all chunks, None if not measured; `sent`: bytes."""
        dropped = [i for i, count in enumerate(self.nonfinite) if count]
        known = [None] * self.replicas if distances_N is None else [float(d) ** 0.5 for d in distances_N]
        usable: list[float | None] = [None if i in dropped else d for i, d in enumerate(known)]
        ranked = [(d, -i) for i, d in enumerate(usable) if d is not None]
        suspect = -max(ranked)[1] if ranked and max(ranked)[0] > 0 else None
        return StepEvent(
            step=step,
            kept=[i for i in range(self.replicas) if i not in dropped],
            dropped=dropped,
            nonfinite=list(self.nonfinite),
            distances=usable,
            suspect=dropped[0] if dropped else suspect,
            unsafe=dict(sorted(self.unsafe.items())),
            bytes=sent,
            stock_bytes=self.stock_bytes,
            exchange_ms=round(self.milliseconds["exchange"], 3),
            rule_ms=round(self.milliseconds["rule"], 3),
        )
