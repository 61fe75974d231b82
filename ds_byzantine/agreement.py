"""The statistics of a bucket's tensors, on which all ranks agree, and the verdicts that follow from them.

Each aggregator sees its chunk only. It says which rows are finite there and, for Gram rules, what their inner products
are; the sums over the chunks are the tensors' statistics, the same on every rank, and so are the verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_byzantine.exchange.all_to_all import gather_partials
from ds_byzantine.exchange.routes import Routes
from ds_byzantine.exchange.transport import Transport
from ds_byzantine.monitor.recorder import Recorder
from ds_byzantine.rules.apply import Aggregator
from ds_byzantine.rules.verdicts import Verdict, add_up, decide, piece_statistics
from ds_byzantine.types import Piece


class Judge:
    """Reaches the verdicts of one rank, alike on all ranks.

    Args:
        transport: the n replicas.
        aggregator: the rule, its pre-aggregations and f.
        scope: "tensor", "shard" or "model": the block over which the rule decides.
        recorder: is told which rows were not finite and how far the rows are from the aggregate.
    """

    def __init__(self, transport: Transport, aggregator: Aggregator, scope: str, recorder: Recorder) -> None:
        self.transport = transport
        self.aggregator = aggregator
        self.scope = scope
        self.recorder = recorder

    def verdicts(self, held: Sequence[tuple[Tensor, Routes]], step: int) -> list[list[Verdict]]:
        """One verdict per tensor for each bucket; a collective call unless the scope is "shard".

        Args:
            held: the rows of this rank's chunk and the routes of each bucket.
            step: seeds what is drawn at random; the same on all ranks.
        """
        if self.scope == "model":
            verdict = self._together(held, step)
            return [[verdict] * len(route.tensors) for _, route in held]
        found = []
        for rows_ND, route in held:
            finite_TN, basis_TEE = self._statistics(rows_ND, route)
            own = {piece.tensor for piece in route.pieces[self.transport.rank]}
            known = own if self.scope == "shard" else set(range(len(route.tensors)))
            found.append(self._decided(route.tensors, finite_TN, basis_TEE, known, step))
        return found

    def _together(self, held: Sequence[tuple[Tensor, Routes]], step: int) -> Verdict:
        """One verdict for all tensors: their matrices add, and a row that is not finite anywhere is out everywhere."""
        parts = [self._statistics(*one) for one in held]
        finite_TN = torch.cat([finite for finite, _ in parts]).all(0, keepdim=True)
        if not all(bool(finite.eq(finite_TN).all()) for finite, _ in parts):
            parts = [self._statistics(*one, finite_TN[0]) for one in held]
        bases = [basis for _, basis in parts if basis is not None]
        basis_TEE = torch.cat(bases).sum(0, keepdim=True) if bases else None
        return self._decided(["all tensors"], finite_TN, basis_TEE, {0}, step)[0]

    def _statistics(
        self, rows_ND: Tensor, route: Routes, kept_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        local, with_gram = self.scope == "shard", self.aggregator.needs_gram
        return agreed_statistics(
            self.transport, rows_ND, route, self.recorder, with_gram=with_gram, local=local, kept_N=kept_N
        )

    def _decided(
        self, names: Sequence[str], finite_TN: Tensor, basis_TEE: Tensor | None, known: set[int], step: int
    ) -> list[Verdict]:
        """Decide, and record what was seen of the tensors that this rank knows about."""
        with self.recorder.timed("rule"):
            verdicts, distances_TN = decide(self.aggregator, finite_TN, basis_TEE, step)
        for t in known:
            self.recorder.saw(names[t], finite_TN[t], self.aggregator.f)
        if distances_TN is not None:
            shard = self.scope == "shard"
            target = self.recorder.local_distances if shard else self.recorder.global_distances
            target += distances_TN[sorted(known)].sum(0)
        return verdicts


def agreed_statistics(
    transport: Transport,
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
        rows_ND: the rows of this rank's chunk.
        with_gram: whether inner products are wanted.
        local: this rank's pieces only, without communication (scope shard).
        kept_N: rows to use, bool [n], if that is decided already.

    Returns:
        finite_TN, bool, and basis_TEE, float64 (see `Geometry`) or None; on the CPU. With `local`, tensors without a
        piece here have all rows finite and a zero matrix.
    """
    n = transport.size
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


def _own_statistics(
    rows_ND: Tensor, own: Sequence[Piece], kept: Sequence[Tensor | None], with_gram: bool
) -> Tensor:
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
