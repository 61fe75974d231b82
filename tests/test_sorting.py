"""Compare-exchange networks against torch.sort, for every n, every pruning and every dtype."""

from __future__ import annotations

import pytest
import torch

from ds_byzantine.rules.network import network
from ds_byzantine.rules.sorting import block_columns, mean_of_rows, median_of_rows, sorted_rows

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("n", range(1, 17))
def test_the_full_network_sorts_every_zero_one_input(n: int) -> None:
    # By the zero-one principle this proves it for all inputs; a sample of the 2^n patterns above n = 12.
    patterns = (
        torch.arange(2**n) if n <= 12 else torch.randint(2**n, (4096,), generator=torch.Generator().manual_seed(n))
    )
    bits = ((patterns[None, :] >> torch.arange(n)[:, None]) & 1).float()
    assert torch.equal(torch.stack(sorted_rows(bits)), bits.sort(0).values)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 11, 16, 31, 32, 33, 63, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sorts_like_torch(n: int, dtype: torch.dtype) -> None:
    rows = torch.randn(n, 65, generator=torch.Generator().manual_seed(n)).to(dtype)
    before = rows.clone()
    assert torch.equal(torch.stack(sorted_rows(rows)), rows.sort(0).values)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("n", range(1, 13))
def test_every_range_of_ranks_of_a_pruned_network(n: int) -> None:
    rows = torch.randint(9, (n, 40), generator=torch.Generator().manual_seed(n)).double()
    before, want = rows.clone(), rows.sort(0).values
    for lo in range(n):
        for hi in range(lo + 1, n + 1):
            assert torch.equal(torch.stack(sorted_rows(rows, lo, hi)), want[lo:hi])
            loose = torch.stack(sorted_rows(rows, lo, hi, ordered=False))
            assert torch.equal(loose.sort(0).values, want[lo:hi])
            assert torch.equal(rows, before)


@pytest.mark.parametrize("n", range(2, 65))
def test_pruning_only_ever_removes_work(n: int) -> None:
    full = network(n, 0, n)
    assert all(0 <= c.low < c.high < n and c.wants_low and c.wants_high for c in full)
    one = network(n, n // 2, n // 2 + 1)
    assert len(one) <= len(full)
    assert len(network(n, 0, n, False)) == 0
    assert len(network(n, 0, 1)) == n - 1  # a minimum needs n - 1 comparisons


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", range(1, 18))
def test_median_is_the_middle_value_or_the_mean_of_the_middle_two(n: int, dtype: torch.dtype) -> None:
    rows = torch.randn(n, 33, generator=torch.Generator().manual_seed(n)).to(dtype)
    ascending = rows.double().sort(0).values
    want = (ascending[(n - 1) // 2] + ascending[n // 2]) / 2
    got = median_of_rows(rows)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_results_share_no_memory_with_the_rows(n: int) -> None:
    rows = torch.randn(n, 5)
    before = rows.clone()
    median_of_rows(rows).fill_(9.0)
    mean_of_rows(list(rows)).fill_(9.0)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_median_of_huge_values_does_not_overflow(dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    rows = torch.full((4, 3), top, dtype=dtype)
    assert torch.equal(median_of_rows(rows), rows[0])


def test_rows_may_be_strided_views_and_tuples() -> None:
    wide = torch.randn(6, 100)
    view = wide[:, 10:50]
    assert torch.equal(torch.stack(sorted_rows(view)), view.sort(0).values)
    assert torch.equal(median_of_rows(view), median_of_rows(view.contiguous()))
    assert torch.equal(torch.stack(sorted_rows(tuple(view))), view.sort(0).values)


def test_rows_of_no_columns() -> None:
    assert median_of_rows(torch.empty(4, 0)).shape == (0,)


def test_rows_that_require_gradients_are_only_read() -> None:
    rows = torch.randn(5, 3, requires_grad=True)
    assert not median_of_rows(rows).requires_grad


@pytest.mark.parametrize("n", [1, 4, 8, 64])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_blocks_stay_within_the_cache_budget_and_are_whole_vectors(n: int, itemsize: int) -> None:
    width = block_columns(n, itemsize)
    assert width % 1024 == 0
    assert 0 < n * width * itemsize <= 2 * 1024 * 1024
    assert block_columns(n, itemsize, "cuda") > width
