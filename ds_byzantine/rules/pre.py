"""Pre-aggregations: mixing matrices on the points of a block, [T, L, K], chosen from their Gram matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_byzantine.rules.base import implements
from ds_byzantine.rules.geometry import Geometry

_TINY = 1e-150


@implements("nnm", pre=True)
def nnm(geometry: Geometry, f: int) -> Geometry:
    """Nearest-neighbour mixing: each point becomes the mean of its n-f nearest points, itself included.

    Args:
        geometry: K points per block.
        f: bad points, K > 2f.

    Returns:
        Geometry with K points.

    Example:
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> rows = torch.tensor([[1.0], [1.5], [2.0], [2.5], [3.0], [4.0], [900.0]])
        >>> aggregate(rows, rule="median", f=1, pre=("nnm",))
        tensor([2.3333])

    Reference:
        Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan 2023, algorithm 2.
    """
    near = geometry.count - f
    order_TKK = torch.argsort(geometry.distances_TKK, dim=-1, stable=True)
    mixing_TKK = torch.zeros_like(geometry.distances_TKK).scatter_(-1, order_TKK[..., :near], 1.0 / near)
    return geometry.mix(mixing_TKK)


@implements("bucketing", pre=True)
def bucketing(geometry: Geometry, f: int, *, size: int = 2, generator: torch.Generator) -> Geometry:
    """Means of buckets of `size` points, dealt out by one random permutation for all blocks; the last may be smaller.

    Args:
        geometry: K points per block.
        f: bad points; each spoils one bucket, so that f of the ceil(K / size) points are bad.
        size: points in a bucket.
        generator: seeded alike on every rank.

    Returns:
        Geometry with ceil(K / size) points.

    Example:
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> rows = torch.tensor([[1.0], [1.5], [2.0], [2.5], [3.0], [4.0], [900.0]])
        >>> aggregate(rows, rule="median", f=1, pre=("bucketing",))
        tensor([3.])

    Reference:
        Karimireddy, He, Jaggi 2022, algorithm 1.
    """
    order_K = torch.randperm(geometry.count, generator=generator)
    buckets = torch.split(order_K, size)
    mixing_LK = torch.zeros(len(buckets), geometry.count, dtype=torch.float64)
    for bucket, members in enumerate(buckets):
        mixing_LK[bucket, members] = 1.0 / len(members)
    return geometry.mix(mixing_LK.expand(geometry.blocks, -1, -1))


@implements("arc", pre=True)
def arc(geometry: Geometry, f: int) -> Geometry:
    """Adaptive robust clipping: the k = floor(2f(n-f)/n) longest points are cut to the length of the next longest.

    Args:
        geometry: K points per block.
        f: bad points, K > 2f.

    Returns:
        Geometry with K points.

    Example:
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> rows = torch.tensor([[1.0], [1.5], [2.0], [2.5], [3.0], [4.0], [900.0]])
        >>> aggregate(rows, rule="median", f=1, pre=("arc",))
        tensor([2.5000])

    Reference:
        Allouah, Guerraoui, Gupta, Jellouli, Rizk, Stephan 2024, algorithm 2.
    """
    n = geometry.count
    k = 2 * f * (n - f) // n
    longest_TK = geometry.norms_TK.sqrt().sort(-1, descending=True).values
    return _shortened(geometry, longest_TK[:, k, None])


@implements("clip", pre=True)
def clip(geometry: Geometry, f: int, *, norm: float = 1.0) -> Geometry:
    """Static clipping: x <- x min(1, norm / ||x||).

    Args:
        geometry: K points per block.
        f: bad points; the value does not matter.
        norm: longest length that is left alone.

    Returns:
        Geometry with K points.

    Example:
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> rows = torch.tensor([[1.0], [1.5], [2.0], [2.5], [3.0], [4.0], [900.0]])
        >>> aggregate(rows, rule="mean", f=0, pre=({"name": "clip", "norm": 2.0},))
        tensor([1.7857])

    Reference:
        Abadi et al. 2016, section 3.1, for the operation.
    """
    return _shortened(geometry, torch.full((geometry.blocks, 1), norm, dtype=torch.float64))


def _shortened(geometry: Geometry, length_T1: Tensor) -> Geometry:
    shares_TK = (length_T1 / geometry.norms_TK.sqrt().clamp_min(_TINY)).clamp_max(1.0)
    return geometry.mix(torch.diag_embed(shares_TK))
