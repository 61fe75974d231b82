"""Rules that search all (n-f)-subsets of the rows for the tightest one, exactly, and return its mean.

The three differ in what "tight" means. `plan.py` bounds the number of subsets. Of equally tight subsets the
lexicographically first one wins. Bound for min_variance and smea: docs/caf_gated.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

from ds_byzantine.rules.base import implements
from ds_byzantine.rules.geometry import Geometry

# Float64 numbers that one chunk of subsets may hold at a time (8 MiB).
_CHUNK = 1024 * 1024


@implements("mda")
def mda(geometry: Geometry, f: int) -> Tensor:
    """Minimum diameter averaging: mean of the (n-f)-subset with the least largest distance.

    Args:
        geometry: K points per block.
        f: bad points, K > 2f.

    Returns:
        One point per block, [T, n+1].

    Example:
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> rows = torch.tensor([[1.0], [1.5], [2.0], [2.5], [3.0], [4.0], [900.0]])
        >>> aggregate(rows, rule="mda", f=1)
        tensor([2.3333])

    Reference:
        Rousseeuw 1985; El Mhamdi, Farhadkhani, Guerraoui, Guirguis, Hoang, Rouault 2021.
    """
    return _tightest(geometry, f, geometry.distances_TKK, _diameter)


@implements("min_variance")
def min_variance(geometry: Geometry, f: int) -> Tensor:
    """Minimum variance averaging: mean of the (n-f)-subset with the least sum of squared distances.

    Args:
        geometry: K points per block.
        f: bad points, K > 2f.

    Returns:
        One point per block, [T, n+1].

    Example:
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> rows = torch.tensor([[1.0], [1.5], [2.0], [2.5], [3.0], [4.0], [900.0]])
        >>> aggregate(rows, rule="min_variance", f=1)
        tensor([2.3333])

    Reference:
        El Mhamdi et al. 2021; kappa <= 4f/(n-2f), docs/caf_gated.md.
    """
    return _tightest(geometry, f, geometry.distances_TKK, _total)


@implements("smea")
def smea(geometry: Geometry, f: int) -> Tensor:
    """Smallest maximum eigenvalue averaging: mean of the (n-f)-subset whose covariance has the least top eigenvalue.

    Args:
        geometry: K points per block.
        f: bad points, K > 2f.

    Returns:
        One point per block, [T, n+1].

    Example:
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> rows = torch.tensor([[1.0], [1.5], [2.0], [2.5], [3.0], [4.0], [900.0]])
        >>> aggregate(rows, rule="smea", f=1)
        tensor([2.3333])

    Reference:
        Allouah, Guerraoui, Gupta, Pinot, Stephan 2023 (SMEA); kappa <= 4f/(n-2f), docs/caf_gated.md.
    """
    return _tightest(geometry, f, geometry.gram_TKK, _top_eigenvalue)


def _diameter(distances_TKK: Tensor, subsets_CM: Tensor) -> Tensor:
    """Largest distance within each subset, [T, C]."""
    i, j = torch.triu_indices(subsets_CM.shape[1], subsets_CM.shape[1])
    return distances_TKK[:, subsets_CM[:, i], subsets_CM[:, j]].amax(-1)


def _total(distances_TKK: Tensor, subsets_CM: Tensor) -> Tensor:
    """Sum of the distances within each subset, [T, C]."""
    members_CK = torch.zeros(len(subsets_CM), distances_TKK.shape[-1], dtype=torch.float64)
    members_CK.scatter_(-1, subsets_CM, 1.0)
    return ((members_CK @ distances_TKK) * members_CK).sum(-1)


def _top_eigenvalue(gram_TKK: Tensor, subsets_CM: Tensor) -> Tensor:
    """Largest eigenvalue of each subset's scatter matrix, [T, C]; the Gram matrix about the subset's mean shares it."""
    gram_TCMM = gram_TKK[:, subsets_CM[:, :, None], subsets_CM[:, None, :]]
    centred = gram_TCMM - gram_TCMM.mean(-1, keepdim=True)
    values_TCM: Tensor = torch.linalg.eigvalsh(centred - centred.mean(-2, keepdim=True))
    return values_TCM[..., -1]


def _tightest(geometry: Geometry, f: int, pairs_TKK: Tensor, width: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Mean of the subset whose sub-matrix of `pairs` has the least `width`."""
    subsets_CM = _subsets(geometry.count, geometry.count - f)
    chunk = max(1, _CHUNK // (geometry.blocks * subsets_CM.shape[1] ** 2))
    widths_TC = torch.cat([width(pairs_TKK, part_CM) for part_CM in torch.split(subsets_CM, chunk)], -1)
    return geometry.average_of(subsets_CM[widths_TC.argmin(-1)])


@lru_cache(maxsize=16)
def _subsets(n: int, size: int) -> Tensor:
    """All subsets, in lexicographic order, [C, size]. Shared: read only."""
    return torch.tensor(list(combinations(range(n), size)), dtype=torch.int64).reshape(-1, size)
