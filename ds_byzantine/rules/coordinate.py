"""Rules that treat every coordinate on its own: [n, D] -> [D], from order statistics over the rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_byzantine.rules.base import implements
from ds_byzantine.rules.sorting import mean_of_rows, median_of_rows, sorted_rows


@implements("mean")
def mean(rows_ND: Tensor, f: int) -> Tensor:
    """Plain mean of the rows.

    Args:
        rows_ND: finite rows, [n, D], float32 or float64.
        f: bad rows; the catalog admits 0 only.

    Returns:
        [D] of the same dtype.

    Example:
        >>> mean(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), 0)
        tensor([2., 4.])
    """
    return rows_ND.mean(0)


@implements("median")
def median(rows_ND: Tensor, f: int) -> Tensor:
    """Coordinate-wise median; for even n the mean of the two middle values.

    Args:
        rows_ND: finite rows, [n, D], float32 or float64.
        f: bad rows, n > 2f; the value does not matter.

    Returns:
        [D] of the same dtype.

    Example:
        >>> median(torch.tensor([[1.0], [2.0], [4.0], [1e30]]), 1)
        tensor([3.])

    Reference:
        Yin, Chen, Ramchandran, Bartlett 2018, definition 1.
    """
    return median_of_rows(rows_ND)


@implements("trimmed_mean")
def trimmed_mean(rows_ND: Tensor, f: int) -> Tensor:
    """Mean of the order statistics that are left without the f smallest and the f largest.

    The kept values are summed, never the extremes subtracted from a total: that would lose the signal below an outlier.

    Args:
        rows_ND: finite rows, [n, D], float32 or float64.
        f: bad rows, n > 2f.

    Returns:
        [D] of the same dtype.

    Example:
        >>> trimmed_mean(torch.tensor([[1.0], [2.0], [4.0], [1e30]]), 1)
        tensor([3.])

    Reference:
        Yin, Chen, Ramchandran, Bartlett 2018, definition 2.
    """
    cut = min(f, (len(rows_ND) - 1) // 2)
    return mean_of_rows(sorted_rows(rows_ND, cut, len(rows_ND) - cut, ordered=False))


@implements("meamed")
def meamed(rows_ND: Tensor, f: int) -> Tensor:
    """Mean around the median: the mean of the n-f values nearest it. Of two equally near values the lower counts.

    Args:
        rows_ND: finite rows, [n, D], float32 or float64.
        f: bad rows, n > 2f.

    Returns:
        [D] of the same dtype.

    Example:
        >>> meamed(torch.tensor([[1.0], [2.0], [3.0], [4.0], [9.0]]), 2)
        tensor([3.])

    Reference:
        Xie, Koyejo, Gupta 2018, "Generalized Byzantine-tolerant SGD", definition 8.
    """
    ranks = sorted_rows(rows_ND)
    return mean_nearest(ranks, median_of_rows(rows_ND), len(ranks) - f)


@implements("phocas")
def phocas(rows_ND: Tensor, f: int) -> Tensor:
    """Mean of the n-f values nearest the trimmed mean. Of two equally near values the lower counts.

    Args:
        rows_ND: finite rows, [n, D], float32 or float64.
        f: bad rows, n > 2f.

    Returns:
        [D] of the same dtype.

    Example:
        >>> phocas(torch.tensor([[0.0], [1.0], [5.0], [6.0], [20.0]]), 1)
        tensor([3.])

    Reference:
        Xie, Koyejo, Gupta 2018, "Phocas", definition 5.
    """
    ranks = sorted_rows(rows_ND)
    cut = min(f, (len(ranks) - 1) // 2)
    return mean_nearest(ranks, mean_of_rows(ranks[cut : len(ranks) - cut]), len(ranks) - f)


@implements("sign_majority")
def sign_majority(rows_ND: Tensor, f: int, *, scale: str = "median") -> Tensor:
    """Sign that most rows have, times a magnitude; 0 on a tie.

    Args:
        rows_ND: finite rows, [n, D], float32 or float64.
        f: bad rows, n > 2f; the value does not matter.
        scale: "median" (the coordinate's median of |x_i|, so that the output scales with the rows) or "one".

    Returns:
        [D] of the same dtype.

    Example:
        >>> sign_majority(torch.tensor([[1.0, -2.0], [3.0, -1.0], [-50.0, 5.0]]), 1)
        tensor([ 3., -2.])

    Reference:
        Bernstein, Zhao, Azizzadenesheli, Anandkumar 2019, signSGD with majority vote.
    """
    sign_D = torch.sign(rows_ND).sum(0).sign_()
    return sign_D if scale == "one" else sign_D.mul_(median_of_rows(rows_ND.abs()))


def mean_nearest(ranks: Sequence[Tensor], centre_D: Tensor, keep: int) -> Tensor:
    """Mean of the `keep` values nearest the centre, coordinate by coordinate.

    The nearest values are neighbours in rank: a window of `keep` ranks that starts at the lowest and moves up one rank
    as long as the value it gains is strictly nearer than the value it loses (so a tie stays with the lower window).

    Args:
        ranks: all order statistics, ascending, n rows of [D].
        centre_D: [D].
        keep: how many values to average, 1 <= keep <= n.

    Returns:
        [D].

    Example:
        >>> mean_nearest([torch.tensor([0.0]), torch.tensor([2.0]), torch.tensor([3.0])], torch.tensor([2.0]), 2)
        tensor([2.5000])
    """
    kept = list(ranks[:keep])
    for lost in range(len(ranks) - keep):
        gained_D = ranks[lost + keep]
        moves_D = centre_D - ranks[lost] > gained_D - centre_D
        kept[lost % keep] = torch.where(moves_D, gained_D, kept[lost % keep])
    return mean_of_rows(kept)
