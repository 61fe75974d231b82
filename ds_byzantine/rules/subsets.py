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

# Float64 numbers that one chunk of subsets may hold at a time (32 MiB).
_CHUNK = 4 * 1024 * 1024


@implements("mda")
def mda(geometry: Geometry, f: int) -> Tensor:
    """Minimum diameter averaging: mean of the (n-f)-subset with the least largest distance.

    Args:
        geometry: K points per block.
        f: bad points, K > 2f.

    Returns:
        One point per block, [T, n+1].

    Reference:
        Rousseeuw 1985; El Mhamdi, Farhadkhani, Guerraoui, Guirguis, Hoang, Rouault 2021.
    """
    return _tightest(geometry, f, geometry.distances_TKK, lambda distances_TCMM: distances_TCMM.amax((-2, -1)))


@implements("min_variance")
def min_variance(geometry: Geometry, f: int) -> Tensor:
    """Minimum variance averaging: mean of the (n-f)-subset with the least sum of squared distances.

    Args:
        geometry: K points per block.
        f: bad points, K > 2f.

    Returns:
        One point per block, [T, n+1].

    Reference:
        El Mhamdi et al. 2021; kappa <= 4f/(n-2f), docs/caf_gated.md.
    """
    return _tightest(geometry, f, geometry.distances_TKK, lambda distances_TCMM: distances_TCMM.sum((-2, -1)))


@implements("smea")
def smea(geometry: Geometry, f: int) -> Tensor:
    """Smallest maximum eigenvalue averaging: mean of the (n-f)-subset whose covariance has the least top eigenvalue.

    Args:
        geometry: K points per block.
        f: bad points, K > 2f.

    Returns:
        One point per block, [T, n+1].

    Reference:
        Allouah, Guerraoui, Gupta, Pinot, Stephan 2023 (SMEA); kappa <= 4f/(n-2f), docs/caf_gated.md.
    """
    return _tightest(geometry, f, geometry.gram_TKK, _top_eigenvalue)


def _top_eigenvalue(gram_TCMM: Tensor) -> Tensor:
    """Largest eigenvalue of each subset's scatter matrix; the Gram matrix about the subset's mean shares it."""
    centred = gram_TCMM - gram_TCMM.mean(-1, keepdim=True)
    values_TCM: Tensor = torch.linalg.eigvalsh(centred - centred.mean(-2, keepdim=True))
    return values_TCM[..., -1]


def _tightest(geometry: Geometry, f: int, pairs_TKK: Tensor, width: Callable[[Tensor], Tensor]) -> Tensor:
    """Mean of the subset whose sub-matrix of `pairs` has the least `width`."""
    subsets_CM = _subsets(geometry.count, geometry.count - f)
    chunk = max(1, _CHUNK // (geometry.blocks * subsets_CM.shape[1] ** 2))
    widths_TC = [width(pairs_TKK[:, s[:, :, None], s[:, None, :]]) for s in torch.split(subsets_CM, chunk)]
    return geometry.average_of(subsets_CM[torch.cat(widths_TC, -1).argmin(-1)])


@lru_cache(maxsize=16)
def _subsets(n: int, size: int) -> Tensor:
    """All subsets, in lexicographic order, [C, size]. Shared: read only."""
    return torch.tensor(list(combinations(range(n), size)), dtype=torch.int64).reshape(-1, size)
