"""The statistics of a bucket's tensors, on which all ranks agree.

Each aggregator sees its chunk only. It says which rows are finite there and, for Gram rules, what their inner products
are; the sums over the chunks are the tensors' statistics, the same on every rank. A tensor that is cut over tensor
ranks is still one tensor: there the sums go over these ranks too, so that the cut does not change any decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_byzantine.exchange.all_to_all import gather_partials
from ds_byzantine.exchange.groups import Cut, Peers
from ds_byzantine.exchange.routes import Routes
from ds_byzantine.monitor.recorder import Recorder
from ds_byzantine.rules.verdicts import add_up, piece_statistics
from ds_byzantine.types import Piece


@dataclass(frozen=True)
class Statistics:
    """Of the T tensors of one bucket, on the CPU.

    Args:
        finite_TN: the rows that can take part, bool.
        basis_TEE: the matrices over exactly those rows, float64 (see `Geometry`); None if not wanted.
        own_finite_TN: the rows that are finite in what this rank's reduction holds of each tensor.
        own_basis_TEE: the part of the matrices that comes from there.
    """

    finite_TN: Tensor
    basis_TEE: Tensor | None
    own_finite_TN: Tensor
    own_basis_TEE: Tensor | None


def agreed_statistics(
    peers: Peers,
    kind: int,
    rows_ND: Tensor,
    routes: Routes,
    recorder: Recorder,
    *,
    with_gram: bool,
    scope: str = "tensor",
    kept_N: Tensor | None = None,
    flags_PN: Tensor | None = None,
) -> Statistics:
    """Which rows of each tensor are finite, and the tensors' matrices over exactly those rows.

    Args:
        peers: of this rank.
        kind: the reduction.
        rows_ND: the rows of this rank's chunk.
        routes: of the bucket.
        recorder: is told how long it took.
        with_gram: whether inner products are wanted.
        scope: "shard": this rank's pieces only, without communication; tensors without a piece here have all rows
            finite and a zero matrix. "model": this reduction only; the sum over the others is the caller's.
        kept_N: rows to use, bool [n], if that is decided already.
        flags_PN: which rows are finite in this rank's pieces, uint8 [P, n], if that is known already.
    """
    part = peers.parts[kind]
    n, own = part.n, routes.pieces[part.transport.rank]
    cut = peers.cut if scope == "tensor" else None
    counted = torch.tensor([cut is None or cut.counts(name) for name in routes.tensors])
    kept: list[Tensor | None] = [kept_N] * len(own)
    first_TN: Tensor | None = None
    while True:  # once as a rule; each further round uses fewer rows, those that were found finite everywhere
        with recorder.timed("rule"):
            known = None if with_gram else flags_PN
            mine_PW = _own_statistics(rows_ND, own, kept, with_gram) if known is None else known.to(rows_ND.device)
        if scope == "shard":
            partials, numbers = [mine_PW.cpu()], [[piece.tensor for piece in own]]
        else:
            with recorder.timed("exchange"):
                partials = gather_partials(part.transport, mine_PW, routes)
            numbers = [[piece.tensor for piece in pieces] for pieces in routes.pieces]
        finite_TN, basis_TEE = add_up(partials, numbers, len(routes.tensors), n)
        first_TN = finite_TN if first_TN is None else first_TN
        agreed = all(
            torch.equal((partial[:, :n] > 0)[counted[tensors]], finite_TN[tensors][counted[tensors]])
            for partial, tensors in zip(partials, numbers, strict=True)
            if tensors
        )
        found = Statistics(finite_TN, basis_TEE, first_TN, basis_TEE)
        if cut is not None:
            with recorder.timed("exchange"):
                found, agreed = _over_cut(cut, found, agreed, routes.tensors, rows_ND.device)
        if agreed or basis_TEE is None:
            return found
        # A row is finite in one chunk of a tensor and not in another: the matrices have to leave it out everywhere.
        kept = [found.finite_TN[piece.tensor] for piece in own]


def _over_cut(
    cut: Cut, own: Statistics, agreed: bool, names: Sequence[str], device: torch.device
) -> tuple[Statistics, bool]:
    """The statistics of whole tensors from those of their parts; of replicated ones, those of the first rank.

    A collective call over the tensor ranks, whose buckets hold the same tensors.
    """
    tensors, n = own.finite_TN.shape
    upper = torch.triu_indices(n + 1, n + 1)
    flat = [torch.tensor([float(agreed)]).double(), own.finite_TN.double().flatten()]
    if own.basis_TEE is not None:
        flat.append(own.basis_TEE[:, upper[0], upper[1]].flatten())
    numbers = torch.cat(flat)
    everybody = torch.empty(cut.transport.size * numbers.numel(), dtype=torch.float64, device=device)
    cut.transport.all_gather(everybody, numbers.to(device))
    table = everybody.cpu().view(cut.transport.size, -1)
    parts = torch.tensor([name in cut.tensors for name in names])
    finite_MTN = table[:, 1 : 1 + tensors * n].view(-1, tensors, n) > 0
    finite_TN = torch.where(parts[:, None], finite_MTN.all(0), finite_MTN[0])
    agreed = bool((table[:, 0] > 0).all()) and bool((finite_MTN == finite_TN)[:, parts].all())
    basis_TEE = None
    if own.basis_TEE is not None:
        bases_MTU = table[:, 1 + tensors * n :].view(cut.transport.size, tensors, -1)
        basis_TU = torch.where(parts[:, None], bases_MTU.sum(0), bases_MTU[0])
        basis_TEE = torch.zeros_like(own.basis_TEE)
        basis_TEE[:, upper[0], upper[1]] = basis_TU
        basis_TEE[:, upper[1], upper[0]] = basis_TU
    return Statistics(finite_TN, basis_TEE, own.own_finite_TN, own.own_basis_TEE), agreed


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
