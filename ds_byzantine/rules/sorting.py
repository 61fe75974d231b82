"""Order statistics over the rows, coordinate by coordinate, by compare-exchange networks.

With n <= 64 rows and many coordinates it pays to sort *rows against rows*: a comparator is one `minimum` and one
`maximum` over whole contiguous rows, which vectorise, where `torch.sort` and `torch.median` treat every coordinate as a
little problem of its own. Comparators that the wanted ranks do not depend on are left out. Exact in any dtype.

On a CPU with a C++ compiler the same networks run compiled (`native`), with the same bits; on accelerators as one
kernel (`fused`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_byzantine.rules import fused, native
from ds_byzantine.rules.network import Ranks, network

# Bytes of rows that the network works on at a time. Measured best at 1 to 4 MiB on CPUs (smaller blocks pay more for
# dispatch than they save in cache misses); on an accelerator the cost of a launch decides.
_CACHED_BYTES = 2 * 1024 * 1024
_ACCELERATOR_BYTES = 256 * 1024 * 1024


def block_columns(n: int, itemsize: int, device_type: str = "cpu") -> int:
    """How many columns of n rows to sort at a time, so that the work stays in the cache.

    Example:
        >>> block_columns(8, 4)
        65536
    """
    budget = _CACHED_BYTES if device_type == "cpu" else _ACCELERATOR_BYTES
    return max(1024, budget // (n * itemsize) // 1024 * 1024)


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


def of_ranks(rows_ND: Tensor, ranks: Ranks) -> Tensor:
    """What `Ranks` asks for, coordinate by coordinate.

    Args:
        rows_ND: n >= 1 rows, [n, D] floating.
        ranks: 0 <= lo < hi <= n, 0 <= keep <= n.

    Returns:
        [D] of the same dtype, never sharing memory with the input.

    Example:
        >>> of_ranks(torch.tensor([[3.0], [9.0], [2.0], [4.0]]), Ranks(1, 3))
        tensor([3.5000])
        >>> of_ranks(torch.tensor([[0.0], [3.0], [2.0]]), Ranks(1, 2, keep=2))
        tensor([2.5000])
    """
    if is_compiled(rows_ND):
        compute = native.mean_of_ranks if rows_ND.device.type == "cpu" else fused.mean_of_ranks
        return compute(rows_ND, ranks).to(rows_ND.dtype)
    lo, hi, halves, keep = ranks
    average = _middle if halves else mean_of_rows
    if not keep:
        return average(sorted_rows(rows_ND, lo, hi, ordered=False))
    wires = sorted_rows(rows_ND)
    centre_D = average(wires[lo:hi])
    kept = list(wires[:keep])
    for lost in range(len(wires) - keep):
        gained_D = wires[lost + keep]
        moves_D = centre_D - wires[lost] > gained_D - centre_D
        kept[lost % keep] = torch.where(moves_D, gained_D, kept[lost % keep])
    return mean_of_rows(kept)


def median_of_rows(rows_ND: Tensor) -> Tensor:
    """Coordinate-wise median; for an even number of rows the mean of the two middle values (half of each: no overflow).

    Args:
        rows_ND: n >= 1 rows, [n, D] floating.

    Returns:
        [D] of the same dtype, never sharing memory with the input.

    Example:
        >>> median_of_rows(torch.tensor([[1.0], [8.0], [2.0], [3.0]]))
        tensor([2.5000])
    """
    return of_ranks(rows_ND, Ranks.middle(len(rows_ND)))


def is_compiled(rows_ND: Tensor) -> bool:
    """Whether order statistics of these rows come from one pass of compiled code, whatever their width."""
    return native.ready(rows_ND) or fused.ready(rows_ND)


def _middle(ranks: Sequence[Tensor]) -> Tensor:
    """Half of each of two ranks."""
    return torch.mul(ranks[0], 0.5).add_(ranks[1], alpha=0.5)


def mean_of_rows(rows: Sequence[Tensor]) -> Tensor:
    """Mean of some rows, summed in the order given: [D] each -> [D], never sharing memory with the input."""
    if len(rows) == 1:
        return rows[0].clone()
    total = rows[0] + rows[1]
    for row in rows[2:]:
        total += row
    return total.div_(len(rows))
