"""Colluding attacks that copy, measure or try out the honest rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from ds_byzantine.attacks.base import AttackInfo, find
from ds_byzantine.attacks.catalog import z_max
from ds_byzantine.attacks.collusion import alie, ipm
from ds_byzantine.rules.aggregate import aggregate

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
Rule = Callable[[torch.Tensor], torch.Tensor]


def rows(dtype: torch.dtype = torch.float64, count: int = 6, width: int = 101, scale: float = 1.0) -> torch.Tensor:
    made = torch.randn(count, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return ((made + 0.3) * scale).to(dtype)


def info(n: int = 8, f: int = 2, **known: object) -> AttackInfo:
    return AttackInfo(n=n, f=f, step=0, generator=torch.Generator(), **known)  # type: ignore[arg-type]


def send(name: str, honest_HD: torch.Tensor, known: AttackInfo | None = None, **params: object) -> torch.Tensor:
    return find(name).function(torch.zeros_like(honest_HD[0]), honest_HD, known or info(), **params)


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "params", "row"),
    [
        ("mimic", {"replica": 3}, 2),
        ("mimic", {"replica": 1}, 0),
        ("lazy_copy", {}, 0),
        ("lazy_copy", {"of": 4}, 3),
    ],
)
def test_copies_are_exact_and_go_by_replica(name: str, params: dict[str, int], row: int, dtype: torch.dtype) -> None:
    honest_HD = rows(dtype)
    out_D = send(name, honest_HD, info(honest=(1, 2, 3, 4, 6, 7)), **params)
    assert torch.equal(out_D, honest_HD[row])


@pytest.mark.parametrize(("name", "param"), [("mimic", "replica"), ("lazy_copy", "of")])
def test_a_copy_of_no_honest_replica(name: str, param: str) -> None:
    for known in (info(honest=(0, 1, 3, 4, 5, 6)), info()):
        with pytest.raises(ValueError, match=f"{param}: got 7, but the honest replicas are"):
            send(name, rows(), known, **{param: 7})


# -- the largest step that hides ---------------------------------------------------------------------------------------


def slack(name: str, honest_HD: torch.Tensor, row_D: torch.Tensor) -> float:
    """How far inside its bound the row lies, as a part of the bound; pair by pair, without inner products."""
    x, m = honest_HD.double(), row_D.double()
    near = [float((m - one).square().sum()) for one in x]
    apart = [[float((one - other).square().sum()) for other in x] for one in x]
    if name == "min_max":
        value, bound = math.sqrt(max(near)), math.sqrt(max(map(max, apart)))
    else:
        value, bound = sum(near), max(map(sum, apart))
    return (bound - value) / bound


@pytest.mark.parametrize(("count", "scale"), [(6, 1e-6), (6, 1.0), (6, 1e20), (2, 1.0), (3, 1.0), (11, 1.0), (24, 1.0)])
@pytest.mark.parametrize("perturbation", ["std", "unit", "sign"])
@pytest.mark.parametrize("name", ["min_max", "min_sum"])
def test_the_row_goes_just_as_far_as_its_bound(name: str, perturbation: str, count: int, scale: float) -> None:
    honest_HD = rows(torch.float64, count=count, scale=scale)
    assert -1e-12 < slack(name, honest_HD, send(name, honest_HD, perturbation=perturbation)) < 1e-6
    narrow_HD = honest_HD.float()  # what is left is the rounding of the row
    assert -1e-6 < slack(name, narrow_HD, send(name, narrow_HD, perturbation=perturbation)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["min_max", "min_sum"])
def test_in_low_precision_the_bound_holds_up_to_the_rounding(name: str, dtype: torch.dtype) -> None:
    honest_HD = rows(dtype)
    assert abs(slack(name, honest_HD, send(name, honest_HD))) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["min_max", "min_sum"])
def test_directions(name: str) -> None:
    honest_HD = rows()
    mu_D, sigma_D = honest_HD.mean(0), honest_HD.std(0)
    for perturbation, p_D in (("std", -sigma_D), ("unit", -mu_D), ("sign", -mu_D.sign())):
        moved_D = send(name, honest_HD, perturbation=perturbation) - mu_D
        cosine = float(moved_D @ p_D / (moved_D.norm() * p_D.norm()))
        assert cosine == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("perturbation", ["std", "unit", "sign"])
@pytest.mark.parametrize("name", ["min_max", "min_sum"])
def test_no_room_to_hide_leaves_the_mean(name: str, perturbation: str) -> None:
    one_HD, equal_HD, zero_HD = rows(count=1), rows(count=1).expand(4, -1), torch.zeros(3, 5)
    for honest_HD in (one_HD, equal_HD, zero_HD):
        out_D = send(name, honest_HD, perturbation=perturbation)
        assert torch.allclose(out_D, honest_HD[0], rtol=1e-6, atol=1e-6)


# -- searched strengths ------------------------------------------------------------------------------------------------

RULES: dict[str, tuple[int, Rule]] = {
    name: (f, lambda rows_ND, name=name, f=f, pre=pre: aggregate(rows_ND, rule=name, f=f, pre=pre))  # type: ignore[misc]
    for name, f, pre in [
        ("median", 2, ()),
        ("trimmed_mean", 2, ("nnm",)),
        ("multi_krum", 2, ()),
        ("centered_clip", 2, ()),
        ("caf", 2, ()),
        ("mean", 0, ()),
    ]
}


def harm(rule: Rule, honest_HD: torch.Tensor, row_D: torch.Tensor, f: int) -> float:
    out_D = rule(torch.cat([honest_HD, row_D.expand(f, -1)]))
    return float((out_D.double() - honest_HD.double().mean(0)).norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("tries", [1, 2, 7, 16])
@pytest.mark.parametrize("name", ["alie_search", "ipm_search"])
def test_the_search_harms_no_less_than_the_fixed_default(name: str, tries: int, rule: str, dtype: torch.dtype) -> None:
    honest_HD = rows(dtype)
    run = RULES[rule][1]
    calls = 0

    def counted(rows_ND: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        assert rows_ND.shape == (8, 101)
        assert torch.equal(rows_ND[:6], honest_HD)
        assert torch.equal(rows_ND[6], rows_ND[7])
        return run(rows_ND)

    found_D = send(name, honest_HD, info(aggregate=counted), tries=tries)
    fixed_D = send(name.removesuffix("_search"), honest_HD)
    assert harm(run, honest_HD, found_D, 2) >= harm(run, honest_HD, fixed_D, 2)
    assert calls <= tries
    if tries == 1:
        assert torch.equal(found_D, fixed_D)


def test_the_search_is_worth_it() -> None:
    """Against a rule that throws far rows out, the worst strength is neither the default nor the largest."""
    honest_HD, run = rows(), RULES["multi_krum"][1]
    for name, row_at in (
        ("alie_search", lambda z: alie(honest_HD[0], honest_HD, info(), z=z)),
        ("ipm_search", lambda e: ipm(honest_HD[0], honest_HD, info(), epsilon=e)),
    ):
        found_D = send(name, honest_HD, info(aggregate=run), tries=24)
        grid = [harm(run, honest_HD, row_at(0.05 * i), 2) for i in range(1, 161)]
        reached = harm(run, honest_HD, found_D, 2)
        assert reached >= 0.9 * max(grid)
        default = z_max(8, 2) if name == "alie_search" else 0.5
        assert reached > 1.02 * harm(run, honest_HD, row_at(default), 2)
        assert reached > 1.02 * grid[-1]


def test_the_mean_follows_the_largest_strength() -> None:
    honest_HD, run = rows(), RULES["mean"][1]
    assert torch.equal(send("alie_search", honest_HD, info(aggregate=run), most=5.0), send("alie", honest_HD, z=5.0))
    expected = send("ipm", honest_HD, epsilon=5.0)
    assert torch.equal(send("ipm_search", honest_HD, info(aggregate=run), most=5.0), expected)


def test_a_rule_that_gives_up_is_not_harmed() -> None:
    """NaN out means a skipped step: the search settles for what gets through."""
    honest_HD = rows()

    def gives_up(rows_ND: torch.Tensor) -> torch.Tensor:
        out_D = rows_ND.mean(0)
        return out_D if float(rows_ND.norm()) < 30.0 else out_D * float("nan")

    found_D = send("ipm_search", honest_HD, info(aggregate=gives_up))
    assert 0.0 < harm(gives_up, honest_HD, found_D, 2) < float("inf")


@pytest.mark.parametrize("name", ["alie_search", "ipm_search"])
def test_the_rule_is_needed(name: str) -> None:
    with pytest.raises(ValueError, match=r"info\.aggregate: .* Pass it"):
        send(name, rows())
