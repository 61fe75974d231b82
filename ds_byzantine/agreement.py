"""The statistics of a bucket's tensors, on which all ranks agree before anyone decides.

Each aggregator sees its chunk only. It says which rows are finite there and, for Gram rules, what their inner products
are; the sums over the chunks are the tensors' statistics, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_byzantine.exchange.all_to_all import gather_partials
from ds_byzantine.exchange.routes import Routes
from ds_byzantine.exchange.transport import Transport
from ds_byzantine.monitor.recorder import Recorder
from ds_byzantine.rules.verdicts import add_up, piece_statistics
from ds_byzantine.types import Piece


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
