"""Attacks and faults of one replica that knows nothing of the others."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_byzantine.attacks.base import AttackInfo, implements, widened


@implements("sign_flip")
def sign_flip(own_D: Tensor, honest_HD: Tensor | None, info: AttackInfo, *, factor: float = 1.0) -> Tensor:
    """-factor x own gradient.

    Args:
        own_D: the gradient of this replica, [D] floating.
        honest_HD: not used.
        info: not used.
        factor: size relative to the true gradient, >= 0.

    Returns:
        [D] of the same dtype.

    Example:
        >>> info = AttackInfo(n=3, f=1, step=0, generator=torch.Generator())
        >>> sign_flip(torch.tensor([1.0, -2.0]), None, info, factor=3.0)
        tensor([-3.,  6.])

    Reference:
        Li et al. (2019), RSA: Byzantine-robust stochastic aggregation methods.
    """
    return (widened(own_D) * -factor).to(own_D.dtype)


@implements("scale")
def scale(own_D: Tensor, honest_HD: Tensor | None, info: AttackInfo, *, factor: float = 100.0) -> Tensor:
    """factor x own gradient.

    Args:
        own_D: the gradient of this replica, [D] floating.
        honest_HD: not used.
        info: not used.
        factor: any finite number. Large ones overflow float16 to Inf, as they would on a real replica.

    Returns:
        [D] of the same dtype.

    Example:
        >>> info = AttackInfo(n=3, f=1, step=0, generator=torch.Generator())
        >>> scale(torch.tensor([1.0, -2.0]), None, info, factor=10.0)
        tensor([ 10., -20.])

    Reference:
        Blanchard et al. (2017), Machine learning with adversaries.
    """
    return (widened(own_D) * factor).to(own_D.dtype)


@implements("zero")
def zero(own_D: Tensor, honest_HD: Tensor | None, info: AttackInfo) -> Tensor:
    """Zeros.

    Args:
        own_D: the gradient of this replica, [D] floating.
        honest_HD: not used.
        info: not used.

    Returns:
        [D] of the same dtype.

    Example:
        >>> zero(torch.tensor([1.0, -2.0]), None, AttackInfo(3, 1, 0, torch.Generator()))
        tensor([0., 0.])

    Reference:
        Li et al. (2019), RSA: Byzantine-robust stochastic aggregation methods.
    """
    return torch.zeros_like(own_D)


@implements("nan")
def nan(own_D: Tensor, honest_HD: Tensor | None, info: AttackInfo, *, kind: str = "nan") -> Tensor:
    """NaN or Inf in every element.

    Args:
        own_D: the gradient of this replica, [D] floating.
        honest_HD: not used.
        info: not used.
        kind: "nan" or "inf".

    Returns:
        [D] of the same dtype.

    Example:
        >>> nan(torch.tensor([1.0, -2.0]), None, AttackInfo(3, 1, 0, torch.Generator()), kind="inf")
        tensor([inf, inf])

    Reference:
        IEEE 754 special values, as left by an overflow or a flipped exponent bit.
    """
    return torch.full_like(own_D, float(kind))


@implements("gaussian")
def gaussian(
    own_D: Tensor, honest_HD: Tensor | None, info: AttackInfo, *, sigma: float = 1.0, relative: bool = True
) -> Tensor:
    """Centred Gaussian noise in place of the gradient.

    Args:
        own_D: the gradient of this replica, [D] floating.
        honest_HD: not used.
        info: its generator gives the noise.
        sigma: standard deviation, >= 0.
        relative: multiply sigma by the root mean square of `own_D`, so that the noise has the gradient's size whatever
            the model, the loss scale and the step. A row that is sent in pieces takes each piece's own.

    Returns:
        [D] of the same dtype.

    Example:
        >>> info = AttackInfo(n=3, f=1, step=0, generator=torch.Generator().manual_seed(0))
        >>> noise = gaussian(torch.full((10_000,), 0.01), None, info, sigma=2.0)
        >>> round(float(noise.std()), 3)
        0.02

    Reference:
        Blanchard et al. (2017), Machine learning with adversaries.
    """
    wide_D = widened(own_D)
    device = info.generator.device
    noise_D = torch.randn(own_D.shape, generator=info.generator, device=device, dtype=wide_D.dtype).to(own_D.device)
    size = wide_D.square().mean().sqrt() if relative and own_D.numel() else 1.0
    return (noise_D * sigma * size).to(own_D.dtype)
