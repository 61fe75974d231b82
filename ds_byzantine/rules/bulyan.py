"""Bulyan: a selection by iterated Krum, then a coordinate-wise mean around the median of the selected rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_byzantine.rules.base import implements
from ds_byzantine.rules.geometry import Geometry
from ds_byzantine.rules.krum import scores
from ds_byzantine.rules.network import Ranks
from ds_byzantine.rules.sorting import of_ranks


def bulyan_finish(rows_KD: Tensor, f: int, *, neighbors: str = "n-f-2") -> Tensor:
    """Mean, per coordinate, of the K-2f values nearest the median of the K selected rows.

    Args:
        rows_KD: selected rows, [K, D], float32 or float64.
        f: bad rows, K > 2f.
        neighbors: of the selection; not used here.

    Returns:
        [D] of the same dtype.

    Example:
        >>> bulyan_finish(torch.tensor([[0.0], [2.0], [3.0], [4.0], [9.0]]), 1)
        tensor([3.])

    Reference:
        El Mhamdi, Guerraoui, Rouault 2018, section 4.
    """
    k = len(rows_KD)
    return of_ranks(rows_KD, Ranks.middle(k, keep=max(k - 2 * f, 1)))


@implements("bulyan", finish=bulyan_finish)
def bulyan(geometry: Geometry, f: int, *, neighbors: str = "n-f-2") -> Geometry:
    """The K-2f points that Krum picks one after the other, each time from those that are left.

    Args:
        geometry: K points per block.
        f: bad points, K >= 4f+3.
        neighbors: others that a score sums over, counted among the points left: "n-f-2" or "n-f-1".

    Returns:
        Geometry with the K-2f picked points, by ascending index.

    Example:
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> rows = torch.tensor([[1.0], [1.5], [2.0], [2.5], [3.0], [4.0], [900.0]])
        >>> aggregate(rows, rule="bulyan", f=1)
        tensor([2.])

    Reference:
        El Mhamdi, Guerraoui, Rouault 2018, section 4, with Krum for the selection.
    """
    distances_TKK = geometry.distances_TKK.clone()
    picked_TK = torch.zeros(geometry.blocks, geometry.count, dtype=torch.bool)
    for alive in range(geometry.count, min(2 * f, geometry.count - 1), -1):
        scores_TK = scores(distances_TKK, alive, f, neighbors).masked_fill(picked_TK, torch.inf)
        winner_T1 = scores_TK.argmin(-1, keepdim=True)
        picked_TK = picked_TK.scatter(-1, winner_T1, True)
        distances_TKK.masked_fill_(picked_TK[:, None, :], torch.inf)
    # Rows of the identity that belong to a pick, in order: the selection as a mixing matrix.
    order_TL = torch.argsort(picked_TK, dim=-1, descending=True, stable=True)[:, : max(geometry.count - 2 * f, 1)]
    return geometry.mix(torch.eye(geometry.count, dtype=torch.float64)[order_TL])
