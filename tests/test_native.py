"""The compiled order statistics give the bits of the PyTorch version, and are done without where they cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ds_byzantine import aggregate
from ds_byzantine.rules import fused, native
from ds_byzantine.rules.gram import compute_dtype, finite_rows, partial_basis
from ds_byzantine.rules.native import build, kernels
from ds_byzantine.rules.network import Ranks
from ds_byzantine.rules.sorting import median_of_rows, of_ranks

pytestmark = pytest.mark.skipif(not native.ready(torch.zeros(2, 2)), reason="no C++ compiler")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def rows(n: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Heavy tails, ties and zeros, in rows that lie apart."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(n, width + 3, generator=generator, dtype=torch.float64)
    spread = torch.exp(4 * torch.randn(1, width + 3, generator=generator, dtype=torch.float64))
    made = (normal * spread).round(decimals=1).to(dtype)
    return made[:, 1 : width + 1]


def both(monkeypatch: pytest.MonkeyPatch, compute: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """The same with and without the compiled library."""
    compiled = compute()
    with monkeypatch.context() as patch:
        patch.setattr(native, "ready", lambda _: False)
        return compiled, compute()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 16, 33, 64, 128])
def test_the_same_bits(n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (1, 7, 16, 130):
        x = rows(n, width, dtype, seed=n + width)
        cut = (n - 1) // 3
        wide = x.to(compute_dtype(dtype))  # what the PyTorch version is given
        for compute in (
            median_of_rows,
            lambda some: of_ranks(some, Ranks(0, n)),
            lambda some, cut=cut: of_ranks(some, Ranks(cut, n - cut)),
            lambda some, cut=cut: of_ranks(some, Ranks(cut, n - cut, keep=n - cut)),
            lambda some, cut=cut: of_ranks(some, Ranks.middle(n, keep=n - cut)),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(native, "ready", lambda _: False)
                plain = compute(wide).to(dtype)
            torch.testing.assert_close(compute(x), plain, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "meamed", "phocas", "bulyan", "centered_clip"])
def test_the_same_aggregate(rule: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows(11, 700, dtype)
    compiled, plain = both(monkeypatch, lambda: aggregate(x, rule=rule, f=2))
    exact = rule not in ("bulyan", "centered_clip")  # these need inner products, which are summed in another order
    torch.testing.assert_close(compiled, plain, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5)


@pytest.mark.parametrize("keep", [0, 6])
def test_a_network_that_is_compiled_by_itself(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows(8, 1000, torch.float32)
    ranks = Ranks(3, 5, True) if keep == 0 else Ranks(2, 6, keep=keep)
    before = kernels.mean_of_ranks(x, ranks)
    monkeypatch.setattr(kernels, "MANY", 1)
    monkeypatch.setattr(kernels, "_sorters", {})
    general = kernels._loaded()
    kernels.mean_of_ranks(x, ranks)
    native.settle()
    [sorter] = kernels._sorters.values()
    assert sorter.library(1) is not general
    assert torch.equal(kernels.mean_of_ranks(x, ranks), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 31, 128])
@pytest.mark.parametrize("width", [1, 13, 512, 1500])
def test_inner_products(n: int, dtype: torch.dtype, width: int) -> None:
    x = rows(n, width, dtype).sign() + rows(n, width, dtype, seed=1) / 1e3
    x = x.to(dtype)
    wide = x.double()
    middle = wide.sort(0).values[[(n - 1) // 2, n // 2]].mean(0)
    basis = torch.cat([wide - middle, middle[None]])
    exact = basis @ basis.T
    scale = exact.diagonal().clamp_min(1e-9).sqrt()
    found = partial_basis(x)
    assert torch.equal(found, found.T)
    assert float(((found - exact) / scale[:, None] / scale).abs().max()) < 1e-5


def test_rows_that_are_not_finite_show() -> None:
    for dtype in DTYPES:
        for bad in (float("nan"), float("inf"), -float("inf")):
            x = rows(5, 300, dtype)
            x[3, 299] = bad
            assert native.finite(x).tolist() == [True, True, True, False, True]
            assert not torch.isfinite(torch.diagonal(native.gram(x))).all()
    assert finite_rows(torch.full((1, 3), torch.finfo(torch.float32).max)).all()


def test_tiny_and_huge_rows_are_computed_in_float64() -> None:
    for size in (1e-25, 1e25):
        x = rows(5, 200, torch.float64) * size
        exact = partial_basis(x)
        torch.testing.assert_close(partial_basis(x.float()), exact, rtol=1e-4, atol=1e-4 * float(exact.max()))
    assert not partial_basis(torch.zeros(4, 50)).any()


def test_threads_change_nothing() -> None:
    x = rows(8, 200_037, torch.float32).clamp(-9, 9)
    bad = x.clone()
    bad[6, 200_030] = float("inf")

    def all_of_it() -> list[Tensor]:
        distances = native.squared_distances(x, x[0].clone())
        mixed = torch.empty_like(x[0])
        native.mix_into(x, torch.linspace(-1, 1, 8), mixed)
        middle = native.mean_of_ranks(x, Ranks(3, 5))
        return [middle, native.finite(x), native.finite(bad), native.gram(x), distances, mixed]

    alone = all_of_it()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = all_of_it()
    finally:
        torch.set_num_threads(before)
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12 if one.dtype == torch.float64 else 0, atol=1e-9)
    assert alone[2].tolist() == [True] * 6 + [False, True]


@pytest.mark.parametrize("width", [1, 15, 37, 1000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_distances(dtype: torch.dtype, width: int) -> None:
    x = rows(5, width, dtype).clamp(-9, 9)
    centre = rows(1, width, torch.float64, seed=3)[0].clamp(-9, 9).to(compute_dtype(dtype))
    exact = (x.double() - centre.double()).square().sum(1)
    torch.testing.assert_close(native.squared_distances(x, centre), exact, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 64, 128])
def test_a_weighted_sum(n: int, dtype: torch.dtype) -> None:
    """Rounded once; a row without weight is not looked at."""
    for width in (1, 15, 16, 37, 64, 1000):
        x = rows(n, width, dtype, seed=width).clamp(-9, 9)
        weights = rows(1, n, torch.float64, seed=5)[0].clamp(-2, 2)
        weights[n // 2] = 0
        exact = (weights[:, None] * x.double()).sum(0)
        scale = (weights[:, None] * x.double()).abs().sum(0)
        x[n // 2] = float("nan")
        padded = torch.full((width + 64,), 7.0, dtype=dtype)
        native.mix_into(x, weights, padded[:width])
        assert bool((padded[width:] == 7).all())
        error = (padded[:width].double() - exact).abs()
        rounding = torch.finfo(dtype).eps * exact.abs() + 2 * n * torch.finfo(compute_dtype(dtype)).eps * scale
        assert bool((error <= rounding).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 5, 8, 64])
def test_a_reduction_that_looks_at_the_rows(n: int, dtype: torch.dtype) -> None:
    """The output is that of the two-step way to the bit; the distances are to what it was before it was rounded."""
    for width in (1, 37, 2048, 5001):
        x = rows(n, width, dtype, seed=width).clamp(-9, 9)
        for ranks in (Ranks(0, n), Ranks.middle(n), Ranks.middle(n, keep=max(1, n - 2)), Ranks(n // 4, n - n // 4)):
            out = torch.full((width,), float("nan"), dtype=dtype)
            found = native.reduce_into(x, ranks, out)
            centre = native.mean_of_ranks(x, ranks)
            assert torch.equal(out, centre.to(dtype))
            exact = (x.double() - centre.double()).square().sum(1)
            torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_reduction_shows_rows_that_are_not_finite(dtype: torch.dtype, bad: float) -> None:
    for column in (0, 2500, 3000):
        x = rows(5, 3001, dtype)
        x[3, column] = bad
        for ranks in (Ranks(0, 5), Ranks.middle(5), Ranks(1, 4), Ranks.middle(5, keep=3)):
            found = native.reduce_into(x, ranks, torch.empty(3001, dtype=dtype))
            assert not torch.isfinite(found[3])


def test_bfloat16_is_rounded_as_pytorch_does() -> None:
    """Every exponent, ties, NaN, infinities and the numbers below the smallest normal one."""
    bits = torch.arange(-(1 << 31), 1 << 31, 40_503, dtype=torch.int64)
    halves = bits // 65_536 * 65_536 + 32_768  # ties
    wide = torch.cat([bits, halves, halves + 1, halves - 1]).clamp(-(1 << 31), (1 << 31) - 1)
    values = wide.to(torch.int32).view(torch.float32)
    out = torch.empty(len(values), dtype=torch.bfloat16)
    split = torch.stack([values.bfloat16(), (values - values.bfloat16().float()).bfloat16()])
    native.reduce_into(split, Ranks(0, 2), out)
    expected = native.mean_of_ranks(split, Ranks(0, 2)).bfloat16()
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())


def test_no_columns() -> None:
    for rule in ("median", "krum", "centered_clip", "geometric_median"):
        for dtype in (*DTYPES, torch.float16):
            assert aggregate(torch.zeros(7, 0, dtype=dtype), rule=rule, f=1).shape == (0,)


def test_another_default_device() -> None:
    x = rows(5, 100, torch.float32).contiguous()
    with torch.device("meta"):
        assert aggregate(x, rule="median", f=1).equal(x.median(0).values)
        assert native.finite(x).all()
        assert native.gram(x).shape == (6, 6)
        assert native.mean_of_ranks(x, Ranks(2, 3)).equal(x.median(0).values)


def test_a_negated_view() -> None:
    x = rows(5, 40, torch.float32)
    assert torch.equal(aggregate(torch._neg_view(x), rule="median", f=1), -x.median(0).values)


def test_what_it_does_not_take() -> None:
    assert not native.ready(torch.zeros(3, 4, dtype=torch.float16))
    assert not native.ready(torch.zeros(4, 3).T)
    assert not native.ready(torch.zeros(200, 3))
    assert not native.ready(torch.zeros(3))
    assert native.ready(torch.zeros(4, 1))
    assert median_of_rows(torch.zeros(3, 0)).shape == (0,)


CODE = """
import logging, torch
logging.basicConfig(level=logging.INFO)
from ds_byzantine.rules import fused, native
from ds_byzantine import aggregate
print(native.ready(torch.zeros(2, 2)), aggregate(torch.tensor([[1.0], [2.0], [9.0]]), rule="median", f=1).item())
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"DS_BYZANTINE_NATIVE": "0"}, ""),
        ({"PATH": "/nonexistent"}, "there is no C++ compiler; install g++"),
        ({"CXX": "false"}, "the compiler failed"),
    ],
)
def test_going_on_without(change: dict[str, str], said: str, tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), **change}
    ended = subprocess.run(
        [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout.split() == ["False", "2.0"]
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(tmp_path.rglob("*.part"))


def test_code_is_not_loaded_from_a_folder_that_others_can_write_to(tmp_path: Path) -> None:
    folder = tmp_path / "ds_byzantine"
    folder.mkdir()
    folder.chmod(0o777)
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout.split() == ["False", "2.0"]
    assert "can be written to by others" in ended.stderr


def test_what_killed_processes_left_behind_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "ds_byzantine"
    folder.mkdir(mode=0o700)
    old, young = folder / "old.part", folder / "young.part"
    for file in (old, young):
        file.touch()
    os.utime(old, (0, 0))
    assert build._start(()).library(wait=True) is not None
    assert not old.exists()
    assert young.exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key", [(5, Ranks(2, 3)), (6, Ranks(2, 4, True, 4)), (8, Ranks(2, 6))])
def test_the_kernel_for_accelerators_gives_the_same_bits(key: fused.Key, dtype: torch.dtype) -> None:
    """Compiled for this CPU; and again for another width, without another compilation."""
    n, ranks = key
    for width in (500, 1234):
        x = rows(n, width, dtype)
        found = fused.mean_of_ranks(x, ranks)
        assert key not in fused._failed
        assert torch.equal(found, native.mean_of_ranks(x, ranks))
    assert torch.equal(found, fused.traced(key)(*x.unbind(0)))


def test_a_kernel_that_cannot_be_compiled_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no Triton here")

    monkeypatch.setattr(torch, "compile", refuse)
    monkeypatch.setattr(fused, "_failed", set())
    x = rows(7, 100, torch.float32)
    assert torch.equal(fused.mean_of_ranks(x, Ranks(3, 4)), native.mean_of_ranks(x, Ranks(3, 4)))
    assert len(fused._failed) == 1
