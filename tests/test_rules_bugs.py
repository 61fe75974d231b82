"""Bugs that were seen in other libraries of robust rules, one test each, and how ties are broken."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from rule_cases import Case, every_case, relative, robust_cases, sample
from torch import Tensor

from ds_byzantine.errors import ConfigError
from ds_byzantine.rules import base, catalog
from ds_byzantine.rules.aggregate import aggregate
from ds_byzantine.rules.geometry import Geometry


@robust_cases
def test_bug_a_nan_row_returned_as_the_answer(case: Case) -> None:
    for where in range(11):
        rows = sample(seed=19)
        rows[where] = math.nan
        assert torch.isfinite(case(rows)).all()


@pytest.mark.parametrize("rule", ["caf", "caf_gated"])
def test_bug_caf_looping_as_often_as_the_squared_ratio_of_outlier_to_spread(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 0
    eigh = torch.linalg.eigh

    def counted(matrix: Tensor) -> Any:
        nonlocal steps
        steps += 1
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", counted)
    rows = sample(11, seed=20)
    rows[:2] *= 1e9
    aggregate(rows, rule=rule, f=2)
    assert 1 <= steps <= 11


@pytest.mark.parametrize("big", [1e9, 1e30, 3e38])
def test_bug_a_trimmed_mean_as_sum_minus_extremes(big: float) -> None:
    rows = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [big, -big], [big, big]])
    got = aggregate(rows, rule="trimmed_mean", f=2)
    assert torch.equal(got, torch.tensor([3.0, 2.0]))
    for name in ("meamed", "phocas"):
        assert aggregate(rows, rule=name, f=2).abs().max() <= 3.0


def test_bug_an_infinite_value_turns_a_trimmed_mean_into_nan() -> None:
    rows = torch.tensor([[1.0], [2.0], [3.0], [math.inf]])
    assert aggregate(rows, rule="trimmed_mean", f=1).item() == 2.0


@pytest.mark.parametrize("common", [0.0, 1e3, 1e4])
@pytest.mark.parametrize("rule", ["krum", "multi_krum", "mda", "min_variance", "smea", "caf"])
def test_bug_cancellation_in_a_float32_gram_changes_the_selection(rule: str, common: float) -> None:
    noise = sample(9, d=4000, seed=21).float()
    rows = noise + common
    rows[4] = common + 3 * noise[4]
    # What float32 could hold of the rows, judged in float64.
    exact = aggregate(rows.double(), rule=rule, f=1)
    assert relative(aggregate(rows, rule=rule, f=1) - common, exact - common) < 1e-3


@pytest.mark.parametrize("rule", ["krum", "multi_krum", "mda", "min_variance", "smea", "bulyan"])
def test_bug_one_large_outlier_blurs_the_distances_among_the_others(rule: str) -> None:
    rows = sample(11, d=500, seed=22).float()
    rows[6] *= 1e8
    assert relative(aggregate(rows, rule=rule, f=2), aggregate(rows.double(), rule=rule, f=2)) < 1e-5


@pytest.mark.parametrize("rule", list(catalog.RULES))
def test_bug_bfloat16_refused_or_cast(rule: str) -> None:
    rows = sample(11, dtype=torch.bfloat16)
    assert aggregate(rows, rule=rule, f=0).dtype == torch.bfloat16


@every_case
def test_bug_the_callers_tensors_overwritten(case: Case) -> None:
    rows = sample(seed=23)
    rows[3, 3] = math.nan
    before = rows.clone()
    case(rows)
    torch.testing.assert_close(rows, before, rtol=0, atol=0, equal_nan=True)


def test_bug_trusting_a_self_reported_weight_or_sample_count() -> None:
    with pytest.raises(ConfigError, match="weights"):
        aggregate(torch.eye(3), rule="median", f=1, weights=[1, 1, 1000])


@every_case
def test_bug_a_tie_broken_differently_on_different_ranks(case: Case) -> None:
    # Pairs of equal rows, and integers, so that scores tie exactly; the same inputs have to give the same bits.
    rows = torch.arange(11.0).div(2, rounding_mode="floor")[:, None].repeat(1, 8)
    first = case(rows)
    assert all(torch.equal(case(rows.clone()), first) for _ in range(3))


@pytest.mark.parametrize("rule", ["krum", "multi_krum", "bulyan", "mda", "min_variance", "smea", "cge"])
def test_ties_go_to_the_lowest_index(rule: str) -> None:
    geometry = Geometry.of_rows(torch.zeros(2, 8, 8, dtype=torch.float64))
    chosen = base.find(rule).function(geometry, 1)
    used = chosen.points_TKE.sum(1) if isinstance(chosen, Geometry) else chosen
    count = {"krum": 1, "bulyan": 5}.get(rule, 6)
    assert torch.equal(used > 0, (torch.arange(8) < count).expand(2, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_krum_returns_one_of_the_rows_bit_by_bit(dtype: torch.dtype) -> None:
    rows = (torch.randn(7, 300, generator=torch.Generator().manual_seed(5)) * 1e-3).to(dtype)
    picked = aggregate(rows, rule="krum", f=1)
    assert any(torch.equal(picked, row) for row in rows)
    picked.zero_()
    assert rows.any(), "the output is no view of the row"
