"""ranks.cpp with tensors. The callers have asked `ready` first; shapes and dtypes are those that it lets through."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ds_byzantine.rules.native.build import Building, library, specialised
from ds_byzantine.rules.network import Ranks

logger = logging.getLogger("ds_byzantine")

MOST_ROWS = 128
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
SHARE = 1 << 19  # elements below which another thread does not pay
MANY = 1 << 26  # elements after which a network is worth a second of the compiler's time

_Result = TypeVar("_Result")


def ready(rows_ND: Tensor) -> bool:
    """Whether the compiled functions take these rows: plain tensors [n, D] of n <= 128 on the CPU, rows contiguous.

    The first call compiles the library, which takes about a second.
    """
    return (
        type(rows_ND) in (Tensor, Parameter)  # not a fake or wrapped one, whose memory is not its own
        and rows_ND.device.type == "cpu"
        and not rows_ND.is_neg()
        and rows_ND.dtype in TYPES
        and rows_ND.dim() == 2
        and 0 < rows_ND.shape[0] <= MOST_ROWS
        and (rows_ND.stride(1) == 1 or rows_ND.shape[1] <= 1)
        and rows_ND.layout == torch.strided
        and _checked()
    )


def mean_of_ranks(rows_ND: Tensor, ranks: Ranks) -> Tensor:
    """What `ranks` asks for, per coordinate.

    Args:
        rows_ND: see `ready`.
        ranks: of the n rows.

    Returns:
        [D] float32, or float64 for float64 rows.
    """
    n, columns = rows_ND.shape
    out_D = torch.empty(columns, dtype=torch.float64 if rows_ND.dtype == torch.float64 else torch.float32, device="cpu")
    chosen = _sorter(n, ranks)
    call = chosen.library(n * columns).ds_byzantine_reduce

    def part(start: int, stop: int) -> None:
        call(*_rows(rows_ND, start, stop), *chosen.job, _at(out_D, start))

    _split(n, columns, part)
    return out_D


def reduce_into(rows_ND: Tensor, ranks: Ranks, out_D: Tensor) -> Tensor:
    """Write `mean_of_ranks` to `out_D` and look at the rows in the same pass.

    Args:
        rows_ND: see `ready`.
        ranks: of the n rows.
        out_D: [D] of the rows' dtype, contiguous, apart from the rows. Undefined where a row is not finite.

    Returns:
        ||x_i - out||^2, [n] float64: differences and squares as float32 (float64 for float64 rows) before the output
        is rounded to its dtype. All are finite only if all rows are; a square that overflows may hide a finite row.
    """
    n, columns = rows_ND.shape
    chosen = _sorter(n, ranks)
    call = chosen.library(n * columns).ds_byzantine_reduce_into

    def part(start: int, stop: int) -> Tensor:
        sums_N = torch.zeros(n, dtype=torch.float64, device="cpu")
        call(*_rows(rows_ND, start, stop), *chosen.job, _at(out_D, start), _at(sums_N, 0))
        return sums_N

    return torch.stack([torch.zeros(n, dtype=torch.float64, device="cpu"), *_split(n, columns, part)]).sum(0)


def gram(rows_ND: Tensor) -> Tensor:
    """Inner products of the rows minus their coordinate-wise median, and of the median: [n+1, n+1] float64.

    Products of float32 rows are summed in float32 over 512 columns, then in float64.

    Args:
        rows_ND: see `ready`.
    """
    n, columns = rows_ND.shape
    chosen = _sorter(n, Ranks.middle(n))
    call = chosen.library(n * columns).ds_byzantine_gram

    def part(start: int, stop: int) -> Tensor:
        total_EE = torch.zeros(n + 1, n + 1, dtype=torch.float64, device="cpu")
        call(*_rows(rows_ND, start, stop), *chosen.job, _at(total_EE, 0))
        return total_EE

    zero_EE = torch.zeros(n + 1, n + 1, dtype=torch.float64, device="cpu")
    upper_EE = torch.stack([zero_EE, *_split(n, columns, part)]).sum(0).triu_()
    return upper_EE + upper_EE.triu(1).T


def squared_distances(rows_ND: Tensor, centre_D: Tensor) -> Tensor:
    """||x_i - centre||^2: [n, D] and [D] of the compute dtype -> [n] float64; as `reduce_into`'s."""
    n, columns = rows_ND.shape
    call = _loaded().ds_byzantine_squares

    def part(start: int, stop: int) -> Tensor:
        sums_N = torch.zeros(n, dtype=torch.float64, device="cpu")
        call(*_rows(rows_ND, start, stop), _at(centre_D, start), _at(sums_N, 0))
        return sums_N

    return torch.stack([torch.zeros(n, dtype=torch.float64, device="cpu"), *_split(n, columns, part)]).sum(0)


def mix_into(rows_ND: Tensor, weights_N: Tensor, out_D: Tensor) -> None:
    """Write sum_i w_i x_i to `out_D`, added in row order; rows without weight are not read.

    Args:
        rows_ND: see `ready`.
        weights_N: [n] on the CPU, taken in the compute dtype.
        out_D: [D] of the rows' dtype, contiguous, apart from the rows.
    """
    n, columns = rows_ND.shape
    weights_N = weights_N.to(torch.float64 if rows_ND.dtype == torch.float64 else torch.float32).contiguous()
    call = _loaded().ds_byzantine_mix

    def part(start: int, stop: int) -> None:
        call(*_rows(rows_ND, start, stop), _at(weights_N, 0), _at(out_D, start))

    _split(n, columns, part)


def finite(rows_ND: Tensor) -> Tensor:
    """Which rows have neither NaN nor Inf: bool [n]."""
    n, columns = rows_ND.shape
    call = _loaded().ds_byzantine_finite

    def part(start: int, stop: int) -> Tensor:
        flags_N = torch.ones(n, dtype=torch.bool, device="cpu")
        call(*_rows(rows_ND, start, stop), _at(flags_N, 0))
        return flags_N

    return torch.stack([torch.ones(n, dtype=torch.bool, device="cpu"), *_split(n, columns, part)]).all(0)


def settle() -> None:
    """Wait for the libraries that are being compiled in the background. For measurements and tests."""
    for sorter in _sorters.values():
        sorter.settle()


class _Sorter:
    """One network: at first as a table that the general library reads, in time compiled by itself."""

    def __init__(self, n: int, ranks: Ranks) -> None:
        self.key = n, ranks
        network = ranks.network(n)
        flat = [int(number) for comparator in network for number in comparator]
        wires = (ctypes.c_int32 * max(1, len(flat)))(*flat)
        self.job = wires, len(network), ranks.lo, ranks.hi, int(ranks.halves), ranks.keep
        self._best = _loaded()
        self._elements = 0
        self._building: Building | None = None

    def library(self, elements: int) -> ctypes.CDLL:
        """The best library there is now, for so many elements more."""
        before, self._elements = self._elements, self._elements + elements
        if before < MANY <= self._elements:
            self._try(lambda: setattr(self, "_building", specialised(*self.key)))
        if self._building is not None:
            self._try(self._look)
        return self._best

    def settle(self) -> None:
        """Wait for the compiler."""
        if self._building is not None:
            self._try(lambda: self._look(wait=True))

    def _look(self, *, wait: bool = False) -> None:
        assert self._building is not None
        found = self._building.library(wait=wait)
        if found is not None:
            self._best, self._building = found, None

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except OSError as error:
            self._building = None
            logger.debug("the network %s is not compiled by itself: %s", self.key, error)


_sorters: dict[tuple[int, Ranks], _Sorter] = {}


def _sorter(n: int, ranks: Ranks) -> _Sorter:
    if (n, ranks) not in _sorters:
        _sorters[n, ranks] = _Sorter(n, ranks)
    return _sorters[n, ranks]


def _rows(rows_ND: Tensor, start: int, stop: int) -> tuple[object, ...]:
    stride = ctypes.c_int64(rows_ND.stride(0))
    return TYPES[rows_ND.dtype], _at(rows_ND, start), stride, rows_ND.shape[0], ctypes.c_int64(stop - start)


def _at(tensor: Tensor, start: int) -> ctypes.c_void_p:
    """Address of column `start` of the first row."""
    return ctypes.c_void_p(tensor.data_ptr() + start * tensor.element_size())


def _split(n: int, columns: int, part: Callable[[int, int], _Result]) -> list[_Result]:
    """Run `part` over all columns, in as many threads as PyTorch may use; a foreign call lets go of the GIL.

    The results come in the order of the columns, so that their sum does not depend on who is first.
    """
    if columns == 0:
        return []
    threads = min(torch.get_num_threads(), n * columns // SHARE)
    if threads <= 1:
        return [part(0, columns)]
    width = -(-columns // threads // 512) * 512
    bounds = [(start, min(start + width, columns)) for start in range(0, columns, width)]
    try:
        return list(_pool(threads).map(lambda bound: part(*bound), bounds))
    except RuntimeError:  # the interpreter is ending and starts no more threads
        return [part(0, columns)]


@lru_cache(maxsize=8)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="ds_byzantine")


def _loaded() -> ctypes.CDLL:
    found = library()
    assert found is not None  # `ready` was asked
    return found


@lru_cache(maxsize=1)
def _checked() -> bool:
    """Whether there is a library, and it finds medians that are known."""
    if library() is None:
        return False
    values_D = torch.arange(130, dtype=torch.float32, device="cpu")
    rows_ND = torch.stack([values_D + shift for shift in (2.0, -9.0, 1.0, 700.0, 0.0)])
    if torch.equal(mean_of_ranks(rows_ND, Ranks(2, 3)), values_D + 1.0):
        return True
    logger.warning("ranks.cpp gives wrong medians with this compiler, so it is not used; PyTorch is.")
    return False
