"""What happened since the last optimizer step, gathered bucket by bucket."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ds_byzantine.monitor.events import StepEvent
from ds_byzantine.monitor.locate import Key, concentrated
from ds_byzantine.monitor.regime import Regime, regime

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
        self.digests = torch.zeros(replicas, dtype=torch.float64)  # of this rank's chunks: to be summed
        self.basis = torch.zeros(replicas + 1, replicas + 1, dtype=torch.float64)  # known alike on all its ranks
        self.unsafe: dict[str, list[int]] = {}

    def saw(self, finite_N: Tensor) -> None:
        """Count the rows of a tensor that were not finite."""
        self.nonfinite += ~finite_N

    def is_unsafe(self, tensor: str, finite_N: Tensor) -> None:
        """Note that a tensor has too many rows that were not finite: its aggregate is NaN."""
        self.unsafe[tensor] = (~finite_N).nonzero()[:, 0].tolist()

    def own(self) -> Tensor:
        """What this rank knows for its own chunks only, as numbers to be summed over the ranks: [3n + 1] float64."""
        unsafe = torch.tensor([float(len(self.unsafe))]).double()
        return torch.cat([self.own_distances, self.digests, self.nonfinite, unsafe])

    def take(self, sums: Tensor, *, flags: bool) -> None:
        """Take over the sums of all ranks' `own`; of the flags too, if this rank did not know those of all chunks."""
        n = self.distances.numel()
        self.own_distances, self.digests = sums[:n], sums[n : 2 * n]
        if flags:
            self.nonfinite = sums[2 * n : 3 * n]
            if sums[-1] > 0 and not self.unsafe:
                self.unsafe[ELSEWHERE] = self.nonfinite.nonzero()[:, 0].tolist()

    def totals(self) -> Tensor:
        """What all ranks of the reduction know alike after `take`, as one vector; see `Totals`."""
        unsafe = torch.tensor([float(len(self.unsafe))]).double()
        distances = self.distances + self.own_distances
        return torch.cat([distances, self.nonfinite, unsafe, self.digests, self.basis.flatten()])


class Totals(NamedTuple):
    """Of one reduction, or summed over several: known alike on all ranks."""

    distances: Tensor  # squared, [n]
    nonfinite: Tensor  # tensors, [n]
    unsafe: Tensor  # tensors, []
    digests: Tensor  # whole numbers, [n]
    basis: Tensor  # [n+1, n+1]; zero if inner products were not computed

    @classmethod
    def of(cls, vector: Tensor, n: int) -> Totals:
        """From what `Tally.totals` gives."""
        distances, nonfinite, unsafe, digests, basis = torch.split(vector, [n, n, 1, n, (n + 1) ** 2])
        return cls(distances, nonfinite, unsafe[0], digests, basis.view(n + 1, n + 1))


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
        vectors: Mapping[Key, Tensor],
        sent: int,
        *,
        f: int,
        measured: bool,
        ranks: Mapping[Key, tuple[tuple[int, ...], ...]],
        left_out: Collection[int] = (),
    ) -> StepEvent:
        """The finished step.

        Args:
            step: its number.
            vectors: what `Tally.totals` gives for all reductions of the job, by (kind, name); the same on all ranks.
            sent: bytes.
            f: bad replicas to tolerate.
            measured: whether distances were measured in this step.
            ranks: for each reduction and replica, the global ranks that take part.
            left_out: replicas in quarantine.
        """
        n = self.replicas
        total = Totals.of(torch.stack([vectors[key] for key in sorted(vectors)]).sum(0), n)
        nonfinite = [0 if i in left_out else int(count) for i, count in enumerate(total.nonfinite)]
        dropped = [i for i, count in enumerate(nonfinite) if count]
        usable = [i for i in range(n) if i not in dropped and i not in left_out]
        distances = [float(d) ** 0.5 if measured and i in usable else None for i, d in enumerate(total.distances)]
        ranked = [(d, -i) for i, d in enumerate(distances) if d is not None]
        suspect = -max(ranked)[1] if ranked and max(ranked)[0] > 0 else None
        if dropped:
            suspect = dropped[0]
        parts = {key: Totals.of(vector, n) for key, vector in vectors.items()}
        signs = {key: part.nonfinite if dropped else part.distances for key, part in parts.items()}
        seen = regime(total.basis, usable, f) if bool(total.basis.any()) else Regime()
        return StepEvent(
            step=step,
            kept=usable,
            dropped=dropped,
            nonfinite=nonfinite,
            distances=distances,
            suspect=suspect,
            suspect_ranks=[] if suspect is None else concentrated(signs, suspect, ranks),
            unsafe=self._unsafe(total.unsafe, dropped),
            bytes=sent,
            stock_bytes=self.stock_bytes,
            exchange_ms=round(self.milliseconds["exchange"], 3),
            rule_ms=round(self.milliseconds["rule"], 3),
            **vars(seen),
        )

    def digests(self, vectors: Mapping[Key, Tensor]) -> list[int]:
        """A checksum of each replica's gradient of the step."""
        return [int(d) for d in Totals.of(torch.stack(list(vectors.values())).sum(0), self.replicas).digests]

    def _unsafe(self, count: Tensor, dropped: list[int]) -> dict[str, list[int]]:
        """The tensors that this rank knows to be unsafe; if only others know of some, a word that stands for theirs."""
        found = {tensor: lost for tally in self.tallies for tensor, lost in tally.unsafe.items()}
        if count > 0 and not found:
            found[ELSEWHERE] = dropped
        return dict(sorted(found.items()))
