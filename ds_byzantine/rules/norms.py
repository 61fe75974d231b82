"""Rules that look at the length of a row alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_byzantine.rules.base import implements
from ds_byzantine.rules.geometry import Geometry


@implements("cge")
def cge(geometry: Geometry, f: int) -> Tensor:
    """Comparative gradient elimination: mean of the n-f rows of least norm; of equals those with the lowest index.

    It says nothing about direction: an attacker that keeps its rows short is always averaged.

    Args:
        geometry: K points per block.
        f: bad points, K > 2f.

    Returns:
        One point per block, [T, n+1].

    Example:
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> rows = torch.tensor([[1.0], [1.5], [2.0], [2.5], [3.0], [4.0], [900.0]])
        >>> aggregate(rows, rule="cge", f=1)
        tensor([2.3333])

    Reference:
        Gupta, Liu, Vaidya 2021.
    """
    order_TK = torch.argsort(geometry.norms_TK, dim=-1, stable=True)
    return geometry.average_of(order_TK[:, : geometry.count - f])
