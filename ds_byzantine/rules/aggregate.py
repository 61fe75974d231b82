"""The public one-process entry: n rows in, one row out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_byzantine.rules.apply import Aggregator, Named
from ds_byzantine.rules.gram import finite_rows, partial_basis


def aggregate(
    rows: Tensor, *, rule: Named = "centered_clip", f: int, pre: Sequence[Named] = (), seed: int = 0, **params: Any
) -> Tensor:
    """Aggregate n vectors, of which at most f are bad, into one.

    Args:
        rows: [n, d] floating tensor (float16, bfloat16, float32 or float64), n >= 1. It is not modified.
        rule: name of a rule, or an object with `name` and its parameters.
        f: bad rows to tolerate, >= 0.
        pre: pre-aggregations (names or objects), applied in this order.
        seed: for what draws at random (bucketing).
        **params: parameters of the rule.

    Returns:
        [d] tensor of the same dtype and device, never a view of the input. A row with NaN or Inf is removed and counted
        against f; if there are more than f of them, all of the output is NaN.

    Raises:
        ConfigError: unknown rule or parameter.
        InfeasibleError: n is too small for the rule with this f.
        ValueError: `rows` is not a 2-D floating tensor with at least one row, or f < 0.

    Example:
        >>> aggregate(torch.tensor([[1.0, 2.0], [1.2, 2.2], [1.1, 2.1], [900.0, -5.0]]), rule="median", f=1)
        tensor([1.1500, 2.0500])
    """
    _check_rows(rows, f)
    named = {**({"name": rule} if isinstance(rule, str) else rule), **params}
    ready = Aggregator.create(named, f, pre)
    ready.check(rows.shape[0])
    with torch.no_grad():
        return _aggregate(rows.detach(), ready, seed)


def _aggregate(rows_ND: Tensor, ready: Aggregator, seed: int) -> Tensor:
    n, width = rows_ND.shape
    out_D = torch.empty(width, dtype=rows_ND.dtype, device=rows_ND.device)
    if ready.needs_gram:
        basis_EE = partial_basis(rows_ND)
        if bool(torch.isfinite(torch.diagonal(basis_EE)).all()):  # so all rows are: no need to look at them again
            return _decided(rows_ND, ready, basis_EE, seed, out_D)
    else:
        distances_N = ready.combine_unseen(rows_ND, out_D)
        if distances_N is not None and bool(torch.isfinite(distances_N).all()):
            return out_D
    kept_N = finite_rows(rows_ND)
    while True:  # at most n rounds: each but the last removes a row
        bad = n - int(kept_N.sum())
        if bad > ready.f or bad == n:
            return out_D.fill_(float("nan"))
        kept_ND = rows_ND if bad == 0 else rows_ND[kept_N]
        now = ready.without(bad)
        if not now.needs_gram:
            now.combine(kept_ND, None, out_D)
            return out_D
        basis_EE = partial_basis(kept_ND)
        overflowed = ~torch.isfinite(torch.diagonal(basis_EE))[:-1]
        if not overflowed.any():
            return _decided(kept_ND, now, basis_EE, seed, out_D)
        # Only float64 rows of more than 1e154 come here: their squares are Inf, so they are as bad as Inf rows.
        kept_N = kept_N.clone()
        kept_N[kept_N.nonzero()[:, 0][overflowed]] = False


def _decided(rows_ND: Tensor, ready: Aggregator, basis_EE: Tensor, seed: int, out_D: Tensor) -> Tensor:
    points_TKE = ready.decide(basis_EE[None], seed)
    ready.combine(rows_ND, None if points_TKE is None else points_TKE[0], out_D)
    return out_D


def _check_rows(rows: Tensor, f: int) -> None:
    if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point() or rows.shape[0] < 1:
        got = f"{tuple(rows.shape)} {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"rows: got {got}, but aggregate() takes a [n, d] floating tensor with n >= 1 rows.")
    if isinstance(f, bool) or not isinstance(f, int) or f < 0:
        raise ValueError(f"f: got {f!r}, but it counts bad rows: a whole number >= 0.")
