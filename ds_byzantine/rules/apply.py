"""A rule made ready: (rule, pre-aggregations, f) -> decide in coefficient space, combine the rows.

The same object serves `aggregate()` in one process and the distributed path: a decision needs only the summed Gram
matrices of the blocks, so that all ranks reach it alike, and the combination needs only the rows at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import Any

import torch
from torch import Tensor

from ds_byzantine.errors import InfeasibleError
from ds_byzantine.rules import base, native
from ds_byzantine.rules.base import Rule
from ds_byzantine.rules.catalog import MOST_SUBSETS, Kind
from ds_byzantine.rules.geometry import Geometry
from ds_byzantine.rules.gram import column_blocks, compute_dtype, full_float32
from ds_byzantine.rules.sorting import is_compiled, median_of_rows, of_ranks

Named = str | Mapping[str, Any]


@dataclass(frozen=True)
class Aggregator:
    """One rule with its parameters, ready to run on n rows of which at most f are bad."""

    rule: Rule
    params: Mapping[str, Any]
    pre: tuple[tuple[Rule, Mapping[str, Any]], ...]
    f: int

    @classmethod
    def create(cls, rule: Named, f: int, pre: Sequence[Named] = (), path: str = "byzantine") -> Aggregator:
        """Look the names up and check the parameters.

        Args:
            rule: a name or `{"name": ..., <its parameters>}`.
            f: bad rows to tolerate, >= 0.
            pre: pre-aggregations in the order in which they are applied.
            path: dotted config path for messages.

        Raises:
            ConfigError: unknown name or parameter.
        """
        chosen, params = _ready(rule, f"{path}.rule", pre=False)
        before = tuple(_ready(p, f"{path}.pre[{i}]", pre=True) for i, p in enumerate(pre))
        return cls(chosen, params, before, f)

    @property
    def needs_gram(self) -> bool:
        """Whether a decision in coefficient space comes before the combination."""
        return bool(self.pre) or self.rule.info.kind is not Kind.COORDINATE

    @property
    def output_is_point(self) -> bool:
        """Whether the output is a known combination of the rows, so that distances to it follow from the Gram."""
        return self.rule.info.kind is Kind.GRAM

    def check(self, n: int) -> None:
        """Raise InfeasibleError if n rows do not do for the rule and its pre-aggregations with f bad ones."""
        rows = n
        for pre, params in (*self.pre, (self.rule, self.params)):
            info = pre.info.variant(params)
            least = info.least_replicas(self.f)
            if rows < least or (self.f and not info.tolerates_faults):
                why = f"needs at least {least} rows ({info.bound})" if rows < least else "tolerates no bad row"
                left = "" if rows == n else f" ({rows} after pre-aggregation)"
                raise InfeasibleError(
                    f"{info.name} with f={self.f} {why}; got {n}{left}. Use a smaller f, another rule or more rows."
                )
            if info.searches_subsets and comb(rows, self.f) > MOST_SUBSETS:
                raise InfeasibleError(
                    f"{info.name} with f={self.f} would search C({rows},{self.f}) = {comb(rows, self.f):,} subsets of "
                    f'the rows; the limit is {MOST_SUBSETS:,}. Use a smaller f or rule "caf_gated".'
                )
            rows = info.points_after(rows, params)

    def without(self, bad_rows: int) -> Aggregator:
        """The same rule after `bad_rows` rows were removed: they count against f."""
        return replace(self, f=max(self.f - bad_rows, 0))

    def decide(self, basis_TEE: Tensor, seed: int = 0) -> Tensor | None:
        """Points over (x_1, ..., x_n, median) that the output is made of, for T blocks at once.

        Args:
            basis_TEE: summed `partial_basis` of each block, [T, n+1, n+1]; all blocks have the same n.
            seed: for stochastic rules; has to be the same on every rank.

        Returns:
            [T, K, n+1] float64 on the CPU, or None for a coordinate-wise rule without pre-aggregation.
        """
        if not self.needs_gram:
            return None
        geometry = Geometry.of_rows(basis_TEE.cpu())
        for i, (pre, params) in enumerate(self.pre):
            geometry = pre.function(geometry, self.f, **params, **_random(pre, seed + i + 1))
        if self.rule.info.kind is Kind.COORDINATE:
            return geometry.points_TKE
        chosen = self.rule.function(geometry, self.f, **self.params, **_random(self.rule, seed))
        points_TKE: Tensor = chosen[:, None, :] if self.rule.info.kind is Kind.GRAM else chosen.points_TKE
        return points_TKE

    def combine_unseen(self, rows_ND: Tensor, out_D: Tensor) -> Tensor | None:
        """Write the aggregate as it is if all rows are finite, and look at them in the same pass.

        Args:
            rows_ND: [n, D], floating.
            out_D: [D]; must not overlap `rows_ND`. Undefined if a row is not finite, or if None is returned.

        Returns:
            Squared distances of the rows to the aggregate, [n] float64, all finite only if all rows are; or None if
            this rule has no such pass on these rows.
        """
        if self.needs_gram or self.rule.ranks is None or not native.ready(rows_ND):
            return None
        if out_D.dtype != rows_ND.dtype or not out_D.is_contiguous():
            return None
        return native.reduce_into(rows_ND, self.rule.ranks(len(rows_ND), self.f), out_D)

    def combine(self, rows_ND: Tensor, points_KE: Tensor | None, out_D: Tensor) -> None:
        """Write the aggregate of the rows at hand into `out_D`.

        Args:
            rows_ND: finite rows, [n, D], floating.
            points_KE: the block's decision, [K, n+1], or None for a coordinate-wise rule.
            out_D: [D], floating; must not overlap `rows_ND`.
        """
        if points_KE is not None:
            picked = _only_row(points_KE) if self.rule.info.kind is Kind.GRAM else None
            if picked is not None:
                out_D.copy_(rows_ND[picked])
                return
            if self._mixes_natively(rows_ND, points_KE, out_D):
                native.mix_into(rows_ND, points_KE[0, :-1], out_D)
                return
            points_KE = points_KE.to(rows_ND.device, compute_dtype(rows_ND.dtype))
        elif self.rule.ranks is not None and out_D.dtype == rows_ND.dtype and is_compiled(rows_ND):
            out_D.copy_(of_ranks(rows_ND, self.rule.ranks(len(rows_ND), self.f)))
            return
        start = 0
        with full_float32():
            for block_NB in column_blocks(rows_ND):
                stop = start + block_NB.shape[1]
                out_D[start:stop] = self._combine_block(block_NB, points_KE)
                start = stop

    def _mixes_natively(self, rows_ND: Tensor, points_KE: Tensor, out_D: Tensor) -> bool:
        """Whether the output is a weighted sum of the rows alone, and one compiled pass makes it."""
        if self.rule.info.kind is not Kind.GRAM or _uses_median(points_KE, compute_dtype(rows_ND.dtype)):
            return False
        return native.ready(rows_ND) and out_D.dtype == rows_ND.dtype and out_D.is_contiguous()

    def _combine_block(self, block_NB: Tensor, points_KE: Tensor | None) -> Tensor:
        if points_KE is not None:
            block_NB = mix_rows(block_NB, points_KE)
            if self.rule.info.kind is Kind.GRAM:
                return block_NB[0]
        function = self.rule.finish or self.rule.function
        out: Tensor = function(block_NB, self.f, **self.params)
        return out


def _only_row(points_KE: Tensor) -> int | None:
    """The row that a decision picks as it is, as Krum does: then no other has to be read."""
    weights = points_KE[0].tolist()
    picked = weights.index(1.0) if weights.count(1.0) == 1 and weights.count(0.0) == len(weights) - 1 else None
    return picked if picked != len(weights) - 1 else None  # the last is the median


def mix_rows(block_NB: Tensor, points_KE: Tensor) -> Tensor:
    """The points as vectors: sum_i p_ki x_i + p_k,n+1 median; [n, B] x [K, n+1] -> [K, B].

    The median costs a sorting network, so it is computed only if some point uses it (centred clipping on a healthy step
    does not).
    """
    weights_KN, median_K = points_KE[:, :-1], points_KE[:, -1]
    mixed_KB = weights_KN @ block_NB
    if _uses_median(points_KE, points_KE.dtype):
        mixed_KB += median_K[:, None] * median_of_rows(block_NB)
    return mixed_KB


def _uses_median(points_KE: Tensor, dtype: torch.dtype) -> bool:
    """Whether the median has a weight that counts in `dtype`."""
    return bool((points_KE[:, -1].abs() > torch.finfo(dtype).eps).any())


def _ready(named: Named, path: str, *, pre: bool) -> tuple[Rule, Mapping[str, Any]]:
    spec = {"name": named} if isinstance(named, str) else dict(named)
    rule = base.find(str(spec.pop("name", "")), pre=pre, path=path)
    return rule, rule.info.check_params(spec, path)


def _random(rule: Rule, seed: int) -> dict[str, torch.Generator]:
    return {"generator": torch.Generator().manual_seed(seed)} if rule.info.stochastic else {}
