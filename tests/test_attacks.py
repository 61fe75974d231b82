"""Attacks: their formulas, dtypes, determinism, and that they change nothing that is not theirs."""

from __future__ import annotations

import inspect
import math
import statistics

import pytest
import torch

from ds_byzantine.attacks.base import AttackInfo, find
from ds_byzantine.attacks.catalog import ATTACKS, z_max
from ds_byzantine.errors import ConfigError

NAMES = sorted(ATTACKS)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def info(seed: int = 0, n: int = 8, f: int = 2) -> AttackInfo:
    return AttackInfo(n=n, f=f, step=0, generator=torch.Generator().manual_seed(seed))


def rows(dtype: torch.dtype, count: int = 6, width: int = 257) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)


def run(name: str, honest_HD: torch.Tensor, seed: int = 0, **params: object) -> torch.Tensor:
    attack = find(name)
    return attack.function(honest_HD[0], honest_HD if attack.spec.needs_honest else None, info(seed), **params)


@pytest.mark.parametrize("name", NAMES)
def test_the_function_takes_the_catalog_s_parameters_with_its_defaults(name: str) -> None:
    signature = inspect.signature(find(name).function)
    keywords = {p.name: p.default for p in signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert keywords == {p.name: p.default for p in ATTACKS[name].params}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_inputs_stay_and_the_output_is_a_new_row_of_the_same_kind(name: str, dtype: torch.dtype) -> None:
    honest_HD = rows(dtype)
    before = honest_HD.clone()
    out = run(name, honest_HD)
    assert torch.equal(honest_HD, before)
    assert out.dtype == dtype
    assert out.shape == honest_HD[0].shape
    assert out.untyped_storage().data_ptr() != honest_HD.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_row(name: str) -> None:
    honest_HD = rows(torch.float32)
    first, again = run(name, honest_HD, seed=3), run(name, honest_HD, seed=3)
    assert torch.equal(first.nan_to_num(7.0), again.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "params", "formula"),
    [
        ("sign_flip", {"factor": 3.0}, lambda x: [-3.0 * v for v in x[0]]),
        ("scale", {"factor": -10.0}, lambda x: [-10.0 * v for v in x[0]]),
        ("zero", {}, lambda x: [0.0 for _ in x[0]]),
        (
            "alie",
            {"z": 1.5},
            lambda x: [statistics.fmean(c) - 1.5 * statistics.stdev(c) for c in zip(*x, strict=True)],
        ),
        ("ipm", {"epsilon": 0.5}, lambda x: [-0.5 * statistics.fmean(c) for c in zip(*x, strict=True)]),
    ],
)
def test_formulas(name: str, params: dict[str, float], formula: object, dtype: torch.dtype) -> None:
    honest_HD = rows(dtype, width=33)
    expected = torch.tensor(formula(honest_HD.double().tolist()), dtype=torch.float64)  # type: ignore[operator]
    out = run(name, honest_HD, **params).double()
    # Arithmetic is at least float32, so that of a narrow dtype only the final rounding is left: half a unit.
    units = 0.51 if dtype.itemsize == 2 else 4.0
    exact = 1e-14 if dtype == torch.float64 else 1e-6
    assert torch.allclose(out, expected, rtol=units * torch.finfo(dtype).eps, atol=exact)


def test_float16_sums_do_not_overflow_on_the_way() -> None:
    honest_HD = torch.full((8, 3), 60_000.0, dtype=torch.float16)
    assert torch.equal(run("ipm", honest_HD, epsilon=1.0), -honest_HD[0])
    assert torch.isfinite(run("alie", honest_HD, z=1.5)).all()


def test_nan_and_inf() -> None:
    assert torch.isnan(run("nan", rows(torch.bfloat16))).all()
    assert torch.isposinf(run("nan", rows(torch.bfloat16), kind="inf")).all()


def test_gaussian_noise_has_the_size_asked_for_and_forgets_the_gradient() -> None:
    own_D = torch.full((200_000,), 0.01)
    for sigma, relative, expected in ((2.0, True, 0.02), (3.0, False, 3.0)):
        noise_D = run("gaussian", own_D[None], sigma=sigma, relative=relative)
        assert float(noise_D.std()) == pytest.approx(expected, rel=0.02)
        assert abs(float(noise_D.mean())) < expected / 50
    assert not torch.equal(run("gaussian", own_D[None], seed=1), run("gaussian", own_D[None], seed=2))
    assert run("gaussian", torch.zeros(1, 0)).shape == (0,)


def test_alie_with_one_honest_row_sends_that_row() -> None:
    honest_HD = rows(torch.float32, count=1)
    assert torch.equal(run("alie", honest_HD, z=1.5), honest_HD[0])


def test_alie_derives_z_from_n_and_f() -> None:
    honest_HD = rows(torch.float64, count=26)
    fixed = find("alie").function(honest_HD[0], honest_HD, info(n=50, f=24), z=z_max(50, 24))
    derived = find("alie").function(honest_HD[0], honest_HD, info(n=50, f=24))
    assert torch.equal(fixed, derived)
    assert not torch.equal(derived, honest_HD.mean(0))


@pytest.mark.parametrize(("n", "f"), [(50, 24), (50, 12), (25, 5), (10, 4), (100, 20)])
def test_z_max_is_the_largest_z_that_the_paper_allows(n: int, f: int) -> None:
    supporters = math.floor(n / 2 + 1) - f
    share = (n - f - supporters) / (n - f)
    below = 0.5 * (1 + math.erf(z_max(n, f) / math.sqrt(2)))
    assert below == pytest.approx(share, abs=1e-9)


@pytest.mark.parametrize(("n", "f"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (8, 2), (2, 1), (5, 4)])
def test_z_max_is_a_number_for_every_job(n: int, f: int) -> None:
    assert 0.0 <= z_max(n, f) < 8.0


@pytest.mark.parametrize("name", [n for n in NAMES if ATTACKS[n].needs_honest])
def test_colluders_need_honest_rows(name: str) -> None:
    for missing in (None, torch.zeros(0, 3)):
        with pytest.raises(ValueError, match="honest_HD"):
            find(name).function(torch.zeros(3), missing, info())


def test_parameters_are_checked() -> None:
    with pytest.raises(ConfigError, match=r'drill\.facter: no such parameter of scale\. Did you mean "factor"\?'):
        ATTACKS["scale"].check_params({"facter": 2.0}, "drill")
    with pytest.raises(ConfigError, match=r"drill\.kind: got 'nul'"):
        ATTACKS["nan"].check_params({"kind": "nul"}, "drill")
    assert ATTACKS["alie"].check_params({}, "drill") == {"z": None}
