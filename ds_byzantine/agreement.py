"""The statistics of a bucket's tensors, on which all ranks agree, and the verdicts that follow from them.

Each aggregator sees its chunk only. It says which rows are finite there and, for Gram rules, what their inner products
are; the sums over the chunks are the tensors' statistics, the same on every rank, and so are the verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_byzantine.exchange.all_to_all import gather_partials, over_reductions, sum_over_ranks
from ds_byzantine.exchange.groups import Part, Peers
from ds_byzantine.exchange.routes import Routes
from ds_byzantine.monitor.recorder import Recorder
from ds_byzantine.rules.apply import Aggregator
from ds_byzantine.rules.verdicts import Verdict, add_up, decide, piece_statistics
from ds_byzantine.types import Piece


@dataclass
class Block:
    """The rows of one bucket, as far as they lie at this rank.

    Args:
        rows_ND: of this rank's chunk.
        routes: of the bucket.
        kind: the reduction that the bucket belongs to.
    """

    rows_ND: Tensor
    routes: Routes
    kind: int = 0


class Judge:
    """Reaches the verdicts of one rank, alike on all ranks that hold parts of the same tensors.

    Args:
        peers: this rank's reductions and the other ranks of its replica.
        aggregator: the rule, its pre-aggregations and f.
        scope: "tensor", "shard" or "model": the block over which the rule decides.
        recorder: is told which rows were not finite and how far the rows are from the aggregate.
    """

    def __init__(self, peers: Peers, aggregator: Aggregator, scope: str, recorder: Recorder) -> None:
        self.peers = peers
        self.aggregator = aggregator
        self.scope = scope
        self.recorder = recorder

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
        finite_TN, basis_TEE = self._statistics(one)
        names = one.routes.tensors
        own = {piece.tensor for piece in one.routes.pieces[self.peers.parts[one.kind].transport.rank]}
        known = sorted(own) if self.scope == "shard" else range(len(names))
        with self.recorder.timed("rule"):
            verdicts, distances_TN = decide(self.aggregator, finite_TN, basis_TEE, step)
        tally = self.recorder.tallies[one.kind]
        for t in known:
            tally.saw(names[t], finite_TN[t], self.aggregator.f)
        if distances_TN is not None:
            target = tally.own_distances if self.scope == "shard" else tally.distances
            target += distances_TN[[t for t in known if self.peers.counts(names[t])]].sum(0)
        return verdicts

    def _together(self, held: Sequence[Block], step: int, device: torch.device) -> Verdict:
        """One verdict for all tensors: their matrices add, and a row that is not finite anywhere is out everywhere."""
        parts = [self._statistics(one) for one in held]
        finite_KN = self._finite_by_kind(held, [finite_TN for finite_TN, _ in parts])
        finite_N = finite_KN.all(0)
        if self.peers.replica is not None:
            finite_N = sum_over_ranks(self.peers.replica, (~finite_N).double(), device) == 0
        if not all(bool(finite_TN.eq(finite_N).all()) for finite_TN, _ in parts):
            parts = [self._statistics(one, finite_N) for one in held]
        bases_KEE = self._counted_bases(held, [basis_TEE for _, basis_TEE in parts])
        basis_1EE = self._over_replica(bases_KEE, device)
        with self.recorder.timed("rule"):
            verdict = decide(self.aggregator, finite_N[None], basis_1EE, step)[0][0]
        self._record(verdict, finite_KN, bases_KEE)
        return verdict

    def _finite_by_kind(self, held: Sequence[Block], flags: Sequence[Tensor]) -> Tensor:
        """Rows that are finite in all tensors of each of this rank's reductions, bool [K, n]."""
        finite_KN = torch.ones(len(self.peers.parts), self.peers.n, dtype=torch.bool)
        for one, finite_TN in zip(held, flags, strict=True):
            finite_KN[one.kind] &= finite_TN.all(0)
        return finite_KN

    def _record(self, verdict: Verdict, finite_KN: Tensor, bases_KEE: Tensor | None) -> None:
        """What this rank's reductions contributed to the verdict on all gradients."""
        for kind, tally in enumerate(self.recorder.tallies):
            tally.nonfinite += ~finite_KN[kind]
            if bases_KEE is not None and self.aggregator.output_is_point:
                tally.distances += verdict.distances_in(bases_KEE[kind])
        if verdict.aggregator is None:
            self.recorder.tallies[0].unsafe["all tensors"] = (~verdict.kept_N).nonzero()[:, 0].tolist()

    def _counted_bases(self, held: Sequence[Block], bases: Sequence[Tensor | None]) -> Tensor | None:
        """Of each of this rank's reductions, the sum of the matrices of tensors whose copy here counts: [K, E, E]."""
        size = self.peers.n + 1
        if not self.aggregator.needs_gram:
            return None
        total = torch.zeros(len(self.peers.parts), size, size, dtype=torch.float64)
        for one, basis_TEE in zip(held, bases, strict=True):
            if basis_TEE is None:
                continue
            counted = [t for t, name in enumerate(one.routes.tensors) if self.peers.counts(name)]
            total[one.kind] += basis_TEE[counted].sum(0)
        return total

    def _over_replica(self, bases_KEE: Tensor | None, device: torch.device) -> Tensor | None:
        """The matrix of all gradients, [1, E, E], from those of this rank's reductions."""
        if bases_KEE is None:
            return None
        totals = over_reductions(self.peers, list(bases_KEE.flatten(1)), device)
        size = bases_KEE.shape[-1]
        return torch.stack([totals[key] for key in sorted(totals)]).sum(0).view(1, size, size)

    def _statistics(self, one: Block, kept_N: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return agreed_statistics(
            self.peers.parts[one.kind],
            one.rows_ND,
            one.routes,
            self.recorder,
            with_gram=self.aggregator.needs_gram,
            local=self.scope == "shard",
            kept_N=kept_N,
        )


def agreed_statistics(
    part: Part,
    rows_ND: Tensor,
    routes: Routes,
    recorder: Recorder,
    *,
    with_gram: bool,
    local: bool = False,
    kept_N: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Which rows of each tensor are finite, and the tensors' matrices over exactly those rows.

    Args:
        part: the reduction.
        rows_ND: the rows of this rank's chunk.
        routes: of the bucket.
        recorder: is told how long it took.
        with_gram: whether inner products are wanted.
        local: this rank's pieces only, without communication (scope shard).
        kept_N: rows to use, bool [n], if that is decided already.

    Returns:
        finite_TN, bool, and basis_TEE, float64 (see `Geometry`) or None; on the CPU. With `local`, tensors without a
        piece here have all rows finite and a zero matrix.
    """
    n, transport = part.n, part.transport
    own = routes.pieces[transport.rank]
    kept: list[Tensor | None] = [kept_N] * len(own)
    while True:  # once as a rule; each further round uses fewer rows, those that were found finite everywhere
        with recorder.timed("rule"):
            mine_PW = _own_statistics(rows_ND, own, kept, with_gram)
        if local:
            partials, numbers = [mine_PW.cpu()], [[piece.tensor for piece in own]]
        else:
            with recorder.timed("exchange"):
                partials = gather_partials(transport, mine_PW, routes)
            numbers = [[piece.tensor for piece in pieces] for pieces in routes.pieces]
        finite_TN, basis_TEE = add_up(partials, numbers, len(routes.tensors), n)
        agreed = basis_TEE is None or all(
            torch.equal(partial[:, :n] > 0, finite_TN[tensors])
            for partial, tensors in zip(partials, numbers, strict=True)
            if tensors
        )
        if agreed:
            return finite_TN, basis_TEE
        # A row is finite in one chunk of a tensor and not in another: the matrices have to leave it out everywhere.
        kept = [finite_TN[piece.tensor] for piece in own]


def _own_statistics(rows_ND: Tensor, own: Sequence[Piece], kept: Sequence[Tensor | None], with_gram: bool) -> Tensor:
    if own:
        return torch.stack(
            [
                piece_statistics(rows_ND[:, piece.start : piece.stop], mask, with_gram)
                for piece, mask in zip(own, kept, strict=True)
            ]
        )
    n = rows_ND.shape[0]
    width, dtype = (n + (n + 1) * (n + 2) // 2, torch.float64) if with_gram else (n, torch.uint8)
    return torch.zeros(0, width, dtype=dtype, device=rows_ND.device)
