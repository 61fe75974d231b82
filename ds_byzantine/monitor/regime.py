"""What the inner products of a step's gradients say: norms, cosines, and whether a robust rule can help at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

LEAST_SIGNAL = 1e-3  # of a gradient's square: less cannot be told from nothing, and R stays finite


@dataclass(frozen=True)
class Regime:
    """Of one step; see `StepEvent`."""

    norms: list[float | None] = field(default_factory=list)
    cosine_min: float | None = None
    norm_dispersion: float | None = None
    regime_ratio: float | None = None


def regime(basis_EE: Tensor, usable: Sequence[int], f: int) -> Regime:
    """Norms, smallest cosine, dispersion of norms and the regime ratio.

    R = kappa Var / ||grad L||^2 with Var the mean over replicas of ||x_i||^2 - ||grad L||^2, ||grad L||^2 the median of
    the inner products of two different replicas, and kappa = f / (n - 2f), the least that any rule can have. A rule's
    error is bounded by kappa Var, so where R stays above 1 no rule can tell the gradient from its noise.

    Args:
        basis_EE: Gram matrix of (x_1 - m, ..., x_n - m, m), summed over all tensors, [n+1, n+1] float64.
        usable: replicas whose rows took part in all tensors.
        f: bad replicas to tolerate.

    Reference:
        Allouah et al. (2023), "Fixing by mixing", for kappa and its lower bound.
    """
    n = basis_EE.shape[0] - 1
    shift = basis_EE[:n, n]
    gram_NN = basis_EE[:n, :n] + shift[:, None] + shift[None, :] + basis_EE[n, n]
    chosen = torch.tensor(list(usable), dtype=torch.long)
    gram = gram_NN[chosen][:, chosen]
    squares = torch.diagonal(gram).clamp_min(0.0)
    norms = squares.sqrt()
    known: list[float | None] = [None] * n
    for index, norm in zip(usable, norms.tolist(), strict=True):
        known[index] = norm
    if len(usable) < 2 or float(norms.min()) == 0.0:
        return Regime(known)
    pairs = torch.triu_indices(len(usable), len(usable), 1)
    products = gram[pairs[0], pairs[1]]
    cosines = products / (norms[pairs[0]] * norms[pairs[1]])
    power = float(squares.median())
    signal = max(float(products.median()), LEAST_SIGNAL * power)
    ratio = f / (n - 2 * f) * max(power - signal, 0.0) / signal
    return Regime(known, float(cosines.min()), float(norms.max() / norms.median()), ratio)
