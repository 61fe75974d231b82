"""Properties that hold for any rows, any number of them and any admissible f."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_byzantine.rules import base, catalog
from ds_byzantine.rules.aggregate import aggregate
from ds_byzantine.rules.catalog import Kind
from ds_byzantine.rules.geometry import Geometry
from ds_byzantine.rules.gram import partial_basis
from ds_byzantine.rules.sorting import median_of_rows, sorted_rows

ANY_RULE = st.sampled_from(sorted(catalog.RULES))
WITHIN_RANGE = (
    "mean",
    "median",
    "trimmed_mean",
    "meamed",
    "phocas",
    "bulyan",
)  # each coordinate within the rows' range
AVERAGING = sorted(n for n, i in catalog.RULES.items() if i.kind is Kind.GRAM and n != "centered_clip")
values = st.floats(-1e6, 1e6, allow_nan=False, width=32)
few = settings(max_examples=60, deadline=None)


@st.composite
def matrices(draw: st.DrawFn, most_rows: int = 9, most_columns: int = 6) -> Tensor:
    """[n, d] float64 rows, with equal rows, zeros and columns of one value among them."""
    n, d = draw(st.integers(1, most_rows)), draw(st.integers(1, most_columns))
    rows = draw(st.lists(st.lists(values, min_size=d, max_size=d), min_size=n, max_size=n))
    return torch.tensor(rows, dtype=torch.float64)


def admissible(rule: str, rows: Tensor, wanted: int) -> int | None:
    """A feasible f near the wanted one, None if the rule cannot run at all."""
    most = catalog.RULES[rule].most_faulty(len(rows))
    return None if most < 0 else min(wanted, most)


@few
@given(matrices(), ANY_RULE, st.integers(0, 4))
def test_finite_rows_give_a_finite_result_of_the_right_shape(rows: Tensor, rule: str, wanted: int) -> None:
    f = admissible(rule, rows, wanted)
    if f is not None:
        got = aggregate(rows, rule=rule, f=f)
        assert got.shape == rows.shape[1:]
        assert torch.isfinite(got).all()


@few
@given(matrices(), ANY_RULE, st.integers(0, 4))
def test_the_same_rows_give_the_same_bits(rows: Tensor, rule: str, wanted: int) -> None:
    f = admissible(rule, rows, wanted)
    if f is not None:
        assert torch.equal(aggregate(rows, rule=rule, f=f), aggregate(rows.clone(), rule=rule, f=f))


@few
@given(matrices(), st.sampled_from(WITHIN_RANGE), st.integers(0, 4))
def test_coordinates_stay_within_the_range_of_the_rows(rows: Tensor, rule: str, wanted: int) -> None:
    f = admissible(rule, rows, wanted)
    if f is not None:
        got = aggregate(rows, rule=rule, f=f)
        slack = 1e-9 * (1 + rows.abs().max())
        assert (got >= rows.amin(0) - slack).all()
        assert (got <= rows.amax(0) + slack).all()


@few
@given(matrices(), st.sampled_from(("median", "trimmed_mean")), st.integers(0, 4), st.integers(0, 99), values)
def test_f_arbitrary_rows_keep_the_range_of_the_honest_ones(
    rows: Tensor, rule: str, wanted: int, seed: int, bad: float
) -> None:
    f = min(wanted, catalog.RULES[rule].most_faulty(len(rows)))
    spoiled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:f]
    honest = rows[[i for i in range(len(rows)) if i not in spoiled.tolist()]]
    attacked = rows.clone()
    attacked[spoiled] = 1e6 * bad
    got = aggregate(attacked, rule=rule, f=f)
    slack = 1e-9 * (1 + honest.abs().max())
    assert (got >= honest.amin(0) - slack).all()
    assert (got <= honest.amax(0) + slack).all()


@few
@given(matrices(), st.sampled_from(AVERAGING), st.integers(0, 4))
def test_averaging_rules_are_convex_combinations_of_the_rows(rows: Tensor, rule: str, wanted: int) -> None:
    f = admissible(rule, rows, wanted)
    if f is not None:
        point = base.find(rule).function(Geometry.of_rows(partial_basis(rows)[None]), f)[0]
        assert (point[:-1] >= 0).all()
        assert point[-1] == 0
        assert abs(float(point.sum()) - 1) < 1e-12


@few
@given(matrices(), st.integers(0, 4))
def test_nnm_rows_are_means_of_n_minus_f_rows(rows: Tensor, wanted: int) -> None:
    f = min(wanted, catalog.PRES["nnm"].most_faulty(len(rows)))
    mixed = base.find("nnm", pre=True).function(Geometry.of_rows(partial_basis(rows)[None]), f).points_TKE[0]
    assert ((mixed[:, :-1] > 0).sum(-1) == len(rows) - f).all()
    torch.testing.assert_close(mixed.sum(-1), torch.ones(len(rows), dtype=torch.float64))


@few
@given(matrices(), ANY_RULE, st.integers(0, 4), st.sampled_from([float("nan"), float("inf"), float("-inf")]))
def test_one_non_finite_row_is_the_same_as_none_with_one_fault_less(
    rows: Tensor, rule: str, wanted: int, bad: float
) -> None:
    f = admissible(rule, rows, wanted)
    spoiled = torch.cat([rows, torch.full_like(rows[:1], bad)])
    if f is not None and catalog.RULES[rule].most_faulty(len(spoiled)) >= f + 1:
        assert torch.equal(aggregate(spoiled, rule=rule, f=f + 1), aggregate(rows, rule=rule, f=f))


@few
@given(matrices(most_rows=20), st.data())
def test_pruned_networks_give_the_ranks_of_a_sort(rows: Tensor, data: st.DataObject) -> None:
    lo = data.draw(st.integers(0, len(rows) - 1))
    hi = data.draw(st.integers(lo + 1, len(rows)))
    assert torch.equal(torch.stack(sorted_rows(rows, lo, hi)), rows.sort(0).values[lo:hi])


@few
@given(matrices(most_rows=20))
def test_no_coordinate_has_more_than_half_of_the_rows_on_one_side_of_its_median(rows: Tensor) -> None:
    middle = median_of_rows(rows)
    assert ((rows < middle).sum(0) <= len(rows) // 2).all()
    assert ((rows > middle).sum(0) <= len(rows) // 2).all()


@few
@given(matrices())
def test_distances_are_those_of_the_rows(rows: Tensor) -> None:
    distances = Geometry.of_rows(partial_basis(rows)[None]).distances_TKK[0]
    want = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").square()
    scale = float((rows - median_of_rows(rows)).square().sum())
    torch.testing.assert_close(distances, want, rtol=1e-9, atol=1e-12 * (1 + scale))
    assert (distances >= 0).all()
    assert (distances.diagonal() == 0).all()
