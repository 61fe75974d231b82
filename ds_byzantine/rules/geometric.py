"""Iterations towards a robust centre that run wholly in coefficient space, from the block's median."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_byzantine.rules.base import implements
from ds_byzantine.rules.geometry import Geometry

# Keeps divisions by a distance of zero finite, also when n of them are summed.
_TINY = 1e-150


@implements("geometric_median")
def geometric_median(
    geometry: Geometry, f: int, *, nu: float = 0.0, iterations: int = 16, start: str = "median"
) -> Tensor:
    """Smoothed Weiszfeld steps z <- sum w_i x_i / sum w_i with w_i = 1 / max(nu, ||z - x_i||).

    Args:
        geometry: K points per block.
        f: bad points, K > 2f; the value does not matter.
        nu: smoothing distance. A fixed one turns the rule into the mean for rows that are nearer than nu to each other,
            so the default 0 stands for 1e-6 times the points' median distance to the start.
        iterations: Weiszfeld steps.
        start: "median" of the block's rows; "mean" or "zero" as in other libraries ("mean" lets one outlier choose
            the start, "zero" is not translation-equivariant).

    Returns:
        One point per block, [T, n+1].

    Example:
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> rows = torch.tensor([[1.0], [1.5], [2.0], [2.5], [3.0], [4.0], [900.0]])
        >>> aggregate(rows, rule="geometric_median", f=1)
        tensor([2.5000])

    Reference:
        Weiszfeld 1937; Pillutla, Kakade, Harchaoui 2019, algorithm 2.
    """
    z_TE = geometry.median_TE
    if start != "median":
        z_TE = geometry.points_TKE.mean(1) if start == "mean" else torch.zeros_like(z_TE)
    distance_TK = geometry.distances_to(z_TE).sqrt()
    floor_T1 = torch.full_like(distance_TK[:, :1], nu) if nu else 1e-6 * _median(distance_TK)
    for _ in range(iterations):
        z_TE = geometry.average(1.0 / torch.maximum(distance_TK, floor_T1).clamp_min(_TINY))
        distance_TK = geometry.distances_to(z_TE).sqrt()
    return z_TE


@implements("centered_clip")
def centered_clip(geometry: Geometry, f: int, *, tau: float = 0.0, iterations: int = 5, factor: float = 1.5) -> Tensor:
    """Steps v <- v + mean_i (x_i - v) min(1, tau / ||x_i - v||) from the block's median.

    Rows that are all about equally far from the median are not clipped at all: the result is their mean.

    Args:
        geometry: K points per block.
        f: bad points, K > 2f; the value does not matter.
        tau: clipping radius; 0 stands for `factor` times the points' median distance to the block's median. A fixed one
            has to follow the scale of the rows.
        iterations: clipping steps.
        factor: of the adaptive radius.

    Returns:
        One point per block, [T, n+1].

    Example:
        >>> from ds_byzantine.rules.aggregate import aggregate
        >>> rows = torch.tensor([[1.0], [1.5], [2.0], [2.5], [3.0], [4.0], [900.0]])
        >>> aggregate(rows, rule="centered_clip", f=1)
        tensor([2.5998])

    Reference:
        Karimireddy, He, Jaggi 2021, algorithm 2; start and radius are ours.
    """
    v_TE = geometry.median_TE
    distance_TK = geometry.distances_to(v_TE).sqrt()
    radius_T1 = torch.full_like(distance_TK[:, :1], tau) if tau else factor * _median(distance_TK)
    for _ in range(iterations):
        share_TK = (radius_T1 / distance_TK.clamp_min(_TINY)).clamp_max(1.0)
        v_TE = v_TE + (share_TK[:, :, None] * (geometry.points_TKE - v_TE[:, None, :])).mean(1)
        distance_TK = geometry.distances_to(v_TE).sqrt()
    return v_TE


def _median(values_TK: Tensor) -> Tensor:
    """[T, K] -> [T, 1]; the mean of the two middle values for even K."""
    ascending, k = values_TK.sort(-1).values, values_TK.shape[-1]
    return (ascending[:, (k - 1) // 2, None] + ascending[:, k // 2, None]) / 2
