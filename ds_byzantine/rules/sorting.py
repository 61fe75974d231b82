"""Order statistics over the rows, coordinate by coordinate, by compare-exchange networks.

With n <= 64 rows and many coordinates it pays to sort *rows against rows*: a comparator is one `minimum` and one
`maximum` over whole contiguous rows, which vectorise, where `torch.sort` and `torch.median` treat every coordinate as a
little problem of its own. Comparators that the wanted ranks do not depend on are left out. Exact in any dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

# Bytes of rows that the network works on at a time. Measured best at 1 to 4 MiB on CPUs (smaller blocks pay more for
# dispatch than they save in cache misses); on an accelerator the cost of a launch decides.
_CACHED_BYTES = 2 * 1024 * 1024
_ACCELERATOR_BYTES = 256 * 1024 * 1024


class Comparator(NamedTuple):
    """Puts the smaller value on wire `low` and the larger one on wire `high`, as far as they are `wanted`."""

    low: int
    high: int
    wants_low: bool
    wants_high: bool


def block_columns(n: int, itemsize: int, device_type: str = "cpu") -> int:
    """How many columns of n rows to sort at a time, so that the work stays in the cache.

    Example:
        >>> block_columns(8, 4)
        65536
    """
    budget = _CACHED_BYTES if device_type == "cpu" else _ACCELERATOR_BYTES
    return max(1024, budget // (n * itemsize) // 1024 * 1024)


@lru_cache(maxsize=256)
def network(n: int, lo: int, hi: int, ordered: bool = True) -> tuple[Comparator, ...]:
    """Merge-exchange sorting network on n wires, pruned to what the ranks lo..hi-1 need.

    Args:
        n: wires, 1 to 64 in practice.
        lo: first rank wanted, 0 is the smallest.
        hi: one past the last rank wanted.
        ordered: False if the wanted ranks may come out in any order among themselves (enough for their sum).

    Returns:
        The comparators in the order in which they run.

    Reference:
        Batcher 1968; Knuth, The Art of Computer Programming 3, algorithm 5.2.2M.

    Example:
        >>> [(c.low, c.high) for c in network(3, 0, 3)]
        [(0, 2), (0, 1), (1, 2)]
    """
    unused, loose, exact = range(3)  # what becomes of a wire after the comparator at hand
    state = [(exact if ordered else loose) if lo <= rank < hi else unused for rank in range(n)]
    kept = []
    for i, j in reversed(_merge_exchange(n)):
        if state[i] == state[j] != exact:
            continue  # both unused, or both summed whichever is larger
        kept.append(Comparator(i, j, state[i] != unused, state[j] != unused))
        state[i] = state[j] = exact
    return tuple(reversed(kept))


def _merge_exchange(n: int) -> list[tuple[int, int]]:
    pairs = []
    top = 1 << max((n - 1).bit_length() - 1, 0)
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while d > 0:
            pairs += [(i, i + d) for i in range(n - d) if i & p == r]
            d, q, r = q - p, q // 2, p
        p //= 2
    return pairs


def sorted_rows(
    rows_ND: Tensor | Sequence[Tensor], lo: int = 0, hi: int | None = None, *, ordered: bool = True
) -> list[Tensor]:
    """The order statistics of ranks lo..hi-1 over the rows, coordinate by coordinate.

    Args:
        rows_ND: n rows, [n, D] or a sequence of [D]; any floating dtype, contiguous rows are fastest.
        lo: first rank wanted, 0 is the smallest.
        hi: one past the last rank wanted; all by default.
        ordered: False if the ranks may come in any order among themselves.

    Returns:
        hi - lo rows of [D]. They may share memory with the input: read them only.

    Example:
        >>> sorted_rows(torch.tensor([[3.0, 1.0], [2.0, 5.0], [9.0, 4.0]]), 0, 2)
        [tensor([2., 1.]), tensor([3., 4.])]
    """
    wires = list(rows_ND.detach().unbind(0) if isinstance(rows_ND, Tensor) else rows_ND)
    hi = len(wires) if hi is None else hi
    ours = [False] * len(wires)  # the wire's row is scratch of this call: it may be written over
    spare: list[Tensor] = []
    for i, j, wants_low, wants_high in network(len(wires), lo, hi, ordered):
        a, b = wires[i], wires[j]
        owned = [row for row, mine in ((a, ours[i]), (b, ours[j])) if mine] + spare
        if wants_low and wants_high:
            # The minimum must not land on a row that the maximum still has to read.
            third = spare.pop() if spare else torch.empty_like(a)
            wires[i] = torch.minimum(a, b, out=third)
            second = b if ours[j] else a if ours[i] else torch.empty_like(a)
            wires[j] = torch.maximum(a, b, out=second)
            spare += [a] if ours[i] and ours[j] else []
            ours[i] = ours[j] = True
            continue
        target = owned[0] if owned else torch.empty_like(a)
        spare = owned[1:]
        if wants_low:
            wires[i], ours[i], ours[j] = torch.minimum(a, b, out=target), True, False
        else:
            wires[j], ours[j], ours[i] = torch.maximum(a, b, out=target), True, False
    return wires[lo:hi]


def median_of_rows(rows_ND: Tensor | Sequence[Tensor]) -> Tensor:
    """Coordinate-wise median; for an even number of rows the mean of the two middle values (half of each: no overflow).

    Args:
        rows_ND: n >= 1 rows, [n, D] or a sequence of [D], floating.

    Returns:
        [D] of the same dtype, never sharing memory with the input.

    Example:
        >>> median_of_rows(torch.tensor([[1.0], [8.0], [2.0], [3.0]]))
        tensor([2.5000])
    """
    n = len(rows_ND)
    middle = sorted_rows(rows_ND, (n - 1) // 2, n // 2 + 1, ordered=False)
    if len(middle) == 1:
        return middle[0].clone()
    return torch.mul(middle[0], 0.5).add_(middle[1], alpha=0.5)


def mean_of_rows(rows: Sequence[Tensor]) -> Tensor:
    """Mean of some rows, summed in the order given: [D] each -> [D], never sharing memory with the input."""
    if len(rows) == 1:
        return rows[0].clone()
    total = rows[0] + rows[1]
    for row in rows[2:]:
        total += row
    return total.div_(len(rows))
