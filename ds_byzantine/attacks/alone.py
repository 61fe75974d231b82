"""Attacks and faults of one replica that knows nothing of the others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ds_byzantine.attacks.base import AttackInfo, implements, seeded, widened


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


@implements("concentrated")
def concentrated(
    own_D: Tensor,
    honest_HD: Tensor | None,
    info: AttackInfo,
    *,
    share: float = 0.01,
    factor: float = -100.0,
    bucket: int | None = None,
) -> Tensor:
    """factor x own gradient in one run of neighbouring coordinates, the true gradient everywhere else.

    The run is drawn from the seed and the number of the bucket alone: all attackers spoil the same one, in every step.
    Another bucket layout has other runs.

    Args:
        own_D: the gradient of this replica, [D] floating.
        honest_HD: not used.
        info: its seed and call give the run.
        share: part of the coordinates, in (0, 1]; at least one is spoiled.
        factor: size relative to the true gradient, any finite number.
        bucket: the only bucket of a step that is spoiled, from 0; None: all of them.

    Returns:
        [D] of the same dtype.

    Example:
        >>> info = AttackInfo(n=3, f=1, step=0, generator=torch.Generator(), seed=1)
        >>> concentrated(torch.ones(8), None, info, share=0.25, factor=-2.0)
        tensor([ 1.,  1.,  1., -2., -2.,  1.,  1.,  1.])

    Reference:
        El Mhamdi, Guerraoui and Rouault (2018), The hidden vulnerability of distributed learning in Byzantium.
    """
    out_D = own_D.clone()
    if own_D.numel() == 0 or bucket not in (None, info.call):
        return out_D
    width = min(max(math.ceil(share * own_D.numel()), 1), own_D.numel())
    place = float(torch.rand((), generator=seeded(info.seed, info.call, purpose="run"), dtype=torch.float64))
    start = int(place * (own_D.numel() - width + 1))
    _scaled(out_D, start, start + width, factor)
    return out_D


@implements("split")
def split(
    own_D: Tensor,
    honest_HD: Tensor | None,
    info: AttackInfo,
    *,
    factor: float = -10.0,
    parts: int | None = None,
    by: str = "bucket",
) -> Tensor:
    """factor x own gradient in this attacker's part of the model, the true gradient in the parts of the others.

    Every part has a bad row, yet each attacker is honest in most of them. What a part is depends on the bucket layout.

    Args:
        own_D: the gradient of this replica, [D] floating.
        honest_HD: not used.
        info: its member and call give the part.
        factor: size relative to the true gradient, any finite number.
        parts: attacker k has part k mod `parts`; None: as many parts as attackers, at least 2.
        by: "bucket": part k is every `parts`-th bucket of a step, from bucket k on; "share": of each bucket the k-th of
            `parts` equal pieces, as the rank that aggregates it sees it if `parts` is the number of replicas.

    Returns:
        [D] of the same dtype.

    Example:
        >>> second = AttackInfo(n=5, f=2, step=0, generator=torch.Generator(), member=1)
        >>> split(torch.ones(6), None, second, factor=-3.0, by="share")
        tensor([ 1.,  1.,  1., -3., -3., -3.])

    Reference:
        Baruch, Baruch and Goldberg (2019), A little is enough, for attackers that agree on what each of them sends.
    """
    count = parts if parts is not None else max(info.f, 2)
    mine, width = info.member % count, own_D.numel()
    out_D = own_D.clone()
    if by == "share":
        _scaled(out_D, width * mine // count, width * (mine + 1) // count, factor)
    elif info.call % count == mine:
        _scaled(out_D, 0, width, factor)
    return out_D


@implements("stale")
def stale(own_D: Tensor, honest_HD: Tensor | None, info: AttackInfo, *, delay: int = 1) -> Tensor:
    """The own gradient of `delay` steps ago; the true one while there is none, or if the bucket was another then.

    Args:
        own_D: the gradient of this replica, [D] floating.
        honest_HD: not used.
        info: its memory, to be handed in again in the next steps, gets a copy of `own_D`: `delay` + 1 copies of all
            gradients are kept.
        delay: how old the gradient is, in optimizer steps, >= 1.

    Returns:
        [D] of the same dtype.

    Example:
        >>> memory = {}
        >>> for step in range(3):
        ...     info = AttackInfo(3, 1, step, torch.Generator(), memory=memory)
        ...     print(stale(torch.tensor([float(step)]), None, info, delay=2).item())
        0.0
        1.0
        0.0

    Reference:
        Xie, Koyejo and Gupta (2020), Zeno++: robust fully asynchronous SGD, for gradients of earlier steps.
    """
    past = info.memory.setdefault(info.call, {})
    past[info.step] = own_D.clone()
    for step in [s for s in past if s < info.step - delay]:
        del past[step]
    old_D = past.get(info.step - delay)
    if old_D is None or old_D.shape != own_D.shape or old_D.dtype != own_D.dtype:
        return own_D.clone()
    return old_D.clone()


def _scaled(out_D: Tensor, start: int, stop: int, factor: float) -> None:
    out_D[start:stop] = (widened(out_D[start:stop]) * factor).to(out_D.dtype)
