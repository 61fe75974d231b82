"""Filters along the top eigenvector of the rows' covariance. The D x D eigenproblem is solved exactly in Gram space.

If X holds the weighted, centred rows, X X^T (n x n) and X^T X (D x D) share their non-zero eigenvalues, and a unit
eigenvector u of the former gives the projections X v = sqrt(lambda) u on the eigenvector v of the latter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds_byzantine.rules.base import implements
from ds_byzantine.rules.geometry import Geometry

_TINY = 1e-300


@implements("caf")
def caf(geometry: Geometry, f: int) -> Tensor:
    """Covariance-bound agnostic filter: the weighted mean of least top variance on the way to n-2f weight.

    Each step zeroes at least the weight that lies farthest out, so there are at most n steps.

    Args:
        geometry: K points per block.
        f: bad points, K > 2f.

    Returns:
        One point per block, [T, n+1].

    Example:
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> rows = torch.tensor([[1.0], [1.5], [2.0], [2.5], [3.0], [4.0], [900.0]])
        >>> aggregate(rows, rule="caf", f=1)
        tensor([2.3338])

    Reference:
        Allouah, Guerraoui, Stephan 2025, algorithm 2; bound in docs/caf_gated.md.
    """
    return _filter(geometry, f, psi=0.0)


@implements("caf_gated")
def caf_gated(geometry: Geometry, f: int, *, psi: float = 3.0) -> Tensor:
    """`caf` that stops as soon as the top eigenvalue is at most psi times the median one: no attack, no tax.

    Args:
        geometry: K points per block.
        f: bad points, K > 2f.
        psi: how far the top eigenvalue may stand out.

    Returns:
        One point per block, [T, n+1].

    Example:
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> rows = torch.tensor([[1.0], [1.5], [2.0], [2.5], [3.0], [4.0], [900.0]])
        >>> aggregate(rows, rule="caf_gated", f=1)
        tensor([2.3338])

    Reference:
        docs/caf_gated.md, after Allouah, Guerraoui, Stephan 2025.
    """
    return _filter(geometry, f, psi)


@implements("dnc")
def dnc(geometry: Geometry, f: int, *, iterations: int = 3, factor: float = 1.0) -> Tensor:
    """Divide and conquer: mean of what is left after dropping the farthest points along the top direction, repeatedly.

    The published rule draws coordinates at random to make the singular vectors affordable, and intersects what several
    draws keep. In Gram space the exact direction costs nothing, so the rounds recompute it over what is left instead.

    Args:
        geometry: K points per block.
        f: bad points, K > 2f.
        iterations: rounds over which the drops are spread.
        factor: drops ceil(factor f) points in all, at most K-1.

    Returns:
        One point per block, [T, n+1].

    Example:
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> rows = torch.tensor([[1.0], [1.5], [2.0], [2.5], [3.0], [4.0], [900.0]])
        >>> aggregate(rows, rule="dnc", f=1)
        tensor([2.3333])

    Reference:
        Shejwalkar, Houmansadr 2021, algorithm 2.
    """
    drop = min(math.ceil(factor * f), geometry.count - 1)
    kept_TK = torch.ones(geometry.blocks, geometry.count, dtype=torch.float64)
    for dropped in sorted({drop * (r + 1) // iterations for r in range(iterations)} - {0}):
        spread_TK = _spectrum(geometry.gram_TKK, kept_TK)[1].masked_fill(kept_TK == 0, torch.inf)
        order_TK = torch.argsort(spread_TK, dim=-1, stable=True)
        kept_TK = torch.zeros_like(kept_TK).scatter_(-1, order_TK[:, : geometry.count - dropped], 1.0)
    return geometry.average(kept_TK)


def _filter(geometry: Geometry, f: int, psi: float) -> Tensor:
    """The loop of both. Centring zeroes one of the n eigenvalues; the gate looks at the lower median of the rest."""
    n, gram_TKK = geometry.count, geometry.gram_TKK
    c_TK = torch.ones(geometry.blocks, n, dtype=torch.float64)
    best_TK, least_T = c_TK, torch.full((geometry.blocks,), torch.inf, dtype=torch.float64)
    running_T = torch.ones(geometry.blocks, dtype=torch.bool)
    for _ in range(n):
        running_T = running_T & (c_TK.sum(-1) > n - 2 * f)
        if not bool(running_T.any()):
            break
        scatter_TK, tau_TK = _spectrum(gram_TKK, c_TK)
        variance_T = scatter_TK[:, -1] / c_TK.sum(-1)
        better_T = running_T & (variance_T < least_T)
        best_TK = torch.where(better_T[:, None], c_TK, best_TK)
        least_T = torch.where(better_T, variance_T, least_T)
        running_T = running_T & ~(scatter_TK[:, -1] <= psi * scatter_TK[:, n // 2])
        farthest_T1 = tau_TK.masked_fill(c_TK == 0, 0.0).amax(-1, keepdim=True)
        c_TK = c_TK * (1.0 - tau_TK / farthest_T1.clamp_min(_TINY)).clamp_min(0.0)
    return geometry.average(best_TK)


def _spectrum(gram_TKK: Tensor, c_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending eigenvalues of the c-weighted scatter matrix; tau_i = <v, x_i - mean_c>^2 up to a common factor."""
    shares_TK = c_TK / c_TK.sum(-1, keepdim=True)
    centred = gram_TKK - (gram_TKK @ shares_TK[:, :, None])
    centred = centred - (shares_TK[:, None, :] @ centred)
    root_TK = c_TK.sqrt()
    values_TK, vectors_TKK = torch.linalg.eigh(root_TK[:, :, None] * centred * root_TK[:, None, :])
    return values_TK, (centred @ (root_TK * vectors_TKK[..., -1])[:, :, None])[..., 0].square()
