"""Attacks computed from the honest rows. All colluders send the same row."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_byzantine.attacks.base import AttackInfo, implements, widened
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
    wide_HD = _known(honest_HD)
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
    return (_known(honest_HD).mean(0) * -epsilon).to(own_D.dtype)


def _known(honest_HD: Tensor | None) -> Tensor:
    if honest_HD is None or honest_HD.shape[0] < 1:
        raise ValueError("honest_HD: a colluding attack is computed from the honest rows; pass at least one of them.")
    return widened(honest_HD)
