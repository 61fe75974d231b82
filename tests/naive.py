"""The rules once more, straight from their definitions: numpy, float64, loops, on the raw rows and in their own space.

Nothing here knows of Gram matrices, medians as centres or sorting networks, so that agreement means something.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def mean(x: Array, f: int) -> Array:
    return x.mean(0)


def median(x: Array, f: int) -> Array:
    return np.median(x, axis=0)


def trimmed_mean(x: Array, f: int) -> Array:
    return np.array([np.mean(sorted(column)[f : len(x) - f]) for column in x.T])


def _nearest(x: Array, centre: Array, keep: int) -> Array:
    # sorted() is stable and the values ascend, so that of two equally near values the lower one comes first.
    picked = [sorted(sorted(col), key=lambda v, c=c: abs(v - c))[:keep] for col, c in zip(x.T, centre, strict=True)]
    return np.array([np.mean(p) for p in picked])


def meamed(x: Array, f: int) -> Array:
    return _nearest(x, median(x, f), len(x) - f)


def phocas(x: Array, f: int) -> Array:
    return _nearest(x, trimmed_mean(x, f), len(x) - f)


def sign_majority(x: Array, f: int, scale: str = "median") -> Array:
    sign = np.sign(np.sign(x).sum(0))
    return sign * (np.median(abs(x), axis=0) if scale == "median" else 1.0)


def _distance(a: Array, b: Array) -> float:
    return float(((a - b) ** 2).sum())


def _krum_order(x: Array, f: int, neighbors: str, alive: list[int]) -> list[int]:
    count = max(len(alive) - f - (1 if neighbors == "n-f-1" else 2), 1)
    score = {i: sum(sorted(_distance(x[i], x[j]) for j in alive if j != i)[:count]) for i in alive}
    return sorted(alive, key=lambda i: score[i])


def krum(x: Array, f: int, neighbors: str = "n-f-2") -> Array:
    return x[_krum_order(x, f, neighbors, list(range(len(x))))[0]]


def multi_krum(x: Array, f: int, neighbors: str = "n-f-2", m: int = 0) -> Array:
    return x[_krum_order(x, f, neighbors, list(range(len(x))))[: m or len(x) - f]].mean(0)


def bulyan(x: Array, f: int, neighbors: str = "n-f-2") -> Array:
    alive, picks = list(range(len(x))), []
    while len(picks) < len(x) - 2 * f:
        picks.append(_krum_order(x, f, neighbors, alive)[0])
        alive.remove(picks[-1])
    chosen = x[picks]
    return _nearest(chosen, np.median(chosen, axis=0), len(picks) - 2 * f)


def _best_subset(x: Array, f: int, width: Callable[[Array], float]) -> Array:
    return x[list(min(combinations(range(len(x)), len(x) - f), key=lambda s: width(x[list(s)])))].mean(0)


def mda(x: Array, f: int) -> Array:
    return _best_subset(x, f, lambda s: max(_distance(a, b) for a in s for b in s))


def min_variance(x: Array, f: int) -> Array:
    return _best_subset(x, f, lambda s: float(((s - s.mean(0)) ** 2).sum()))


def smea(x: Array, f: int) -> Array:
    return _best_subset(x, f, lambda s: float(np.linalg.eigvalsh(np.atleast_2d(np.cov(s.T, ddof=0)))[-1]))


def caf(x: Array, f: int, psi: float = 0.0) -> Array:
    n = len(x)
    c, best, least = np.ones(n), x.mean(0), np.inf
    while c.sum() > n - 2 * f:
        centre = c @ x / c.sum()
        covariance = sum(w * np.outer(r, r) for w, r in zip(c, x - centre, strict=True)) / c.sum()
        values, vectors = np.linalg.eigh(covariance)
        if values[-1] < least:
            best, least = centre, values[-1]
        spectrum = sorted(np.concatenate([values, np.zeros(n)]), reverse=True)[: n - 1]
        if values[-1] <= psi * spectrum[(n - 1) // 2]:
            break
        tau = ((x - centre) @ vectors[:, -1]) ** 2
        c = c * (1 - tau / tau[c > 0].max()).clip(0)
    return best


def caf_gated(x: Array, f: int, psi: float = 3.0) -> Array:
    return caf(x, f, psi)


def geometric_median(
    x: Array, f: int, nu: float = 0.0, iterations: int = 16, start: str = "median", origin: Array | None = None
) -> Array:
    z = {"median": np.median(x, axis=0) if origin is None else origin, "mean": x.mean(0), "zero": np.zeros(x.shape[1])}[
        start
    ]
    floor = nu or 1e-6 * np.median([math.sqrt(_distance(r, z)) for r in x])
    for _ in range(iterations):
        w = np.array([1 / max(floor, math.sqrt(_distance(r, z)), 1e-150) for r in x])
        z = w @ x / w.sum()
    return z


def centered_clip(x: Array, f: int, tau: float = 0.0, iterations: int = 5, factor: float = 1.5) -> Array:
    v = np.median(x, axis=0)
    radius = tau or factor * np.median([math.sqrt(_distance(r, v)) for r in x])
    for _ in range(iterations):
        steps = [(r - v) * min(1.0, radius / max(math.sqrt(_distance(r, v)), 1e-150)) for r in x]
        v = v + np.mean(steps, axis=0)
    return v


def cge(x: Array, f: int) -> Array:
    return x[sorted(range(len(x)), key=lambda i: float((x[i] ** 2).sum()))[: len(x) - f]].mean(0)


def dnc(x: Array, f: int, iterations: int = 3, factor: float = 1.0) -> Array:
    total, alive, dropped = min(math.ceil(factor * f), len(x) - 1), list(range(len(x))), 0
    for r in range(iterations):
        fewer = total * (r + 1) // iterations - dropped
        if fewer:
            offsets = x[alive] - x[alive].mean(0)
            reach = (offsets @ np.linalg.svd(offsets)[2][0]) ** 2
            alive = [alive[k] for k in sorted(np.argsort(reach, kind="stable")[: len(alive) - fewer])]
            dropped += fewer
    return x[alive].mean(0)


def nnm(x: Array, f: int) -> Array:
    near = [sorted(range(len(x)), key=lambda j, i=i: _distance(x[i], x[j]))[: len(x) - f] for i in range(len(x))]
    return np.array([x[s].mean(0) for s in near])


def arc(x: Array, f: int) -> Array:
    norms = np.linalg.norm(x, axis=1)
    limit = sorted(norms, reverse=True)[int(2 * f * (len(x) - f) / len(x))]
    return x * np.minimum(1, limit / norms)[:, None]


def clip(x: Array, f: int, norm: float = 1.0) -> Array:
    return x * np.minimum(1, norm / np.linalg.norm(x, axis=1))[:, None]


def rule(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = globals()[name]
    return found
