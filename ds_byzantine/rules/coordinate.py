"""Rules that treat every coordinate on its own: [n, D] -> [D], from order statistics over the rows."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_byzantine.rules.base import implements
from ds_byzantine.rules.network import Ranks
from ds_byzantine.rules.sorting import median_of_rows, of_ranks


def _all(n: int, f: int) -> Ranks:
    return Ranks(0, n)


def _middle(n: int, f: int) -> Ranks:
    return Ranks.middle(n)


def _trimmed(n: int, f: int) -> Ranks:
    cut = min(f, (n - 1) // 2)
    return Ranks(cut, n - cut)


def _around_median(n: int, f: int) -> Ranks:
    return Ranks.middle(n, keep=n - f)


def _around_trimmed(n: int, f: int) -> Ranks:
    return _trimmed(n, f)._replace(keep=n - f)


@implements("mean", ranks=_all)
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
    return of_ranks(rows_ND, _all(len(rows_ND), f))


@implements("median", ranks=_middle)
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
    return of_ranks(rows_ND, _middle(len(rows_ND), f))


@implements("trimmed_mean", ranks=_trimmed)
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
    return of_ranks(rows_ND, _trimmed(len(rows_ND), f))


@implements("meamed", ranks=_around_median)
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
    return of_ranks(rows_ND, _around_median(len(rows_ND), f))


@implements("phocas", ranks=_around_trimmed)
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
    return of_ranks(rows_ND, _around_trimmed(len(rows_ND), f))


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
