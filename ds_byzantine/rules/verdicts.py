"""From the partial statistics of all chunks to one decision per tensor, alike on every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_byzantine.rules import native
from ds_byzantine.rules.apply import Aggregator
from ds_byzantine.rules.geometry import Geometry
from ds_byzantine.rules.gram import column_blocks, compute_dtype, finite_rows, partial_basis
from ds_byzantine.types import Piece


@dataclass(frozen=True)
class Verdict:
    """What to do with the rows of one tensor.

    Args:
        kept_N: rows that take part, bool [n], on the CPU.
        aggregator: the rule with f lowered by the rows removed; None if more than f were: the output is NaN.
        points_KE: the decision over (kept rows, median), or None for a coordinate-wise rule.
    """

    kept_N: Tensor
    aggregator: Aggregator | None
    points_KE: Tensor | None

    def like(self, other: Verdict) -> bool:
        """Whether two tensors can be combined in one go."""
        if (self.points_KE is None) != (other.points_KE is None) or not torch.equal(self.kept_N, other.kept_N):
            return False
        return self.points_KE is None or other.points_KE is None or torch.equal(self.points_KE, other.points_KE)

    def distances_in(self, basis_EE: Tensor) -> Tensor:
        """Squared distances of all rows to the aggregate in one block, [n] float64, 0 for rows that were removed.

        Args:
            basis_EE: matrix of that block, [n+1, n+1], for a rule whose output is a point.
        """
        distances_N = torch.zeros(self.kept_N.numel(), dtype=torch.float64)
        if self.points_KE is not None:
            index = torch.cat([self.kept_N.nonzero()[:, 0], torch.tensor([self.kept_N.numel()])])
            geometry = Geometry.of_rows(basis_EE[index][:, index][None])
            distances_N[index[:-1]] = geometry.distances_to(self.points_KE[:1])[0]
        return distances_N


@dataclass(frozen=True)
class Attempt:
    """The aggregate of a chunk as it is if all rows take part, made while the rows were looked at for the first time.

    Args:
        finite_PN: which rows are finite in each piece of the chunk, uint8 [P, n] on the CPU.
        distances: squared distances of the rows to the aggregate in each piece, float64 [n].
    """

    finite_PN: Tensor
    distances: Mapping[Piece, Tensor]

    @classmethod
    def at(cls, rows_ND: Tensor, pieces: Sequence[Piece], out_D: Tensor, ready: Aggregator) -> Attempt | None:
        """Aggregate all rows into `out_D` [D]; None if the rule cannot do that in one pass over these rows [n, D]."""
        flags, distances = [], {}
        for piece in pieces:
            piece_ND = rows_ND[:, piece.start : piece.stop]
            found_N = ready.combine_unseen(piece_ND, out_D[piece.start : piece.stop])
            if found_N is None:
                return None
            distances[piece] = found_N
            finite_N = torch.isfinite(found_N)
            flags.append(finite_N if finite_N.all() else finite_rows(piece_ND))
        return cls(torch.stack(flags).to(torch.uint8), distances) if flags else None


def piece_statistics(rows_ND: Tensor, kept_N: Tensor | None, with_gram: bool) -> Tensor:
    """What an aggregator says about its piece of a tensor.

    Args:
        rows_ND: the piece, [n, D].
        kept_N: rows to use, bool [n], as agreed in an earlier round; None: those that are finite here.
        with_gram: whether the rule needs inner products.

    Returns:
        Without Gram [n] uint8 flags; with it float64 flags, followed by the upper triangle of the (n+1) x (n+1) basis
        matrix, in which rows that are not used have zeros. On the rows' device.
    """
    n = rows_ND.shape[0]
    if not with_gram:
        return finite_rows(rows_ND).to(torch.uint8)
    if kept_N is None:
        basis_EE = partial_basis(rows_ND)
        kept = torch.isfinite(torch.diagonal(basis_EE)).all().expand(n)  # all finite, or a second look tells which
        if not kept[0]:
            kept = finite_rows(rows_ND)
    else:
        kept = kept_N.to(rows_ND.device)
    if kept_N is not None or not kept.all():
        basis_EE = partial_basis(rows_ND[kept])
        full = torch.zeros(n + 1, n + 1, dtype=torch.float64, device=rows_ND.device)
        index = torch.cat([kept.nonzero()[:, 0], torch.tensor([n], device=rows_ND.device)])
        full[index[:, None], index] = basis_EE
        basis_EE = full
    upper = torch.triu_indices(n + 1, n + 1, device=rows_ND.device)
    # A square that overflows float64 makes the row unusable, exactly as Inf would.
    kept = kept & torch.isfinite(torch.diagonal(basis_EE))[:-1]
    return torch.cat([kept.double(), basis_EE[upper[0], upper[1]]])


def add_up(partials: list[Tensor], tensors_of: list[list[int]], tensors: int, n: int) -> tuple[Tensor, Tensor | None]:
    """Sum the partial statistics of all chunks, in rank order.

    Args:
        partials: per chunk, [pieces, W].
        tensors_of: per chunk, the tensor number of each piece.

    Returns:
        finite_TN (bool: finite in every piece) and basis_TEE (float64), or None if W holds flags only.
    """
    width = partials[0].shape[1]
    bad_TN = torch.zeros(tensors, n, dtype=torch.float64)
    total = torch.zeros(tensors, width - n, dtype=torch.float64)
    for partial, numbers in zip(partials, tensors_of, strict=True):
        index = torch.tensor(numbers, dtype=torch.long)
        bad_TN.index_add_(0, index, (partial[:, :n] == 0).double())
        total.index_add_(0, index, partial[:, n:].double())
    finite_TN = bad_TN == 0
    if width == n:
        return finite_TN, None
    upper = torch.triu_indices(n + 1, n + 1)
    basis_TEE = torch.zeros(tensors, n + 1, n + 1, dtype=torch.float64)
    basis_TEE[:, upper[0], upper[1]] = total
    basis_TEE[:, upper[1], upper[0]] = total
    return finite_TN, basis_TEE


def decide(
    ready: Aggregator, finite_TN: Tensor, basis_TEE: Tensor | None, seed: int
) -> tuple[list[Verdict], Tensor | None]:
    """One verdict per tensor, batched over the tensors that kept the same rows.

    Returns:
        The verdicts, and the squared distances of all rows to the aggregate, [T, n] float64 with 0 for rows that were
        removed; None if the rule is not known from inner products alone.
    """
    tensors, n = finite_TN.shape
    verdicts: list[Verdict | None] = [None] * tensors
    distances_TN = torch.zeros(tensors, n, dtype=torch.float64) if basis_TEE is not None else None
    groups: dict[bytes, list[int]] = defaultdict(list)
    for t in range(tensors):
        groups[finite_TN[t].numpy().tobytes()].append(t)
    for members in groups.values():
        kept_N = finite_TN[members[0]]
        lost = n - int(kept_N.sum())
        if lost > ready.f or lost == n:
            points_TKE, now = None, None
        else:
            now = ready.without(lost)
            points_TKE = None
            if basis_TEE is not None:
                index = torch.cat([kept_N.nonzero()[:, 0], torch.tensor([n])])
                sub = basis_TEE[members][:, index][:, :, index]
                points_TKE = now.decide(sub, seed)
                if distances_TN is not None and points_TKE is not None and points_TKE.shape[1] == 1:
                    near = Geometry.of_rows(sub).distances_to(points_TKE[:, 0])
                    distances_TN[torch.tensor(members)[:, None], index[:-1]] = near
        for i, t in enumerate(members):
            verdicts[t] = Verdict(kept_N, now, None if points_TKE is None else points_TKE[i])
    if not ready.output_is_point:
        distances_TN = None
    return [v for v in verdicts if v is not None], distances_TN


def combine_pieces(
    rows_ND: Tensor,
    pieces: Sequence[Piece],
    verdicts: Sequence[Verdict],
    out_D: Tensor,
    distances_N: Tensor | None,
    attempt: Attempt | None = None,
) -> None:
    """Carry out the verdicts on the rows of a chunk.

    Args:
        rows_ND: the chunk's rows, [n, D].
        pieces: the tensors' pieces, by ascending `start`, covering the chunk.
        verdicts: of all tensors of the bucket.
        out_D: [D], receives the aggregate.
        distances_N: float64 [n]; if given, the rows' squared distances to the aggregate are added.
        attempt: what lies in `out_D` already; it holds for the tensors of which all rows take part.
    """
    if attempt is not None:
        held = [piece for piece in pieces if bool(verdicts[piece.tensor].kept_N.all())]
        if distances_N is not None:
            for piece in held:
                distances_N += attempt.distances[piece]
        pieces = [piece for piece in pieces if piece not in held]
    for run, verdict in _runs(pieces, verdicts):
        piece_ND, piece_D = rows_ND[:, run.start : run.stop], out_D[run.start : run.stop]
        if verdict.aggregator is None:
            piece_D.fill_(float("nan"))
            continue
        whole = bool(verdict.kept_N.all())
        used_ND = piece_ND if whole else piece_ND[verdict.kept_N.to(rows_ND.device)]
        verdict.aggregator.combine(used_ND, verdict.points_KE, piece_D)
        if distances_N is not None:
            distances_N[verdict.kept_N] += _squared_distances(used_ND, piece_D)


def _runs(pieces: Sequence[Piece], verdicts: Sequence[Verdict]) -> list[tuple[Piece, Verdict]]:
    """Neighbouring pieces with the same verdict as one run: fewer, longer passes."""
    out: list[tuple[Piece, Verdict]] = []
    for piece in pieces:
        verdict = verdicts[piece.tensor]
        if out and out[-1][0].stop == piece.start and out[-1][1].like(verdict):
            out[-1] = (Piece(out[-1][0].tensor, out[-1][0].start, piece.stop), verdict)
        else:
            out.append((piece, verdict))
    return out


def _squared_distances(rows_ND: Tensor, out_D: Tensor) -> Tensor:
    """||x_i - out||^2 in cache-sized blocks, [n] float64 on the CPU."""
    if native.ready(rows_ND) and out_D.dtype == compute_dtype(rows_ND.dtype) and out_D.is_contiguous():
        return native.squared_distances(rows_ND, out_D)
    total = torch.zeros(rows_ND.shape[0], dtype=torch.float64, device=rows_ND.device)
    start = 0
    for block_NB in column_blocks(rows_ND):
        stop = start + block_NB.shape[1]
        total += (block_NB - out_D[start:stop]).square_().sum(1, dtype=torch.float64)
        start = stop
    return total.cpu()
