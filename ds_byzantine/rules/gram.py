"""One pass over the rows of a piece of a block: which rows are finite, and their partial Gram matrix.

The partial matrices of the pieces of a block add up to the matrix of the block, wherever the pieces are, because every
coordinate is centred by its own median over the rows. Products are float32 in cache-sized blocks, summed in float64; a
block whose float32 products overflow or vanish is done again in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ds_byzantine.rules import native
from ds_byzantine.rules.sorting import block_columns, median_of_rows

# Below this a sum of float32 squares has lost digits to underflow (smallest normal 1.2e-38, 7 digits kept).
_UNDERFLOW = 1e-30


@contextmanager
def full_float32() -> Iterator[None]:
    """No TF32 and no bfloat16 inside float32 matrix products, whatever the user's training has chosen."""
    chosen = torch.get_float32_matmul_precision()
    if chosen == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which rows of `dtype` are aggregated: float64 for float64, float32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def column_blocks(rows_ND: Tensor) -> Iterator[Tensor]:
    """The rows in cache-sized column blocks, [n, B] each, in their compute dtype."""
    dtype = compute_dtype(rows_ND.dtype)
    width = block_columns(rows_ND.shape[0], dtype.itemsize, rows_ND.device.type)
    for start in range(0, rows_ND.shape[1], width):
        yield rows_ND[:, start : start + width].to(dtype)


def finite_rows(rows_ND: Tensor) -> Tensor:
    """Which rows have neither NaN nor Inf: [n, D] -> bool [n] on the rows' device."""
    if rows_ND.shape[1] == 0:
        return torch.ones(rows_ND.shape[0], dtype=torch.bool, device=rows_ND.device)
    if native.ready(rows_ND):
        return native.finite(rows_ND)
    # aminmax propagates NaN and keeps Inf, and reads each element once without a temporary of the rows' size.
    if rows_ND.device.type == "cpu":  # there, over a whole tensor, it is several times as fast as along a dimension
        extremes_N2 = torch.stack([torch.stack(torch.aminmax(row_D)) for row_D in rows_ND])
    else:
        extremes_N2 = torch.stack(torch.aminmax(rows_ND, dim=1), dim=1)
    return torch.isfinite(extremes_N2).all(1)


def partial_basis(rows_ND: Tensor) -> Tensor:
    """Gram matrix of the centred basis (x_1 - m, ..., x_n - m, m) over the coordinates at hand.

    Args:
        rows_ND: rows, [n, D], floating.

    Returns:
        [n+1, n+1] float64 on the rows' device; zeros if D = 0 or n = 0. See `Geometry` for what it is good for. If a
        row is not finite, some number on the diagonal is not finite either.

    Reference:
        Centring by the coordinate-wise median; error figures in docs/numerics.md.
    """
    n = rows_ND.shape[0]
    total = torch.zeros(n + 1, n + 1, dtype=torch.float64, device=rows_ND.device)
    if n == 0 or rows_ND.shape[1] == 0:  # no rows: all of a piece were NaN, and have no median
        return total
    if native.ready(rows_ND):
        total = native.gram(rows_ND)
        if rows_ND.dtype == torch.float64 or _trustworthy(total, lambda: _centred(rows_ND)):
            return total
        total.zero_()
    buffer_EB: Tensor | None = None
    with full_float32():
        for block_NB in column_blocks(rows_ND):
            if buffer_EB is None:
                buffer_EB = block_NB.new_empty(n + 1, block_NB.shape[1])
            total += _block_products(block_NB, buffer_EB[:, : block_NB.shape[1]])
    return total


def _block_products(block_NB: Tensor, basis_EB: Tensor) -> Tensor:
    _centred(block_NB, basis_EB)
    gram = (basis_EB @ basis_EB.T).double()
    if block_NB.dtype == torch.float64 or _trustworthy(gram, lambda: basis_EB):
        return gram
    median_B = basis_EB[-1].double()
    wide_EB = torch.cat([block_NB.double() - median_B, median_B[None]])
    return wide_EB @ wide_EB.T


def _centred(rows_NB: Tensor, out_EB: Tensor | None = None) -> Tensor:
    """The rows minus their median, and the median: [n, B] -> [n+1, B]."""
    median_B = median_of_rows(rows_NB)
    if out_EB is None:
        out_EB = torch.empty(len(rows_NB) + 1, len(median_B), dtype=median_B.dtype, device=median_B.device)
    torch.sub(rows_NB, median_B, out=out_EB[:-1])
    out_EB[-1] = median_B
    return out_EB


def _trustworthy(gram: Tensor, basis: Callable[[], Tensor]) -> bool:
    """No float32 square overflowed or lost digits to underflow. Rows of nothing but zeros are exact.

    These are common: the embedding of a token that no replica has seen in this step.
    """
    squares = torch.diagonal(gram).tolist()
    if not all(map(math.isfinite, squares)):
        return False
    small = [i for i, square in enumerate(squares) if square <= _UNDERFLOW]
    if not small:
        return True
    basis_EB = basis()
    return all(low == high == 0 for low, high in (torch.aminmax(basis_EB[i]) for i in small))
