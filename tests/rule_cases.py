"""The table of rules that the suites run: every rule as it comes, its variants, and some after a pre-aggregation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_byzantine.rules import catalog
from ds_byzantine.rules.aggregate import aggregate
from ds_byzantine.rules.catalog import Kind


@dataclass(frozen=True)
class Case:
    """A rule with parameters, and the symmetries that it claims."""

    rule: str
    params: dict[str, Any] = field(default_factory=dict)
    pre: tuple[str, ...] = ()
    translates: bool = True
    scales: bool = True

    @property
    def f(self) -> int:
        return 0 if self.rule == "mean" else 2

    def __call__(self, rows: Tensor, f: int | None = None) -> Tensor:
        return aggregate(rows, rule=self.rule, f=self.f if f is None else f, pre=self.pre, **self.params)

    def __str__(self) -> str:
        return "+".join([*self.pre, self.rule, *(f"{k}={v}" for k, v in self.params.items())])


PLAIN = [Case(name, translates=name not in ("sign_majority", "cge")) for name in catalog.RULES]
VARIANTS = [
    Case("krum", {"neighbors": "n-f-1"}),
    Case("multi_krum", {"neighbors": "n-f-1"}),
    Case("multi_krum", {"m": 3}),
    Case("bulyan", {"neighbors": "n-f-1"}),
    Case("sign_majority", {"scale": "one"}, translates=False, scales=False),
    Case("caf_gated", {"psi": 1.0}),
    Case("geometric_median", {"nu": 0.1, "iterations": 3, "start": "zero"}, translates=False, scales=False),
    Case("geometric_median", {"start": "mean"}),
    Case("centered_clip", {"tau": 2.0, "iterations": 2}, scales=False),
    Case("centered_clip", {"factor": 0.5}),
    Case("dnc", {"iterations": 1, "factor": 2.0}),
]
MIXED = [
    Case("trimmed_mean", pre=("nnm",)),
    Case("geometric_median", pre=("nnm",)),
    Case("bulyan", pre=("arc",), translates=False),
    Case("median", pre=("arc",), translates=False),
    Case("caf", pre=("clip",), translates=False, scales=False),
    Case("meamed", pre=("arc", "nnm"), translates=False),
]
CASES = PLAIN + VARIANTS + MIXED
# "mean" protects nothing; a start at the mean is documented to let one outlier choose the start.
ROBUST = [c for c in CASES if c.rule != "mean" and c.params.get("start") != "mean"]

every_case = pytest.mark.parametrize("case", CASES, ids=str)
DECIDING = [c for c in CASES if catalog.RULES[c.rule].kind is not Kind.COORDINATE or c.pre]

deciding_cases = pytest.mark.parametrize("case", DECIDING, ids=str)
robust_cases = pytest.mark.parametrize("case", ROBUST, ids=str)


def sample(n: int = 11, d: int = 23, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows like a batch of gradients: a common direction and noise of the same size."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(d, generator=generator, dtype=torch.float64)
    return (common + torch.randn(n, d, generator=generator, dtype=torch.float64)).to(dtype)


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())
