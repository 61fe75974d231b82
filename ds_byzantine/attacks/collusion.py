"""Attacks computed from the honest rows. All colluders send the same row.

In a job they know the honest rows only because a drill gathers them: n times the traffic, block by block, and never
outside a drill. What is measured over the rows is therefore that of the block at hand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ds_byzantine.attacks.base import AttackInfo, implements, known
from ds_byzantine.attacks.catalog import z_max


@implements("alie")
def alie(own_D: Tensor, honest_HD: Tensor | None, info: AttackInfo, *, z: float | None = None) -> Tensor:
    """A little is enough: mu - z sigma of the honest rows, per coordinate, sigma with one degree of freedom removed.

    Args:
        own_D: gives shape and dtype, [D] floating.
        honest_HD: rows of the honest replicas, [H, D] floating, H >= 1 (sigma = 0 for H = 1).
        info: n and f, from which z is derived.
        z: standard deviations away from the mean; None: `z_max(n, f)`.

    Returns:
        [D] of the same dtype as `own_D`.

    Raises:
        ValueError: the honest rows are missing.

    Example:
        >>> info = AttackInfo(n=4, f=1, step=0, generator=torch.Generator())
        >>> honest = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])
        >>> alie(honest[0], honest, info, z=1.5)
        tensor([0.5000, 0.0000])

    Reference:
        Baruch, Baruch and Goldberg (2019), A little is enough: circumventing defenses for distributed learning.
    """
    wide_HD = known(honest_HD)
    mu_D = wide_HD.mean(0)
    sigma_D = wide_HD.std(0, correction=1) if wide_HD.shape[0] > 1 else torch.zeros_like(mu_D)
    reach = z_max(info.n, info.f) if z is None else z
    return (mu_D - reach * sigma_D).to(own_D.dtype)


@implements("ipm")
def ipm(own_D: Tensor, honest_HD: Tensor | None, info: AttackInfo, *, epsilon: float = 0.5) -> Tensor:
    """Inner product manipulation: -epsilon mu of the honest rows.

    Args:
        own_D: gives shape and dtype, [D] floating.
        honest_HD: rows of the honest replicas, [H, D] floating, H >= 1.
        info: not used.
        epsilon: size relative to the honest mean, >= 0. Small values hide from distance-based rules.

    Returns:
        [D] of the same dtype as `own_D`.

    Raises:
        ValueError: the honest rows are missing.

    Example:
        >>> info = AttackInfo(n=3, f=1, step=0, generator=torch.Generator())
        >>> honest = torch.tensor([[1.0, 4.0], [3.0, 8.0]])
        >>> ipm(honest[0], honest, info, epsilon=0.5)
        tensor([-1., -3.])

    Reference:
        Xie, Koyejo and Gupta (2019), Fall of Empires: breaking Byzantine-tolerant SGD by inner product manipulation.
    """
    return (known(honest_HD).mean(0) * -epsilon).to(own_D.dtype)


@implements("mimic")
def mimic(own_D: Tensor, honest_HD: Tensor | None, info: AttackInfo, *, replica: int = 0) -> Tensor:
    """The row of one honest replica, which thereby counts f + 1 times.

    It looks like honest work in every respect; it does harm where replicas have different data.

    Args:
        own_D: gives the dtype, [D] floating.
        honest_HD: rows of the honest replicas, [H, D] floating, H >= 1.
        info: its `honest` says which replicas these are.
        replica: index of the replica that is imitated, an honest one.

    Returns:
        [D] of the same dtype as `own_D`.

    Raises:
        ValueError: the honest rows are missing, or the replica is not one of them.

    Example:
        >>> info = AttackInfo(n=3, f=1, step=0, generator=torch.Generator(), honest=(0, 2))
        >>> honest = torch.tensor([[1.0, 4.0], [3.0, 8.0]])
        >>> mimic(honest[0], honest, info, replica=2)
        tensor([3., 8.])

    Reference:
        Karimireddy, He and Jaggi (2022), Byzantine-robust learning on heterogeneous datasets via bucketing. There the
        replica is the one that is furthest out in a learned direction; here it is named.
    """
    return _row_of(replica, "replica", own_D, honest_HD, info)


@implements("lazy_copy")
def lazy_copy(own_D: Tensor, honest_HD: Tensor | None, info: AttackInfo, *, of: int | None = None) -> Tensor:
    """A copy of another replica's row, bit by bit, as from a replica that does no work or reads another's data.

    Args:
        own_D: gives the dtype, [D] floating.
        honest_HD: rows of the honest replicas, [H, D] floating, H >= 1.
        info: its `honest` says which replicas these are.
        of: index of the replica that is copied, an honest one; None: the lowest of them.

    Returns:
        [D] of the same dtype as `own_D`.

    Raises:
        ValueError: the honest rows are missing, or the replica is not one of them.

    Example:
        >>> info = AttackInfo(n=3, f=1, step=0, generator=torch.Generator())
        >>> honest = torch.tensor([[1.0, 4.0], [3.0, 8.0]])
        >>> lazy_copy(torch.zeros(2), honest, info)
        tensor([1., 4.])

    Reference:
        Li et al. (2022), Blockchain assisted decentralized federated learning (BLADE-FL), for lazy clients.
    """
    lowest = info.honest[0] if info.honest else 0
    return _row_of(lowest if of is None else of, "of", own_D, honest_HD, info)


@implements("min_max")
def min_max(own_D: Tensor, honest_HD: Tensor | None, info: AttackInfo, *, perturbation: str = "std") -> Tensor:
    """mu + gamma p with the largest gamma at which no honest row is further away than two honest rows are apart.

    max_i ||m - x_i|| <= max_ij ||x_i - x_j||; gamma by halving steps, exact to a part in 10^8 of its upper bound.

    Args:
        own_D: gives shape and dtype, [D] floating.
        honest_HD: rows of the honest replicas, [H, D] floating, H >= 1 (gamma = 0 for H = 1).
        info: not used.
        perturbation: the direction p: "std" (-sigma per coordinate), "unit" (-mu / ||mu||) or "sign" (-sign mu).

    Returns:
        [D] of the same dtype as `own_D`, to which it is rounded after the search.

    Raises:
        ValueError: the honest rows are missing.

    Example:
        >>> info = AttackInfo(n=3, f=1, step=0, generator=torch.Generator())
        >>> honest = torch.tensor([[11.0], [12.0], [16.0]])
        >>> min_max(honest[0], honest, info)
        tensor([11.])

    Reference:
        Shejwalkar and Houmansadr (2021), Manipulating the Byzantine, the Min-Max attack and algorithm 1.
    """
    return _pushed(own_D, honest_HD, perturbation, torch.max)


@implements("min_sum")
def min_sum(own_D: Tensor, honest_HD: Tensor | None, info: AttackInfo, *, perturbation: str = "std") -> Tensor:
    """mu + gamma p with the largest gamma at which its squared distances add up to no more than an honest row's.

    sum_i ||m - x_i||^2 <= max_i sum_j ||x_i - x_j||^2; gamma as for `min_max`.

    Args:
        own_D: gives shape and dtype, [D] floating.
        honest_HD: rows of the honest replicas, [H, D] floating, H >= 1 (gamma = 0 for H = 1).
        info: not used.
        perturbation: the direction p: "std" (-sigma per coordinate), "unit" (-mu / ||mu||) or "sign" (-sign mu).

    Returns:
        [D] of the same dtype as `own_D`, to which it is rounded after the search.

    Raises:
        ValueError: the honest rows are missing.

    Example:
        >>> info = AttackInfo(n=3, f=1, step=0, generator=torch.Generator())
        >>> honest = torch.tensor([[11.0], [12.0], [16.0]])
        >>> min_sum(honest[0], honest, info)
        tensor([10.])

    Reference:
        Shejwalkar and Houmansadr (2021), Manipulating the Byzantine, the Min-Sum attack and algorithm 1.
    """
    return _pushed(own_D, honest_HD, perturbation, torch.sum)


def _row_of(replica: int, param: str, own_D: Tensor, honest_HD: Tensor | None, info: AttackInfo) -> Tensor:
    known(honest_HD)
    assert honest_HD is not None
    honest = list(info.honest or range(honest_HD.shape[0]))
    if replica not in honest:
        raise ValueError(f"{param}: got {replica}, but the honest replicas are {honest}. Name one of them.")
    return honest_HD[honest.index(replica)].to(own_D.dtype, copy=True)


def _pushed(own_D: Tensor, honest_HD: Tensor | None, perturbation: str, over: Callable[[Tensor], Tensor]) -> Tensor:
    """mu + gamma p; `over` says what of the distances to all honest rows is bounded: their largest or their sum."""
    wide_HD = known(honest_HD).double()
    mu_D = wide_HD.mean(0)
    p_D = _direction(wide_HD, mu_D, perturbation)
    offsets_HD = wide_HD - mu_D
    gram_HH = (offsets_HD @ offsets_HD.T).cpu()
    along_H, length = (offsets_HD @ p_D).cpu(), float(p_D @ p_D)
    squares_H = gram_HH.diagonal()
    apart_HH = squares_H[:, None] + squares_H - 2 * gram_HH
    bound = max(float(over(row_H)) for row_H in apart_HH)

    def fits(gamma: float) -> bool:
        return float(over(squares_H - 2 * gamma * along_H + gamma**2 * length)) <= bound

    # Beyond twice the largest distance between honest rows a row is too far from all of them.
    upper = 2 * (float(apart_HH.max()) / length) ** 0.5 if length > 0 else 0.0
    return (mu_D + _halving(fits, upper) * p_D).to(own_D.dtype)


def _direction(wide_HD: Tensor, mu_D: Tensor, perturbation: str) -> Tensor:
    if perturbation == "unit":
        norm: Tensor = torch.linalg.vector_norm(mu_D)
        return -mu_D / norm.clamp_min(torch.finfo(mu_D.dtype).tiny)
    if perturbation == "sign":
        return -mu_D.sign()
    return -wide_HD.std(0, correction=1) if wide_HD.shape[0] > 1 else torch.zeros_like(mu_D)


def _halving(fits: Callable[[float], bool], upper: float) -> float:
    """The largest gamma in [0, upper] found to fit, moved up from what fits and down from what does not."""
    gamma, best, step = upper / 2, 0.0, upper / 4
    for _ in range(30):
        if fits(gamma):
            best = gamma
            gamma += step
        else:
            gamma -= step
        step /= 2
    return best
