"""How exact are squared distances between rows: ours against plain products, `python -m benchmarks.numerics`."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ds_byzantine.rules.geometry import Geometry
from ds_byzantine.rules.gram import partial_basis

N, D = 8, 1_000_000


def rows(common: float, outlier: float = 1.0) -> Tensor:
    """[8, 1e6] float32: noise of size 1 on a common vector of relative size `common`; row 0 times `outlier`."""
    generator = torch.Generator().manual_seed(0)
    out = common * torch.randn(D, generator=generator) + torch.randn(N, D, generator=generator)
    out[0] *= outlier
    return out


def from_gram(gram: Tensor) -> Tensor:
    """Squared distances from inner products, [n, n]."""
    square = torch.diagonal(gram)
    return square[:, None] + square[None, :] - 2 * gram


def error(got: Tensor, rows_ND: Tensor, among: slice) -> float:
    """Largest relative error of the squared distances between the rows in `among`, against float64 differences."""
    wide = rows_ND.double()
    exact = torch.stack([(wide - row).square().sum(1) for row in wide])
    off = ~torch.eye(N, dtype=torch.bool)[among, among]
    return float(((got.double() - exact)[among, among].abs() / exact[among, among].clamp_min(1e-300))[off].max())


def main() -> None:
    """Print the table."""
    cases = {
        "common / noise 0.1": (rows(0.1), slice(None)),
        "10": (rows(10.0), slice(None)),
        "1000": (rows(1000.0), slice(None)),
        "outlier x 1e8, distances among the others": (rows(0.1, 1e8), slice(1, None)),
    }
    ways = {
        "float32 product": lambda x: from_gram(x @ x.T),
        "float32, centred by the mean": lambda x: from_gram((x - x.mean(0)) @ (x - x.mean(0)).T),
        "ours: centred by the median, float32 in blocks, summed in float64": lambda x: Geometry.of_rows(
            partial_basis(x)[None]
        ).distances_TKK[0],
    }
    table = Table("relative error", *cases)
    for name, way in ways.items():
        table.add_row(name, *[f"{error(way(x), x, among):.0e}" for x, among in cases.values()])
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
