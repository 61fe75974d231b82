"""The verdicts that follow from the tensors' statistics, alike on every rank, and what is recorded of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_byzantine.exchange.all_to_all import over_reductions, sum_over_ranks
from ds_byzantine.exchange.groups import Peers
from ds_byzantine.exchange.routes import Routes
from ds_byzantine.monitor.recorder import Recorder, Tally
from ds_byzantine.rules.apply import Aggregator
from ds_byzantine.rules.verdicts import Attempt, Verdict, decide
from ds_byzantine.statistics import Statistics, agreed_statistics


@dataclass
class Block:
    """The rows of one bucket, as far as they lie at this rank.

    Args:
        rows_ND: of this rank's chunk.
        routes: of the bucket.
        kind: the reduction that the bucket belongs to.
        attempt: its aggregate if all rows take part, if that is known before the verdicts.
    """

    rows_ND: Tensor
    routes: Routes
    kind: int = 0
    attempt: Attempt | None = None


class Judge:
    """Reaches the verdicts of one rank, alike on all ranks that hold parts of the same tensors.

    Args:
        peers: this rank's reductions and the other ranks of its replica.
        aggregator: the rule, its pre-aggregations and f.
        scope: "tensor", "shard" or "model": the block over which the rule decides.
        recorder: is told which rows were not finite and how far the rows are from the aggregate.
        products_every: compute inner products every so many steps although the rule needs none; 0: never.
    """

    def __init__(
        self, peers: Peers, aggregator: Aggregator, scope: str, recorder: Recorder, products_every: int = 0
    ) -> None:
        self.peers = peers
        self.aggregator = aggregator
        self.scope = scope
        self.recorder = recorder
        self.products_every = products_every

    def verdicts(self, held: Sequence[Block], step: int, device: torch.device) -> list[list[Verdict]]:
        """One verdict per tensor for each bucket; a collective call unless the scope is "shard".

        Args:
            held: the buckets to decide on; with scope "model" all of the step.
            step: seeds what is drawn at random; the same on all ranks.
            device: where the transports can send from.
        """
        if self.scope == "model":
            verdict = self._together(held, step, device)
            return [[verdict] * len(one.routes.tensors) for one in held]
        return [self._apart(one, step) for one in held]

    def _apart(self, one: Block, step: int) -> list[Verdict]:
        """One verdict per tensor of a bucket, and a record of what was seen of those that this rank knows about."""
        found = self._statistics(one, step)
        names = one.routes.tensors
        own = {piece.tensor for piece in one.routes.pieces[self.peers.parts[one.kind].transport.rank]}
        known = sorted(own) if self.scope == "shard" else range(len(names))
        with self.recorder.timed("rule"):
            verdicts, distances_TN = decide(self.aggregator, found.finite_TN, found.basis_TEE, step)
        tally = self.recorder.tallies[one.kind]
        for t in known:
            tally.saw(found.own_finite_TN[t])
            if verdicts[t].aggregator is None:
                tally.is_unsafe(names[t], found.finite_TN[t])
        counted = [t for t in known if self.peers.counts(names[t])]
        if found.own_basis_TEE is not None and self.scope != "shard":
            tally.basis += found.own_basis_TEE[counted].sum(0)
        if distances_TN is not None and found.own_basis_TEE is not None:
            if self.peers.cut is not None:  # of a tensor that is cut over ranks, each records its own part
                distances_TN = torch.stack(
                    [v.distances_in(basis) for v, basis in zip(verdicts, found.own_basis_TEE, strict=True)]
                )
            target = tally.own_distances if self.scope == "shard" else tally.distances
            target += distances_TN[counted].sum(0)
        return verdicts

    def _together(self, held: Sequence[Block], step: int, device: torch.device) -> Verdict:
        """One verdict for all tensors: their matrices add, and a row that is not finite anywhere is out everywhere."""
        parts = [self._statistics(one, step) for one in held]
        finite_KN = self._finite_by_kind(held, parts)
        finite_N = finite_KN.all(0)
        if self.peers.replica is not None:
            finite_N = sum_over_ranks(self.peers.replica, (~finite_N).double(), device) == 0
        if not all(bool(part.finite_TN.eq(finite_N).all()) for part in parts):
            parts = [self._statistics(one, step, finite_N) for one in held]
        bases_KEE = self._counted_bases(held, parts) if self.wants_products(step) else None
        basis_1EE = self._over_replica(bases_KEE, device)
        with self.recorder.timed("rule"):
            verdict = decide(self.aggregator, finite_N[None], basis_1EE, step)[0][0]
        self._record(verdict, finite_KN, bases_KEE)
        return verdict

    def _finite_by_kind(self, held: Sequence[Block], parts: Sequence[Statistics]) -> Tensor:
        """Rows that are finite in all tensors of each of this rank's reductions, bool [K, n]."""
        finite_KN = torch.ones(len(self.peers.parts), self.peers.n, dtype=torch.bool)
        for one, part in zip(held, parts, strict=True):
            finite_KN[one.kind] &= part.finite_TN.all(0)
        return finite_KN

    def _record(self, verdict: Verdict, finite_KN: Tensor, bases_KEE: Tensor | None) -> None:
        """What this rank's reductions contributed to the verdict on all gradients."""
        for kind, tally in enumerate(self.recorder.tallies):
            tally.saw(finite_KN[kind])
            if bases_KEE is not None:
                tally.basis += bases_KEE[kind]
            if bases_KEE is not None and self.aggregator.output_is_point:
                tally.distances += verdict.distances_in(bases_KEE[kind])
        if verdict.aggregator is None:
            self.recorder.tallies[0].is_unsafe("all tensors", verdict.kept_N)

    def _counted_bases(self, held: Sequence[Block], parts: Sequence[Statistics]) -> Tensor:
        """Of each of this rank's reductions, the sum of the matrices of tensors whose copy here counts: [K, E, E]."""
        size = self.peers.n + 1
        total = torch.zeros(len(self.peers.parts), size, size, dtype=torch.float64)
        for one, part in zip(held, parts, strict=True):
            if part.basis_TEE is None:
                continue
            counted = [t for t, name in enumerate(one.routes.tensors) if self.peers.counts(name)]
            total[one.kind] += part.basis_TEE[counted].sum(0)
        return total

    def _over_replica(self, bases_KEE: Tensor | None, device: torch.device) -> Tensor | None:
        """The matrix of all gradients, [1, E, E], from those of this rank's reductions."""
        if bases_KEE is None:
            return None
        totals = over_reductions(self.peers, list(bases_KEE.flatten(1)), device)
        size = bases_KEE.shape[-1]
        return torch.stack([totals[key] for key in sorted(totals)]).sum(0).view(1, size, size)

    def wants_products(self, step: int) -> bool:
        """Whether inner products are computed in this step."""
        extra = self.products_every > 0 and step % self.products_every == 0 and self.scope != "shard"
        return self.aggregator.needs_gram or extra

    def _statistics(self, one: Block, step: int, kept_N: Tensor | None = None) -> Statistics:
        return agreed_statistics(
            self.peers,
            one.kind,
            one.rows_ND,
            one.routes,
            self.recorder,
            with_gram=self.wants_products(step),
            scope=self.scope,
            kept_N=kept_N,
            flags_PN=None if one.attempt is None else one.attempt.finite_PN,
        )


def agreed_books(
    peers: Peers, tallies: Sequence[Tally], scope: str, device: torch.device
) -> dict[tuple[int, int], Tensor]:
    """What all ranks of the job know alike of each reduction, from what each rank knows; a collective call."""
    for part, tally in zip(peers.parts, tallies, strict=True):
        sums = sum_over_ranks(part.transport, tally.own(), device)
        tally.take(sums, flags=scope == "shard")
    return over_reductions(peers, [tally.totals() for tally in tallies], device)
