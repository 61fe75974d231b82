"""Krum and Multi-Krum: rows are scored by how near their nearest neighbours are."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_byzantine.rules.base import implements
from ds_byzantine.rules.geometry import Geometry


def scores(distances_TKK: Tensor, alive: int, f: int, neighbors: str) -> Tensor:
    """Krum score of each point: the sum of its least squared distances to others.

    Args:
        distances_TKK: squared distances, zero diagonal; infinite to points that no longer take part.
        alive: points that take part, n.
        f: bad points.
        neighbors: "n-f-2" or "n-f-1" others; never fewer than one.

    Returns:
        [T, K].
    """
    count = max(alive - f - (1 if neighbors == "n-f-1" else 2), 1)
    return distances_TKK.sort(-1).values[..., 1 : 1 + count].sum(-1)


@implements("krum")
def krum(geometry: Geometry, f: int, *, neighbors: str = "n-f-2") -> Tensor:
    """Row with the least score; of equals the one with the lowest index.

    Args:
        geometry: K points per block.
        f: bad points, K >= 2f+3 (K > 2f with "n-f-1").
        neighbors: others that a score sums over: "n-f-2" as published, "n-f-1" as in ByzFL.

    Returns:
        One point per block, [T, n+1].

    Example:
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> rows = torch.tensor([[1.0], [1.5], [2.0], [2.5], [3.0], [4.0], [900.0]])
        >>> aggregate(rows, rule="krum", f=1)
        tensor([2.])

    Reference:
        Blanchard, El Mhamdi, Guerraoui, Stainer 2017, section 4.
    """
    return geometry.average_of(_lowest(geometry, f, neighbors, 1))


@implements("multi_krum")
def multi_krum(geometry: Geometry, f: int, *, neighbors: str = "n-f-2", m: int = 0) -> Tensor:
    """Mean of the m rows with the least scores; of equals those with the lowest index.

    Args:
        geometry: K points per block.
        f: bad points, K >= 2f+3 (K > 2f with "n-f-1").
        neighbors: as in `krum`.
        m: points to average; 0, or more than K-f, stands for K-f.

    Returns:
        One point per block, [T, n+1].

    Example:
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> rows = torch.tensor([[1.0], [1.5], [2.0], [2.5], [3.0], [4.0], [900.0]])
        >>> aggregate(rows, rule="multi_krum", f=1)
        tensor([2.3333])

    Reference:
        Blanchard, El Mhamdi, Guerraoui, Stainer 2017, section 5.
    """
    most = geometry.count - f
    return geometry.average_of(_lowest(geometry, f, neighbors, min(m or most, most)))


def _lowest(geometry: Geometry, f: int, neighbors: str, m: int) -> Tensor:
    scores_TK = scores(geometry.distances_TKK, geometry.count, f, neighbors)
    return torch.argsort(scores_TK, dim=-1, stable=True)[:, :m]
