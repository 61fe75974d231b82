"""Fixed values, printed bounds and particular traits of single rules and pre-aggregations."""

from __future__ import annotations

import math

import pytest
import torch
from rule_cases import relative, sample

from ds_byzantine.errors import InfeasibleError
from ds_byzantine.rules import base, catalog
from ds_byzantine.rules.aggregate import aggregate
from ds_byzantine.rules.geometry import Geometry
from ds_byzantine.rules.gram import partial_basis

SQUARE = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], dtype=torch.float64)


def test_fixed_small_vectors() -> None:
    got = aggregate(SQUARE, rule="geometric_median", f=1, nu=0.1, iterations=3, start="zero")
    want = torch.tensor([3.78788764, 4.78788764, 5.78788764], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-8)
    middle = torch.tensor([4.0, 5.0, 6.0], dtype=torch.float64)
    assert torch.equal(aggregate(SQUARE, rule="trimmed_mean", f=1), middle)
    assert torch.equal(aggregate(SQUARE, rule="median", f=1), middle)


def test_median_of_an_even_number_of_rows_is_the_mean_of_the_middle_two() -> None:
    rows = torch.tensor([[1.0], [2.0], [10.0], [20.0]])
    assert aggregate(rows, rule="median", f=1).item() == 6.0


@pytest.mark.parametrize("rule", ["meamed", "phocas"])
def test_of_two_equally_near_values_the_lower_counts(rule: str) -> None:
    assert aggregate(torch.tensor([[3.0], [1.0], [2.0]]), rule=rule, f=1).item() == 1.5


def test_krum_variants_differ_by_their_neighbour_count() -> None:
    # The centre of the four on the left has the nearest three; with a fourth, far to the right, its neighbour wins.
    rows = torch.tensor([[0.0], [0.04], [0.1], [0.15], [2.0], [2.5], [3.0]], dtype=torch.float64)
    assert aggregate(rows, rule="krum", f=2).item() == 0.1
    assert aggregate(rows, rule="krum", f=2, neighbors="n-f-1").item() == 0.15


def test_multi_krum_never_averages_more_than_n_minus_f_rows() -> None:
    rows = sample(9, seed=24)
    most = aggregate(rows, rule="multi_krum", f=2)
    assert torch.equal(aggregate(rows, rule="multi_krum", f=2, m=7), most)
    assert torch.equal(aggregate(rows, rule="multi_krum", f=2, m=100), most)
    assert torch.equal(aggregate(rows, rule="multi_krum", f=2, m=1), aggregate(rows, rule="krum", f=2))


def test_colluders_win_published_krum_at_2f_plus_1_which_is_why_it_is_refused() -> None:
    rows = sample(5, seed=12)
    rows[3:] = 50.0
    fooled = base.find("krum").function(Geometry.of_rows(partial_basis(rows)[None]), 2)
    assert fooled[0, 3] == 1.0
    with pytest.raises(InfeasibleError, match="2f\\+3"):
        aggregate(rows, rule="krum", f=2)


@pytest.mark.parametrize("name", ["mda", "min_variance", "smea"])
def test_a_search_that_would_not_end_is_refused(name: str) -> None:
    with pytest.raises(InfeasibleError, match=r"C\(64,15\) = 159,518,999,862,720 subsets"):
        aggregate(torch.randn(64, 3), rule=name, f=15)


@pytest.mark.parametrize("f", [1, 2, 3])
@pytest.mark.parametrize("name", ["krum", "multi_krum"])
def test_krum_with_n_f_1_neighbours_holds_at_2f_plus_1(name: str, f: int) -> None:
    info = catalog.RULES[name]
    assert info.least_replicas(f) == 2 * f + 3
    assert info.variant({"neighbors": "n-f-1"}).least_replicas(f) == 2 * f + 1
    rows = sample(2 * f + 1, seed=f)
    honest = rows[f:]
    variance = ((honest - honest.mean(0)) ** 2).sum() / len(honest)
    for size in (0.0, 1.0, 3.0, 1e6):
        rows[:f] = honest.mean(0) + size * sample(1, seed=13)
        point = base.find(name).function(Geometry.of_rows(partial_basis(rows)[None]), f, neighbors="n-f-1")[0, :-1]
        assert ((point @ rows - honest.mean(0)) ** 2).sum() <= 6 * (f + 1) * variance


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("rule", "n", "f"), [("min_variance", 7, 2), ("smea", 7, 2), ("smea", 5, 2), ("min_variance", 8, 3)]
)
def test_subset_rules_keep_their_printed_bound(rule: str, n: int, f: int, seed: int) -> None:
    rows = sample(n, d=6, seed=seed)
    honest = rows[f:]
    rows[:f] = honest.mean(0) + 10 ** (seed / 10 - 1) * sample(f, d=6, seed=seed + 100)
    variance = ((honest - honest.mean(0)) ** 2).sum() / len(honest)
    off = ((aggregate(rows, rule=rule, f=f) - honest.mean(0)) ** 2).sum()
    assert off <= 4 * f / (n - 2 * f) * variance


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("n", "f"), [(5, 2), (8, 2), (9, 4)])
@pytest.mark.parametrize("rule", ["caf", "caf_gated"])
def test_caf_keeps_its_printed_bound(rule: str, n: int, f: int, seed: int) -> None:
    rows = sample(n, d=6, seed=seed)
    honest = rows[f:]
    rows[:f] = honest.mean(0) + 10 ** (seed / 5 - 1) * sample(f, d=6, seed=seed + 100)
    top = torch.linalg.eigvalsh(torch.cov(honest.T, correction=0))[-1]
    rho = (n - f) / (n - 2 * f)
    kappa = f / (n - 2 * f) * (1 + max(math.sqrt(3 * rho), (2 + math.sqrt(2)) * rho)) ** 2
    assert ((aggregate(rows, rule=rule, f=f) - honest.mean(0)) ** 2).sum() <= kappa * top


def test_caf_gated_is_the_plain_mean_without_an_attack() -> None:
    rows = sample(8, d=5000, seed=14)
    assert relative(aggregate(rows, rule="caf_gated", f=2), rows.mean(0)) < 1e-12
    rows[0] = -5 * rows[0]
    assert relative(aggregate(rows, rule="caf_gated", f=2), rows.mean(0)) > 0.1


def test_f_orthogonal_colluders_cannot_open_the_gate_of_caf_gated() -> None:
    # At n = 2f+1 the mean of the two middle eigenvalues would be theirs to choose.
    rows = sample(5, d=50, seed=15)
    rows[0], rows[1] = 0.0, 0.0
    rows[0, 0] = rows[1, 1] = 1e6
    assert aggregate(rows, rule="caf_gated", f=2).norm() < 50


def test_centered_clip_is_the_plain_mean_of_rows_that_are_equally_far_out() -> None:
    rows = sample(8, d=5000, seed=16)
    assert relative(aggregate(rows, rule="centered_clip", f=2), rows.mean(0)) < 1e-12


def test_geometric_median_converges_to_the_point_of_least_summed_distance() -> None:
    rows = sample(7, d=4, seed=17)
    found = aggregate(rows, rule="geometric_median", f=2, iterations=500)
    cost = (rows - found).norm(dim=1).sum()
    for k in range(4):
        for step in (-1e-3, 1e-3):
            moved = found.clone()
            moved[k] += step
            assert (rows - moved).norm(dim=1).sum() > cost


def test_sign_majority_gives_zero_on_a_tie_and_the_median_magnitude_otherwise() -> None:
    rows = torch.tensor([[1.0, 5.0], [-1.0, 3.0], [2.0, -1.0], [-9.0, 4.0]])
    assert torch.equal(aggregate(rows, rule="sign_majority", f=1), torch.tensor([0.0, 3.5]))
    assert torch.equal(aggregate(rows, rule="sign_majority", f=1, scale="one"), torch.tensor([0.0, 1.0]))


# --- pre-aggregations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "size"), [(8, 2), (9, 2), (10, 3), (5, 1), (4, 9)])
def test_bucketing_deals_every_row_into_one_bucket(n: int, size: int) -> None:
    geometry = Geometry.of_rows(torch.eye(n + 1).expand(3, -1, -1))
    info = catalog.PRES["bucketing"]
    mixed = base.find("bucketing", pre=True).function(
        geometry, 0, size=size, generator=torch.Generator().manual_seed(1)
    )
    assert mixed.count == info.points_after(n, {"size": size}) == math.ceil(n / size)
    member = mixed.points_TKE[..., :n] > 0
    assert torch.equal(member.sum(1), torch.ones(3, n, dtype=torch.int64))
    assert int(member.sum(-1).max()) <= size
    torch.testing.assert_close(mixed.points_TKE.sum(-1), torch.ones(3, mixed.count, dtype=torch.float64))
    assert torch.equal(mixed.points_TKE[0], mixed.points_TKE[2])


def test_bucketing_follows_the_seed_alone() -> None:
    rows = sample(9, seed=18)
    results = [aggregate(rows, rule="median", f=1, pre=("bucketing",), seed=s) for s in (5, 5, 6)]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_clip_and_arc_cut_lengths_and_leave_short_rows_alone() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [0.0, 20.0], [0.0, 1.0]], dtype=torch.float64)
    got = aggregate(rows, rule="mean", f=0, pre=({"name": "clip", "norm": 2.0},))
    torch.testing.assert_close(got, torch.tensor([1.2 + 0.3, 1.6 + 0.4 + 2.0 + 1.0], dtype=torch.float64) / 5)
    # n=5, f=1: the floor(2*1*4/5) = 1 longest row is cut to length 5.
    basis = partial_basis(rows)[None]
    cut = base.find("arc", pre=True).function(Geometry.of_rows(basis), 1)
    torch.testing.assert_close(cut.norms_TK.sqrt(), torch.tensor([[5.0, 0.5, 0.0, 5.0, 1.0]], dtype=torch.float64))
