"""What happened since the last optimizer step, gathered bucket by bucket."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ds_byzantine.monitor.events import StepEvent
from ds_byzantine.monitor.locate import concentrated

ELSEWHERE = "a tensor at another rank"


class Tally:
    """What one rank knows of one reduction.

    Args:
        replicas: n.
    """

    def __init__(self, replicas: int) -> None:
        self.distances = torch.zeros(replicas, dtype=torch.float64)  # squared, known alike on all its ranks
        self.own_distances = torch.zeros(replicas, dtype=torch.float64)  # of this rank's chunks: to be summed
        self.nonfinite = torch.zeros(replicas, dtype=torch.float64)
        self.unsafe: dict[str, list[int]] = {}

    def saw(self, finite_N: Tensor) -> None:
        """Count the rows of a tensor that were not finite."""
        self.nonfinite += ~finite_N

    def is_unsafe(self, tensor: str, finite_N: Tensor) -> None:
        """Note that a tensor has too many rows that were not finite: its aggregate is NaN."""
        self.unsafe[tensor] = (~finite_N).nonzero()[:, 0].tolist()

    def own(self) -> Tensor:
        """What this rank knows for its own chunks only, as numbers to be summed over the ranks: [2n + 1] float64."""
        return torch.cat([self.own_distances, self.nonfinite, torch.tensor([float(len(self.unsafe))]).double()])

    def take(self, sums: Tensor, *, flags: bool) -> None:
        """Take over the sums of all ranks' `own`; of the flags too, if this rank did not know those of all chunks."""
        n = self.distances.numel()
        self.own_distances = sums[:n]
        if flags:
            self.nonfinite = sums[n : 2 * n]
            self._found_unsafe(sums[-1])

    def totals(self) -> Tensor:
        """What all ranks of the reduction know alike after `take`: [2n + 1] float64, laid out as `own`."""
        unsafe = torch.tensor([float(len(self.unsafe))]).double()
        return torch.cat([self.distances + self.own_distances, self.nonfinite, unsafe])

    def _found_unsafe(self, count: Tensor) -> None:
        if count > 0 and not self.unsafe:
            self.unsafe[ELSEWHERE] = self.nonfinite.nonzero()[:, 0].tolist()


class Recorder:
    """Sums over the buckets of one step.

    Args:
        replicas: n.
        kinds: reductions in which this rank takes part.
    """

    def __init__(self, replicas: int, kinds: int = 1) -> None:
        self.replicas = replicas
        self.kinds = kinds
        self.reset()

    def reset(self) -> None:
        """Start a new step."""
        self.tallies = [Tally(self.replicas) for _ in range(self.kinds)]
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

    def event(
        self,
        step: int,
        totals: Mapping[tuple[int, int], Tensor],
        sent: int,
        *,
        measured: bool,
        ranks: Mapping[tuple[int, int], tuple[tuple[int, ...], ...]],
    ) -> StepEvent:
        """The finished step.

        Args:
            step: its number.
            totals: of all reductions of the job (see `Tally.totals`), by (kind, name); the same on all ranks.
            sent: bytes.
            measured: whether distances were measured in this step.
            ranks: for each reduction and replica, the global ranks that take part.
        """
        n = self.replicas
        total = torch.stack([totals[key] for key in sorted(totals)]).sum(0)
        nonfinite = [int(count) for count in total[n : 2 * n]]
        dropped = [i for i, count in enumerate(nonfinite) if count]
        distances = [float(d) ** 0.5 if measured and i not in dropped else None for i, d in enumerate(total[:n])]
        ranked = [(d, -i) for i, d in enumerate(distances) if d is not None]
        suspect = -max(ranked)[1] if ranked and max(ranked)[0] > 0 else None
        if dropped:
            suspect = dropped[0]
        signs = {key: one[n : 2 * n] if dropped else one[:n] for key, one in totals.items()}
        return StepEvent(
            step=step,
            kept=[i for i in range(n) if i not in dropped],
            dropped=dropped,
            nonfinite=nonfinite,
            distances=distances,
            suspect=suspect,
            suspect_ranks=[] if suspect is None else concentrated(signs, suspect, ranks),
            unsafe=self._unsafe(total, dropped),
            bytes=sent,
            stock_bytes=self.stock_bytes,
            exchange_ms=round(self.milliseconds["exchange"], 3),
            rule_ms=round(self.milliseconds["rule"], 3),
        )

    def _unsafe(self, total: Tensor, dropped: list[int]) -> dict[str, list[int]]:
        """The tensors that this rank knows to be unsafe; if only others know of some, a word that stands for theirs."""
        found = {tensor: lost for tally in self.tallies for tensor, lost in tally.unsafe.items()}
        if total[-1] > 0 and not found:
            found[ELSEWHERE] = dropped
        return dict(sorted(found.items()))
