"""THE main path: one bucket of local gradients in, the same bucket with the robust aggregate out.

    tap -> scatter rows -> partial statistics -> all-gather -> verdict per tensor -> combine -> deliver -> record

Host adapters call `ShardAggregator.submit` where the host would have averaged, and `end_step` once per optimizer step.
With `scope: model` the verdict has to wait for the last bucket: there `submit` only sends the rows, and `flush` does
the rest for all buckets at once. Buckets of weights that are tied over pipeline stages wait as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ds_byzantine.agreement import Block, Judge, agreed_books
from ds_byzantine.exchange.all_to_all import scatter_rows
from ds_byzantine.exchange.deliver import deliver, share
from ds_byzantine.exchange.groups import Part, Peers
from ds_byzantine.exchange.routes import routes
from ds_byzantine.exchange.workspace import Workspace
from ds_byzantine.monitor.events import StepEvent
from ds_byzantine.monitor.recorder import Recorder
from ds_byzantine.rules.apply import Aggregator
from ds_byzantine.rules.verdicts import Attempt, Verdict, combine_pieces
from ds_byzantine.trust.digest import row_digests
from ds_byzantine.types import Bucket, Piece

Tap = Callable[[Tensor, int, Part], object]
Commit = Callable[[Tensor], object]


@dataclass
class Held(Block):
    """A bucket whose rows lie at their aggregators and wait for a verdict."""

    bucket: Bucket = field(kw_only=True)
    commit: Commit = field(kw_only=True)
    part: Part = field(kw_only=True)

    def own(self) -> tuple[Sequence[Piece], Tensor]:
        """What this rank is the aggregator of: its pieces, and their place in the bucket."""
        rank = self.part.transport.rank
        return self.routes.pieces[rank], self.bucket.layout.chunk_of(self.bucket.flat, rank)


class ShardAggregator:
    """Replaces the mean over n replicas by a robust rule, bucket by bucket.

    Args:
        peers: the replicas, the reductions in which this rank takes part, and the other ranks of its replica.
        aggregator: the rule, its pre-aggregations and f.
        scope: "tensor" (one verdict per parameter tensor, alike on all layouts), "shard" (one per tensor piece at its
            aggregator, no communication) or "model" (one for all tensors that are resolved together).
        tap: called with (flat, step, part) before the exchange: a drill spoils a bad replica's gradients there.
        distances_every: measure the rows' distances to the aggregate every so many steps.
        products_every: compute inner products of the rows every so many steps for the record, 0: never. Rules that
            decide by them compute them in every step.
        step_of: number of the optimizer step in progress; the same on all ranks.
    """

    def __init__(
        self,
        peers: Peers,
        aggregator: Aggregator,
        *,
        scope: str = "tensor",
        tap: Tap | None = None,
        distances_every: int = 1,
        products_every: int = 0,
        step_of: Callable[[], int] = lambda: 0,
    ) -> None:
        self.peers = peers
        self.aggregator = aggregator
        self.scope = scope
        self.tap = tap
        self.distances_every = distances_every
        self._step_of = step_of
        self.workspace = Workspace()
        self.recorder = Recorder(peers.n, len(peers.parts))
        self.left_out: list[int] = []  # replicas in quarantine; the same on all ranks
        self.digests: list[int] = []  # of each replica's gradient in the last step
        self._judge = Judge(peers, aggregator, scope, self.recorder, products_every)
        self._sent_before = 0
        self._device = torch.device("cpu")  # of the last bucket: where the transport can send from
        self._held: list[Held] = []

    @torch.no_grad()
    def submit(self, bucket: Bucket, commit: Commit) -> None:
        """Aggregate one bucket and hand the result to `commit`; a collective call, with the same layout on all ranks.

        Args:
            bucket: see `Bucket`. If it has to wait its memory is free for the host again when this returns.
            commit: called with the aggregate, laid out as `bucket.flat`: now, or by `flush` if the bucket waits.
        """
        if bucket.flat.numel() == 0:
            return
        one = self._collect(bucket, commit)
        if self.waits(bucket):
            one.bucket = replace(bucket, flat=bucket.flat[:0])
            self._held.append(one)
        else:
            self._attempt(one)
            self._resolve([one])
            commit(bucket.flat)

    def waits(self, bucket: Bucket) -> bool:
        """Whether `submit` leaves this bucket to `flush`: all do with scope "model", else those that are shared."""
        return self.scope == "model" or bucket.shared_as is not None

    @torch.no_grad()
    def flush(self) -> None:
        """Resolve and commit all buckets that wait; the shared ones last, in an order that all their holders keep."""
        held = sorted(self._held, key=lambda one: one.bucket.shared_as or "")
        self._held = []
        for one in held:
            one.bucket.flat = one.rows_ND.new_empty(one.bucket.layout.numel)
        if held or (self.scope == "model" and self.peers.replica is not None):  # other ranks may hold some
            self._resolve(held)
        for one in held:
            one.commit(one.bucket.flat)

    def _collect(self, bucket: Bucket, commit: Commit) -> Held:
        """Send the rows to their aggregators. Rows that have to wait get memory of their own, not the workspace."""
        part = self.peers.parts[bucket.kind]
        if self.tap is not None:
            self.tap(bucket.flat, self.step, part)
        route = routes(bucket.layout, part.transport.rank)
        self._device = bucket.flat.device
        self.recorder.tensors.update(route.tensors)
        self.recorder.stock_bytes += bucket.stock_bytes
        with self.recorder.timed("exchange"):
            workspace = Workspace() if self.waits(bucket) else self.workspace
            rows_ND = scatter_rows(part, bucket.flat, route, workspace)
        with self.recorder.timed("rule"):
            self.recorder.tallies[bucket.kind].digests += row_digests(rows_ND).cpu()
            if self.left_out:
                rows_ND[self.left_out] = float("nan")  # which no tensor takes, and which counts against f
        return Held(rows_ND, route, bucket.kind, bucket=bucket, commit=commit, part=part)

    def _attempt(self, one: Held) -> None:
        """Aggregate all rows at the first look at them, if that spares a pass; `_combine` does again what it must."""
        if self.left_out or self._judge.wants_products(self.step):
            return
        with self.recorder.timed("rule"):
            one.attempt = Attempt.at(one.rows_ND, *one.own(), self.aggregator)

    def _resolve(self, held: Sequence[Held]) -> None:
        """Decide, combine and deliver; the buckets are decided on together if the scope is "model"."""
        for one, chosen in zip(held, self._judge.verdicts(held, self.step, self._device), strict=True):
            with self.recorder.timed("rule"):
                self._combine(one, chosen)
            with self.recorder.timed("exchange"):
                flat, layout, transport = one.bucket.flat, one.bucket.layout, one.part.transport
                for shared in self.peers.shared:
                    share(shared, flat, layout, one.routes, transport.rank)
                deliver(transport, flat, layout, one.routes, self.workspace)

    def end_step(self) -> StepEvent:
        """Close the books of one optimizer step; a collective call of a few numbers per replica."""
        vectors = agreed_books(self.peers, self.recorder.tallies, self.scope, self._device)
        sent = self.peers.bytes_sent
        event = self.recorder.event(
            self.step,
            vectors,
            sent - self._sent_before,
            f=self.aggregator.f,
            measured=self._measured,
            ranks=self.peers.roster.ranks_of,
            left_out=self.left_out,
        )
        self.digests = self.recorder.digests(vectors)
        self.recorder.reset()
        self._sent_before = sent
        return event

    @property
    def step(self) -> int:
        """Number of the optimizer step in progress."""
        return self._step_of()

    @property
    def _measured(self) -> bool:
        """Whether the rows' distances to the aggregate are measured in this step; from inner products they are free."""
        return self.aggregator.output_is_point or self.step % self.distances_every == 0

    def _combine(self, one: Held, verdicts: Sequence[Verdict]) -> None:
        """Aggregate this rank's chunk in place: what the replica itself had there has been sent."""
        pieces, chunk_D = one.own()
        distances_N = None
        if self._measured and not self.aggregator.output_is_point:  # else the judge knows them from inner products
            distances_N = self.recorder.tallies[one.kind].own_distances
        for known, to in ((True, distances_N), (False, None)):  # others count what they hold more than once
            some = [piece for piece in pieces if self.peers.counts(one.routes.tensors[piece.tensor]) is known]
            combine_pieces(one.rows_ND, some, verdicts, chunk_D, to, one.attempt)
        if one.bucket.scale != 1.0:
            chunk_D *= one.bucket.scale
