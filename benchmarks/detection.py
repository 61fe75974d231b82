"""How many steps it takes to name a bad replica: `python -m benchmarks.detection [--markdown]`.

One process, no training: in each step every replica's gradient is a common signal plus heavy-tailed noise (Student's t
with 3 degrees of freedom) of twice its norm; the last replica is bad. The default rule, the ledger's defaults. The
figure is the median over seeds of the steps until the bad replica is named.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from functools import partial

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ds_byzantine.attacks.catalog import ATTACKS
from ds_byzantine.drills.injector import Injector
from ds_byzantine.drills.scenario import DrillConfig
from ds_byzantine.plan import default_f
from ds_byzantine.rules.aggregate import aggregate
from ds_byzantine.rules.apply import Aggregator
from ds_byzantine.rules.verdicts import add_up, decide, piece_statistics
from ds_byzantine.trust.digest import Repeats, row_digests
from ds_byzantine.trust.ledger import Ledger, Observation

COUNTS = (4, 8, 16, 64)
WIDTH = 2048
NOISE = 2.0
PATIENCE = 400
# The attack's own defaults, but where these do nothing at this size or in half of the cases.
PARAMS = {"alie": {"z": 1.5}, "bit_flip": {"where": 30}, "sign_flip": {"factor": 3.0}, "stale": {"delay": 5}}


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/evidence.md")
    args = parser.parse_args()
    names = [name for name in sorted(ATTACKS) if name != "label_flip"]
    cells = {
        (name, n): [steps_to_name(name, n, seed) for seed in range(args.seeds)]
        for name in track(names, "attacks", disable=args.markdown)
        for n in COUNTS
    }
    rows = [[name, *(_cell(cells[name, n]) for n in COUNTS)] for name in names]
    if args.markdown:
        print(f"| attack | {' | '.join(f'n={n}' for n in COUNTS)} |")
        print("|---" * (len(COUNTS) + 1) + "|")
        for row in rows:
            print(f"| {' | '.join(row)} |")
        return 0
    table = Table("attack", *(f"n={n}" for n in COUNTS), title="Steps until the bad replica is named, and by what")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    return 0


def steps_to_name(name: str, n: int, seed: int) -> tuple[int, str] | None:
    """Steps and kind of evidence; None if it was not named in `PATIENCE` steps. A healthy replica that is named first
    is an error of the ledger, and raised."""
    f = default_f(n)
    rule, ledger, repeats = Aggregator.create("centered_clip", f), Ledger(n, f), Repeats(n)
    scenario = DrillConfig.load({"name": name, "replicas": [n - 1], "seed": seed, **PARAMS.get(name, {})})
    rows_ND = torch.empty(n, WIDTH)
    in_use = partial(aggregate, rule="centered_clip", f=f)
    injector = Injector(scenario, n, f, n - 1, lambda block, _: rows_ND.clone(), 0, lambda rows, _: in_use(rows))
    for step, fresh_ND in zip(range(PATIENCE), gradients(n, seed), strict=False):
        rows_ND = fresh_ND
        injector.tap(rows_ND[n - 1], step)
        statistics_1W = piece_statistics(rows_ND, None, True)[None]
        finite_1N, basis_1EE = _parts(statistics_1W, n)
        _, distances_1N = decide(rule, finite_1N, basis_1EE, step)
        lost = frozenset((~finite_1N[0]).nonzero()[:, 0].tolist())
        known = [None if i in lost else float(d) ** 0.5 for i, d in enumerate(distances_1N[0])]
        digests = [0 if i in lost else int(d) for i, d in enumerate(row_digests(rows_ND))]
        zeros = frozenset(i for i, d in enumerate(digests) if not d) - lost
        for finding in ledger.observe(Observation(step, known, lost, zeros, repeats.observe(digests)[0])):
            if finding.replica == n - 1:
                return step + 1, finding.kind
            if finding.kind != "duplicate":
                raise AssertionError(f"{name}, n={n}, seed {seed}: healthy replica {finding.replica} named")
    return None


def gradients(n: int, seed: int) -> Iterator[torch.Tensor]:
    """A slowly turning signal of norm 1, and noise of norm `NOISE` on each replica."""
    generator = torch.Generator().manual_seed(1000 * n + seed)
    signal = torch.randn(WIDTH, generator=generator)
    while True:
        signal = 0.98 * signal + 0.2 * torch.randn(WIDTH, generator=generator)
        normal = torch.randn(n, WIDTH, generator=generator)
        tail = torch.randn(3, n, WIDTH, generator=generator).square().mean(0).sqrt()
        noise = normal / tail
        yield signal / signal.norm() + NOISE * noise / noise.norm(dim=1).mean()


def _parts(statistics_1W: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    finite, basis = add_up([statistics_1W], [[0]], 1, n)
    assert basis is not None
    return finite, basis


def _cell(found: list[tuple[int, str] | None]) -> str:
    named = [one for one in found if one is not None]
    if len(named) <= len(found) // 2:
        return "-" if not named else f"- ({len(named)}/{len(found)})"
    kinds = sorted({kind for _, kind in named})
    return f"{statistics.median(steps for steps, _ in named):.0f} {', '.join(kinds)}"


if __name__ == "__main__":
    raise SystemExit(main())
