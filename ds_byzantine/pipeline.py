"""THE main path: one bucket of local gradients in, the same bucket with the robust aggregate out.

    tap -> scatter rows -> partial statistics -> all-gather -> verdict per tensor -> combine -> deliver -> record

Host adapters call `ShardAggregator.reduce` where the host would have averaged, and `end_step` once per optimizer step.
`collect` and `resolve` are the two halves of `reduce`, for `scope: model`, where the verdict has to wait for the last
bucket of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_byzantine.agreement import agreed_statistics
from ds_byzantine.exchange.all_to_all import scatter_rows
from ds_byzantine.exchange.deliver import deliver
from ds_byzantine.exchange.routes import Routes, routes
from ds_byzantine.exchange.transport import Transport
from ds_byzantine.exchange.workspace import Workspace
from ds_byzantine.monitor.events import StepEvent
from ds_byzantine.monitor.recorder import Recorder
from ds_byzantine.rules.apply import Aggregator
from ds_byzantine.rules.verdicts import Verdict, combine_pieces, decide
from ds_byzantine.types import Bucket, Delivery

Tap = Callable[[Tensor, int], object]


@dataclass
class Held:
    """A bucket whose rows lie at their aggregators and wait for a verdict."""

    bucket: Bucket
    routes: Routes
    rows_ND: Tensor
    verdicts: Sequence[Verdict] = ()


class ShardAggregator:
    """Replaces the mean over n replicas by a robust rule, bucket by bucket.

    Args:
        transport: the n replicas.
        aggregator: the rule, its pre-aggregations and f.
        scope: "tensor" (one verdict per parameter tensor, alike on all layouts), "shard" (one per tensor piece at its
            aggregator, no communication) or "model" (one for all tensors that are resolved together).
        tap: called with (flat, step) before the exchange: a drill spoils the gradients of a bad replica there.
        distances_every: measure the rows' distances to the aggregate every so many steps.
        step_of: number of the optimizer step in progress; the same on all ranks.
    """

    def __init__(
        self,
        transport: Transport,
        aggregator: Aggregator,
        *,
        scope: str = "tensor",
        tap: Tap | None = None,
        distances_every: int = 1,
        step_of: Callable[[], int] = lambda: 0,
    ) -> None:
        self.transport = transport
        self.aggregator = aggregator
        self.scope = scope
        self.tap = tap
        self.distances_every = distances_every
        self._step_of = step_of
        self.workspace = Workspace()
        self.recorder = Recorder(transport.size)
        self._sent_before = 0

    @torch.no_grad()
    def reduce(self, bucket: Bucket) -> None:
        """Aggregate one bucket in place; a collective call: every replica has to make it with the same layout."""
        if bucket.flat.numel() == 0:
            return
        self.resolve([self.collect(bucket)])

    def collect(self, bucket: Bucket, *, keep: bool = False) -> Held:
        """Send the rows to their aggregators. With `keep` the rows get memory of their own instead of the workspace."""
        if self.tap is not None:
            self.tap(bucket.flat, self.step)
        route = routes(bucket.layout, self.transport.rank)
        self._count_stock(bucket)
        with self.recorder.timed("exchange"):
            workspace = Workspace() if keep else self.workspace
            rows_ND = scatter_rows(self.transport, bucket.flat, route, workspace)
        return Held(bucket, route, rows_ND)

    def resolve(self, held: Sequence[Held]) -> None:
        """Decide, combine and deliver; the buckets held are decided on together if the scope is "model"."""
        if self.scope == "model":
            self._decide_together(held)
        else:
            for one in held:
                one.verdicts = self._verdicts(one)
        for one in held:
            with self.recorder.timed("rule"):
                chunk_D = self._combine(one)
            with self.recorder.timed("exchange"):
                layout = one.bucket.layout
                deliver(self.transport, one.bucket.flat, chunk_D, layout, one.routes, self.workspace)

    def end_step(self) -> StepEvent:
        """Close the books of one optimizer step; a collective call (one all-gather of n numbers per rank)."""
        self._add_up_books()
        recorder = self.recorder
        distances = recorder.global_distances + recorder.local_distances
        sent = self.transport.bytes_sent - self._sent_before
        event = recorder.event(self.step, distances, sent)
        recorder.reset()
        self._sent_before = self.transport.bytes_sent
        return event

    @property
    def step(self) -> int:
        """Number of the optimizer step in progress."""
        return self._step_of()

    # -- verdicts ------------------------------------------------------------------------------------------------

    def _verdicts(self, one: Held) -> list[Verdict]:
        """Verdicts of one bucket's tensors (scope tensor) or of this rank's pieces of them (scope shard)."""
        finite_TN, basis_TEE = self._statistics(one)
        names = one.routes.tensors
        if self.scope == "shard":
            own = {piece.tensor for piece in one.routes.pieces[self.transport.rank]}
            return self._judge(names, finite_TN, basis_TEE, own)
        return self._judge(names, finite_TN, basis_TEE, set(range(len(names))))

    def _decide_together(self, held: Sequence[Held]) -> None:
        """One verdict for all tensors: their matrices add, and a row that is not finite anywhere is out everywhere."""
        parts = [self._statistics(one) for one in held]
        finite_TN = torch.cat([finite for finite, _ in parts]).all(0, keepdim=True)
        if not all(bool(finite.eq(finite_TN).all()) for finite, _ in parts):
            parts = [self._statistics(one, finite_TN[0]) for one in held]
        bases = [basis for _, basis in parts if basis is not None]
        basis_TEE = torch.cat(bases).sum(0, keepdim=True) if bases else None
        verdict = self._judge(["all tensors"], finite_TN, basis_TEE, {0})[0]
        for one in held:
            one.verdicts = [verdict] * len(one.routes.tensors)
            self.recorder.tensors.update(one.routes.tensors)

    def _statistics(self, one: Held, kept_N: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return agreed_statistics(
            self.transport,
            one.rows_ND,
            one.routes,
            self.recorder,
            with_gram=self.aggregator.needs_gram,
            local=self.scope == "shard",
            kept_N=kept_N,
        )

    def _judge(
        self, names: Sequence[str], finite_TN: Tensor, basis_TEE: Tensor | None, known: set[int]
    ) -> list[Verdict]:
        with self.recorder.timed("rule"):
            verdicts, distances_TN = decide(self.aggregator, finite_TN, basis_TEE, self.step)
        for t in known:
            self.recorder.saw(names[t], finite_TN[t], self.aggregator.f)
        if distances_TN is not None:
            shard = self.scope == "shard"
            target = self.recorder.local_distances if shard else self.recorder.global_distances
            target += distances_TN[sorted(known)].sum(0)
        return verdicts

    # -- result and books ----------------------------------------------------------------------------------------

    def _combine(self, one: Held) -> Tensor:
        pieces = one.routes.pieces[self.transport.rank]
        chunk_D = torch.empty_like(one.rows_ND[0])
        measured = not self.aggregator.output_is_point and self.step % self.distances_every == 0
        distances_N = self.recorder.local_distances if measured else None
        combine_pieces(one.rows_ND, pieces, one.verdicts, chunk_D, distances_N)
        if one.bucket.scale != 1.0:
            chunk_D *= one.bucket.scale
        return chunk_D

    def _add_up_books(self) -> None:
        """Sum over the ranks what each of them knows for its own chunks only."""
        recorder, n = self.recorder, self.transport.size
        shard = self.scope == "shard"
        if self.aggregator.output_is_point and not shard:
            return
        own = torch.cat([recorder.local_distances, torch.tensor([*recorder.nonfinite, len(recorder.unsafe)]).double()])
        device = next(iter(self.workspace.devices()), torch.device("cpu"))
        everybody = torch.empty(n * own.numel(), dtype=torch.float64, device=device)
        self.transport.all_gather(everybody, own.to(device))
        total = everybody.cpu().view(n, -1).sum(0)
        recorder.local_distances = total[:n]
        if shard:
            recorder.nonfinite = [int(count) for count in total[n : 2 * n]]
            if total[-1] > 0 and not recorder.unsafe:
                lost = [i for i, count in enumerate(recorder.nonfinite) if count]
                recorder.unsafe["a tensor piece at another rank"] = lost

    def _count_stock(self, bucket: Bucket) -> None:
        """Bytes of a ring all-reduce, or of a reduce-scatter where the host would have used one."""
        n, nbytes = self.transport.size, bucket.flat.numel() * bucket.flat.element_size()
        passes = 1 if bucket.layout.delivery is Delivery.AGGREGATOR else 2
        self.recorder.stock_bytes += passes * nbytes * (n - 1) // n
