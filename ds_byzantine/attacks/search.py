"""Colluding attacks that try their strength out on the rule in use before they send anything."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ds_byzantine.attacks.base import AttackInfo, implements, known
from ds_byzantine.attacks.catalog import z_max
from ds_byzantine.attacks.collusion import alie, ipm


@implements("alie_search")
def alie_search(
    own_D: Tensor, honest_HD: Tensor | None, info: AttackInfo, *, most: float = 8.0, tries: int = 16
) -> Tensor:
    """`alie` with the z that moves the rule in use furthest from the honest mean, on the rows at hand.

    Args:
        own_D: gives shape and dtype, [D] floating.
        honest_HD: rows of the honest replicas, [H, D] floating, H >= 1.
        info: n, f and the rule in use, which sees the honest rows and f copies of the row that is tried.
        most: largest z that is tried, > 0.
        tries: how often the rule is run at most; first with `z_max(n, f)`, so the result harms no less.

    Returns:
        [D] of the same dtype as `own_D`.

    Raises:
        ValueError: the honest rows or the rule are missing.

    Example:
        >>> info = AttackInfo(4, 1, 0, torch.Generator(), aggregate=lambda rows_ND: rows_ND.mean(0))
        >>> honest = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])
        >>> alie_search(honest[0], honest, info, most=3.0)  # the mean follows any z: the largest is the worst
        tensor([-1.,  0.])

    Reference:
        Baruch, Baruch and Goldberg (2019) for the attack; Allouah et al. (2023), Fixing by mixing, for the search.
    """

    def row_at(z: float) -> Tensor:
        return alie(own_D, honest_HD, info, z=z)

    return row_at(_worst(row_at, honest_HD, info, z_max(info.n, info.f), most, tries))


@implements("ipm_search")
def ipm_search(
    own_D: Tensor, honest_HD: Tensor | None, info: AttackInfo, *, most: float = 16.0, tries: int = 16
) -> Tensor:
    """`ipm` with the epsilon that moves the rule in use furthest from the honest mean, on the rows at hand.

    Args:
        own_D: gives shape and dtype, [D] floating.
        honest_HD: rows of the honest replicas, [H, D] floating, H >= 1.
        info: f and the rule in use, which sees the honest rows and f copies of the row that is tried.
        most: largest epsilon that is tried, > 0.
        tries: how often the rule is run at most; first with 0.5, the default of `ipm`, so the result harms no less.

    Returns:
        [D] of the same dtype as `own_D`.

    Raises:
        ValueError: the honest rows or the rule are missing.

    Example:
        >>> info = AttackInfo(4, 1, 0, torch.Generator(), aggregate=lambda rows_ND: rows_ND.mean(0))
        >>> honest = torch.tensor([[1.0, 4.0], [3.0, 8.0]])
        >>> ipm_search(honest[0], honest, info, most=2.0)
        tensor([ -4., -12.])

    Reference:
        Xie, Koyejo and Gupta (2019) for the attack; Allouah et al. (2023), Fixing by mixing, for the search.
    """

    def row_at(epsilon: float) -> Tensor:
        return ipm(own_D, honest_HD, info, epsilon=epsilon)

    return row_at(_worst(row_at, honest_HD, info, 0.5, most, tries))


def _worst(
    row_at: Callable[[float], Tensor],
    honest_HD: Tensor | None,
    info: AttackInfo,
    first: float,
    most: float,
    tries: int,
) -> float:
    """The strength at which the rule's output is furthest from the honest mean."""
    mu_D = known(honest_HD).double().mean(0)
    assert honest_HD is not None
    rule = info.aggregate
    if rule is None:
        raise ValueError("info.aggregate: this attack tries the rule in use, but none is given. Pass it in AttackInfo.")

    def harm(strength: float) -> float:
        bad_D = row_at(strength).to(honest_HD.dtype)
        out_D = rule(torch.cat([honest_HD, bad_D.expand(info.f, -1)]))
        moved = float(torch.linalg.vector_norm(out_D.double() - mu_D))
        return moved if math.isfinite(moved) else -1.0  # such a step is skipped: no harm to the parameters

    return _line_search(harm, first, most, tries)


def _line_search(harm: Callable[[float], float], first: float, most: float, tries: int) -> float:
    """`first` and halvings of `most`, then ever closer around the best so far; the first of equals.

    By ratios: what hides from a rule may be many times smaller than what breaks it.
    """
    found = {first: harm(first)}

    def attempt(strength: float) -> None:
        if strength <= most and strength not in found and len(found) < tries:
            found[strength] = harm(strength)

    for i in range(max(tries // 2, 1)):
        attempt(most * 0.5**i)
    ratio = 2.0
    while len(found) < tries and ratio > 1.001:
        ratio = math.sqrt(ratio)
        best = max(found, key=found.__getitem__)
        attempt(best * ratio)
        attempt(best / ratio)
    return max(found, key=found.__getitem__)
