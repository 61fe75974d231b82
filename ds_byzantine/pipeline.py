"""THE main path: one bucket of local gradients in, the same bucket with the robust aggregate out.

    tap -> scatter rows -> partial statistics -> all-gather -> verdict per tensor -> combine -> deliver -> record

Host adapters call `ShardAggregator.reduce` where the host would have averaged, and `end_step` once per optimizer step.
`collect` and `resolve` are the two halves of `reduce`, for `scope: model`, where the verdict has to wait for the last
bucket of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_byzantine.exchange.all_to_all import gather_partials, scatter_rows
from ds_byzantine.exchange.deliver import deliver
from ds_byzantine.exchange.routes import Piece, Routes, routes
from ds_byzantine.exchange.transport import Transport
from ds_byzantine.exchange.workspace import Workspace
from ds_byzantine.monitor.events import StepEvent
from ds_byzantine.monitor.recorder import Recorder
from ds_byzantine.rules.apply import Aggregator
from ds_byzantine.rules.gram import column_blocks
from ds_byzantine.rules.verdicts import Verdict, add_up, decide, piece_statistics
from ds_byzantine.types import Bucket, Delivery

logger = logging.getLogger("ds_byzantine")

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
        recorder = self.recorder
        distances = recorder.global_distances + self._summed(recorder.local_distances)
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
        return self._judge(list(one.routes.tensors), finite_TN, basis_TEE, self._numbers(one))

    def _decide_together(self, held: Sequence[Held]) -> None:
        """One verdict for all tensors: their matrices add, and a row that is not finite anywhere is out everywhere."""
        parts = [self._statistics(one) for one in held]
        finite_TN = torch.cat([finite for finite, _ in parts]).all(0, keepdim=True)
        bases = [basis for _, basis in parts if basis is not None]
        basis_TEE = torch.cat(bases).sum(0, keepdim=True) if bases else None
        if basis_TEE is not None and not all(bool(finite.eq(finite_TN).all()) for finite, _ in parts):
            again = [self._statistics(one, finite_TN[0])[1] for one in held]
            basis_TEE = torch.cat([b for b in again if b is not None]).sum(0, keepdim=True)
        verdict = self._judge(["all tensors"], finite_TN, basis_TEE, {0})[0]
        for one in held:
            one.verdicts = [verdict] * len(one.routes.tensors)
            self.recorder.tensors.update(one.routes.tensors)

    def _statistics(self, one: Held, kept_N: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Which rows of each tensor are finite, and the tensors' matrices over exactly those rows."""
        own = one.routes.pieces[self.transport.rank]
        kept: list[Tensor | None] = [kept_N] * len(own)
        while True:
            with self.recorder.timed("rule"):
                mine_PW = self._own_statistics(one.rows_ND, own, kept)
            partials, tensors_of = self._gathered(mine_PW, one.routes)
            finite_TN, basis_TEE = add_up(partials, tensors_of, len(one.routes.tensors), self.transport.size)
            agreed = basis_TEE is None or all(
                torch.equal(row[: self.transport.size] > 0, finite_TN[t])
                for partial, numbers in zip(partials, tensors_of, strict=True)
                for row, t in zip(partial, numbers, strict=True)
            )
            if agreed:
                return finite_TN, basis_TEE
            # A row is finite in one chunk of a tensor and not in another: the matrices have to leave it out everywhere.
            kept = [finite_TN[piece.tensor] for piece in own]

    def _own_statistics(self, rows_ND: Tensor, own: Sequence[Piece], kept: Sequence[Tensor | None]) -> Tensor:
        with_gram = self.aggregator.needs_gram
        rows = [
            piece_statistics(rows_ND[:, piece.start : piece.stop], mask, with_gram)
            for piece, mask in zip(own, kept, strict=True)
        ]
        if rows:
            return torch.stack(rows)
        n = self.transport.size
        width = n + (n + 1) * (n + 2) // 2 if with_gram else n
        return torch.zeros(0, width, dtype=torch.float64 if with_gram else torch.uint8, device=rows_ND.device)

    def _gathered(self, mine_PW: Tensor, route: Routes) -> tuple[list[Tensor], list[list[int]]]:
        if self.scope == "shard":
            return [mine_PW.cpu()], [[piece.tensor for piece in route.pieces[self.transport.rank]]]
        with self.recorder.timed("exchange"):
            partials = gather_partials(self.transport, mine_PW, route)
        return partials, [[piece.tensor for piece in pieces] for pieces in route.pieces]

    def _numbers(self, one: Held) -> set[int]:
        """Tensors on which this rank has a verdict: all of the bucket, or those in its chunk (scope shard)."""
        if self.scope == "shard":
            return {piece.tensor for piece in one.routes.pieces[self.transport.rank]}
        return set(range(len(one.routes.tensors)))

    def _judge(
        self, names: Sequence[str], finite_TN: Tensor, basis_TEE: Tensor | None, known: set[int]
    ) -> list[Verdict]:
        with self.recorder.timed("rule"):
            verdicts, distances_TN = decide(self.aggregator, finite_TN, basis_TEE, self.step)
        for t in known:
            self.recorder.saw(names[t], finite_TN[t], self.aggregator.f)
        if distances_TN is not None:
            local = self.scope == "shard"
            target = self.recorder.local_distances if local else self.recorder.global_distances
            target += distances_TN.sum(0)
        return verdicts

    # -- the result ----------------------------------------------------------------------------------------------

    def _combine(self, one: Held) -> Tensor:
        own = one.routes.pieces[self.transport.rank]
        chunk_D = torch.empty_like(one.rows_ND[0])
        for run, verdict in _runs(own, one.verdicts):
            rows_ND, out_D = one.rows_ND[:, run.start : run.stop], chunk_D[run.start : run.stop]
            if verdict.aggregator is None:
                out_D.fill_(float("nan"))
                continue
            whole = bool(verdict.kept_N.all())
            used_ND = rows_ND if whole else rows_ND[verdict.kept_N.to(rows_ND.device)]
            verdict.aggregator.combine(used_ND, verdict.points_KE, out_D)
            if not self.aggregator.output_is_point and self.step % self.distances_every == 0:
                self.recorder.local_distances[verdict.kept_N] += _squared_distances(used_ND, out_D)
        if one.bucket.scale != 1.0:
            chunk_D *= one.bucket.scale
        return chunk_D

    # -- books -----------------------------------------------------------------------------------------------------

    def _summed(self, local_N: Tensor) -> Tensor:
        """Sum of everybody's local distances; skipped where the distances are known alike on all ranks."""
        if self.aggregator.output_is_point and self.scope != "shard":
            return local_N
        n = self.transport.size
        device = next(iter(self.workspace.devices()), torch.device("cpu"))
        everybody = torch.empty(n * n, dtype=torch.float64, device=device)
        self.transport.all_gather(everybody, local_N.to(device))
        return everybody.cpu().view(n, n).sum(0)

    def _count_stock(self, bucket: Bucket) -> None:
        """Bytes of a ring all-reduce, or of a reduce-scatter where the host would have used one."""
        n, nbytes = self.transport.size, bucket.flat.numel() * bucket.flat.element_size()
        passes = 1 if bucket.layout.delivery is Delivery.AGGREGATOR else 2
        self.recorder.stock_bytes += passes * nbytes * (n - 1) // n


def _runs(own: Sequence[Piece], verdicts: Sequence[Verdict]) -> list[tuple[Piece, Verdict]]:
    """Neighbouring pieces with the same verdict as one run: fewer, longer passes."""
    out: list[tuple[Piece, Verdict]] = []
    for piece in own:
        verdict = verdicts[piece.tensor]
        if out and out[-1][0].stop == piece.start and out[-1][1].like(verdict):
            out[-1] = (Piece(out[-1][0].tensor, out[-1][0].start, piece.stop), verdict)
        else:
            out.append((piece, verdict))
    return out


def _squared_distances(rows_ND: Tensor, out_D: Tensor) -> Tensor:
    """||x_i - out||^2 in cache-sized blocks, [n] float64 on the CPU."""
    total = torch.zeros(rows_ND.shape[0], dtype=torch.float64, device=rows_ND.device)
    start = 0
    for block_NB in column_blocks(rows_ND):
        stop = start + block_NB.shape[1]
        total += (block_NB - out_D[start:stop]).square_().sum(1, dtype=torch.float64)
        start = stop
    return total.cpu()
