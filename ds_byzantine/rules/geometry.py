"""The coefficient space in which Gram rules live: inner products of rows, held relative to the block's median.

A block of n rows x_1..x_n in R^D and its coordinate-wise median m span at most n + 1 directions. Everything a Gram rule
needs is the (n+1) x (n+1) Gram matrix of the *centred basis* (x_1 - m, ..., x_n - m, m), which adds over shards of D.
Centring by the median keeps the squared distances accurate whatever a minority of rows sends (a mean or a fixed row
would let one attacker destroy the precision of all others).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Geometry:
    """Inner products of K points per block, for T blocks at once, in float64 on the CPU.

    Args:
        basis_TEE: Gram matrices of the centred basis, [T, n+1, n+1], E = n + 1.
        points_TKE: the K points of each block as coefficients over (x_1, ..., x_n, m), [T, K, n+1]. Initially the rows
            themselves (K = n, an identity); a pre-aggregation replaces them by mixtures.
    """

    basis_TEE: Tensor
    points_TKE: Tensor

    @classmethod
    def of_rows(cls, basis_TEE: Tensor) -> Geometry:
        """The points are the rows themselves. `basis_TEE`: [T, n+1, n+1], any floating dtype."""
        blocks, size, _ = basis_TEE.shape
        points = torch.eye(size, dtype=torch.float64)[:-1].expand(blocks, size - 1, size)
        return cls(basis_TEE.double(), points)

    @property
    def blocks(self) -> int:
        """T, blocks in the batch."""
        return self.points_TKE.shape[0]

    @property
    def count(self) -> int:
        """K, points per block."""
        return self.points_TKE.shape[1]

    @property
    def median_TE(self) -> Tensor:
        """The block's coordinate-wise median as a point, [T, n+1]."""
        size = self.basis_TEE.shape[-1]
        return torch.eye(size, dtype=torch.float64)[-1].expand(self.blocks, size)

    def products(self, a_TKE: Tensor, b_TLE: Tensor) -> Tensor:
        """<a_k, b_l> for points (or their differences) over (x_1..x_n, m): [T, K, n+1] x [T, L, n+1] -> [T, K, L]."""
        return self._centred(a_TKE) @ self.basis_TEE @ self._centred(b_TLE).transpose(-1, -2)

    @property
    def gram_TKK(self) -> Tensor:
        """<p_k - m, p_l - m>, the Gram matrix of the points relative to the median, [T, K, K]."""
        offsets = self.points_TKE - self.median_TE[:, None, :]
        return self.products(offsets, offsets)

    @property
    def distances_TKK(self) -> Tensor:
        """||p_k - p_l||^2, [T, K, K]; never negative, zero diagonal, exactly symmetric."""
        gram = self.gram_TKK
        square = torch.diagonal(gram, dim1=-2, dim2=-1)
        out = square[..., :, None] + square[..., None, :] - (gram + gram.transpose(-1, -2))
        out = out.clamp_min(0.0)
        torch.diagonal(out, dim1=-2, dim2=-1).zero_()
        return out

    @property
    def norms_TK(self) -> Tensor:
        """||p_k||^2, squared Euclidean norms of the points, [T, K]."""
        return torch.diagonal(self.products(self.points_TKE, self.points_TKE), dim1=-2, dim2=-1).clamp_min(0.0)

    def distances_to(self, point_TE: Tensor) -> Tensor:
        """||p_k - z||^2 of every point to one point z per block, [T, n+1] -> [T, K]."""
        offsets = self._centred(self.points_TKE - point_TE[:, None, :])
        return ((offsets @ self.basis_TEE) * offsets).sum(-1).clamp_min(0.0)

    def mix(self, weights_TLK: Tensor) -> Geometry:
        """New points sum_k w_lk p_k: [T, L, K] -> a Geometry with L points per block over the same basis."""
        return Geometry(self.basis_TEE, weights_TLK @ self.points_TKE)

    def average(self, weights_TK: Tensor) -> Tensor:
        """The point sum_k w_k p_k / sum_k w_k of each block; weights >= 0, not all zero. [T, K] -> [T, n+1]."""
        shares_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return (shares_TK[:, None, :] @ self.points_TKE)[:, 0]

    def average_of(self, chosen_TM: Tensor) -> Tensor:
        """The plain mean of the chosen points of each block; indices [T, M], M >= 1 -> [T, n+1]."""
        weights_TK = torch.zeros(self.blocks, self.count, dtype=torch.float64)
        return self.average(weights_TK.scatter_(-1, chosen_TM, 1.0))

    @staticmethod
    def _centred(points_TKE: Tensor) -> Tensor:
        """Coefficients over (x_i, m) -> over (x_i - m, m): the last one becomes the sum of all."""
        last = points_TKE.sum(-1, keepdim=True)
        return torch.cat([points_TKE[..., :-1], last], -1)
