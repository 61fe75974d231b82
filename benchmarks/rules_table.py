"""What robustness costs and buys, for every rule: `python -m benchmarks.rules_table` prints a Markdown table.

Rows are standard normal in d dimensions. Two figures for each (n, f):

tax    variance of the aggregate of n honest rows, relative to that of their mean: what one pays when nobody is bad;
kappa  worst ||F(x) - mean_H||^2 over the honest rows' mean squared distance to mean_H, when f rows are replaced by one
       attack vector mean_H + s u; u is the honest standard deviation, a common random direction, one honest row's own
       direction, or minus the mean of the honest rows, and s runs over a grid from 0.1 to 1000.

The second is a lower bound of the rule's true kappa: a cleverer attack may exist.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from ds_byzantine import aggregate
from ds_byzantine.rules.catalog import lookup

RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mean", ()),
    ("centered_clip", ()),
    ("median", ()),
    ("trimmed_mean", ()),
    ("meamed", ()),
    ("phocas", ()),
    ("geometric_median", ()),
    ("krum", ()),
    ("multi_krum", ()),
    ("bulyan", ()),
    ("mda", ()),
    ("smea", ()),
    ("caf", ()),
    ("caf_gated", ()),
    ("trimmed_mean", ("nnm",)),
)
SCALES = torch.logspace(-1, 3, 25, dtype=torch.float64).tolist()


def tax(rule: str, pre: tuple[str, ...], n: int, f: int, d: int, seed: int) -> float:
    """Squared error of the aggregate of honest rows over that of their mean."""
    rows_ND = torch.randn(n, d, generator=torch.Generator().manual_seed(seed))
    robust_D = aggregate(rows_ND, rule=rule, f=f if lookup(rule).tolerates_faults else 0, pre=pre)
    return float(robust_D.square().sum() / rows_ND.mean(0).square().sum())


def kappa(rule: str, pre: tuple[str, ...], n: int, f: int, d: int, seed: int) -> float:
    """Worst squared error found, over the variance of the honest rows."""
    generator = torch.Generator().manual_seed(seed)
    honest_HD = torch.randn(n - f, d, generator=generator)
    mean_D = honest_HD.mean(0)
    variance = float((honest_HD - mean_D).square().sum(1).mean())
    common_D = torch.randn(d, generator=generator)
    directions = (honest_HD.std(0), common_D, honest_HD[0] - mean_D, -mean_D)
    return max(
        _error(rule, pre, f, honest_HD, mean_D + scale * u_D) / variance for u_D in directions for scale in SCALES
    )


def _error(rule: str, pre: tuple[str, ...], f: int, honest_HD: Tensor, bad_D: Tensor) -> float:
    rows_ND = torch.cat([honest_HD, bad_D.expand(f, -1)])
    robust_D = aggregate(rows_ND, rule=rule, f=f if lookup(rule).tolerates_faults else 0, pre=pre)
    return float((robust_D - honest_HD.mean(0)).square().sum())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dimensions", type=int, default=2000)
    parser.add_argument("--draws", type=int, default=3)
    args = parser.parse_args()
    worlds = ((5, 1), (8, 2), (16, 3))
    print("| rule | holds for |" + "".join(f" tax {n}/{f} |" for n, f in worlds), end="")
    print("".join(f" kappa {n}/{f} |" for n, f in worlds))
    print("|---|---|" + "---|" * 2 * len(worlds))
    for rule, pre in RULES:
        info = lookup(rule)
        cells = [" + ".join((*pre, rule)), f"n >= {info.bound}" if info.tolerates_faults else "f = 0"]
        for figure in (tax, kappa):
            for n, f in worlds:
                if n < info.least_replicas(f):
                    cells.append("-")
                    continue
                drawn = [figure(rule, pre, n, f, args.dimensions, seed) for seed in range(args.draws)]
                cells.append(f"{sum(drawn) / len(drawn):.2g}")
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
