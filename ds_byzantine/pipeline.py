"""THE main path: one bucket of local gradients in, the same bucket with the robust aggregate out.

    tap -> scatter rows -> partial statistics -> all-gather -> verdict per tensor -> combine -> deliver -> record

Host adapters call `ShardAggregator.submit` where the host would have averaged, and `end_step` once per optimizer step.
With `scope: model` the verdict has to wait for the last bucket: there `submit` only sends the rows, and `flush` does
the rest for all buckets at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_byzantine.agreement import Judge
from ds_byzantine.exchange.all_to_all import scatter_rows, sum_over_replicas
from ds_byzantine.exchange.deliver import deliver
from ds_byzantine.exchange.routes import Routes, routes
from ds_byzantine.exchange.transport import Transport
from ds_byzantine.exchange.workspace import Workspace
from ds_byzantine.monitor.events import StepEvent
from ds_byzantine.monitor.recorder import Recorder
from ds_byzantine.rules.apply import Aggregator
from ds_byzantine.rules.verdicts import Verdict, combine_pieces
from ds_byzantine.types import Bucket

Tap = Callable[[Tensor, int], object]
Commit = Callable[[Tensor], object]


@dataclass
class Held:
    """A bucket whose rows lie at their aggregators and wait for a verdict."""

    bucket: Bucket
    routes: Routes
    rows_ND: Tensor
    commit: Commit | None = None


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
        self._judge = Judge(transport, aggregator, scope, self.recorder)
        self._sent_before = 0
        self._device = torch.device("cpu")  # of the last bucket: where the transport can send from
        self._held: list[Held] = []

    @torch.no_grad()
    def submit(self, bucket: Bucket, commit: Commit) -> None:
        """Aggregate one bucket and hand the result to `commit`; a collective call, with the same layout on all ranks.

        Args:
            bucket: see `Bucket`. With scope "model" its memory is free for the host again when this returns.
            commit: called with the aggregate, laid out as `bucket.flat`: now, or by `flush` with scope "model".
        """
        if bucket.flat.numel() == 0:
            return
        one = self._collect(bucket)
        if self.scope == "model":
            one.bucket, one.commit = replace(bucket, flat=bucket.flat[:0]), commit
            self._held.append(one)
            return
        self._resolve([one])
        commit(bucket.flat)

    @torch.no_grad()
    def flush(self) -> None:
        """With scope "model": decide on all buckets submitted since the last flush, and commit them. Else nothing."""
        held, self._held = self._held, []
        for one in held:
            one.bucket.flat = one.rows_ND.new_empty(one.bucket.layout.numel)
        if held:
            self._resolve(held)
        for one in held:
            if one.commit is not None:
                one.commit(one.bucket.flat)

    def _collect(self, bucket: Bucket) -> Held:
        """Send the rows to their aggregators. Rows that have to wait get memory of their own, not the workspace."""
        if self.tap is not None:
            self.tap(bucket.flat, self.step)
        route = routes(bucket.layout, self.transport.rank)
        self._device = bucket.flat.device
        self.recorder.tensors.update(route.tensors)
        self.recorder.stock_bytes += bucket.stock_bytes
        with self.recorder.timed("exchange"):
            workspace = Workspace() if self.scope == "model" else self.workspace
            rows_ND = scatter_rows(self.transport, bucket.flat, route, workspace)
        return Held(bucket, route, rows_ND)

    def _resolve(self, held: Sequence[Held]) -> None:
        """Decide, combine and deliver; the buckets are decided on together if the scope is "model"."""
        verdicts = self._judge.verdicts([(one.rows_ND, one.routes) for one in held], self.step)
        for one, chosen in zip(held, verdicts, strict=True):
            with self.recorder.timed("rule"):
                chunk_D = self._combine(one, chosen)
            with self.recorder.timed("exchange"):
                layout = one.bucket.layout
                deliver(self.transport, one.bucket.flat, chunk_D, layout, one.routes, self.workspace)

    def end_step(self) -> StepEvent:
        """Close the books of one optimizer step; a collective call (one all-gather of n numbers per rank)."""
        self._add_up_books()
        recorder = self.recorder
        distances = recorder.global_distances + recorder.local_distances if self._measured else None
        sent = self.transport.bytes_sent - self._sent_before
        event = recorder.event(self.step, distances, sent)
        recorder.reset()
        self._sent_before = self.transport.bytes_sent
        return event

    @property
    def step(self) -> int:
        """Number of the optimizer step in progress."""
        return self._step_of()

    @property
    def _measured(self) -> bool:
        """Whether the rows' distances to the aggregate are measured in this step; from inner products they are free."""
        return self.aggregator.output_is_point or self.step % self.distances_every == 0

    def _combine(self, one: Held, verdicts: Sequence[Verdict]) -> Tensor:
        pieces = one.routes.pieces[self.transport.rank]
        chunk_D = torch.empty_like(one.rows_ND[0])
        known = self.aggregator.output_is_point  # from the inner products, by the judge
        distances_N = self.recorder.local_distances if self._measured and not known else None
        combine_pieces(one.rows_ND, pieces, verdicts, chunk_D, distances_N)
        if one.bucket.scale != 1.0:
            chunk_D *= one.bucket.scale
        return chunk_D

    def _add_up_books(self) -> None:
        """Sum over the ranks what each of them knows for its own chunks only."""
        shard = self.scope == "shard"
        if shard or not self.aggregator.output_is_point:
            self.recorder.take(sum_over_replicas(self.transport, self.recorder.own(), self._device), flags=shard)
