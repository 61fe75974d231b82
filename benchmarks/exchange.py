"""One reduction, scatter + rule + delivery, against the collective that stock DeepSpeed uses for it.

`python -m benchmarks.exchange`: gloo ranks on this machine reduce one bucket of fp32 gradients of several sizes, as
ZeRO 0 (result to everybody), ZeRO 1 and 2 (to the owner of the whole bucket) and ZeRO 3 (kept by the aggregator),
with the mean and with robust rules. Stock is `all_reduce` (ZeRO 0 to 2) or `reduce_scatter_tensor` (ZeRO 3). All are
called in turn in the same processes; the figure is the median of the ratios call by call. Bytes are counted at the
collectives. The floor beside them is the time of the bytes that ours sends at the speed of a local copy of the same
bytes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration_tests"))

from world import run_world

from benchmarks.exchange_jobs import DELIVERIES, RULES


def main() -> int:
    """Run and print one table for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--sizes", type=float, nargs="*", default=[1e6, 8e6, 6.4e7])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    console = Console(width=140)
    for ranks in args.ranks:
        jobs = [
            {
                "module": "benchmarks.exchange_jobs",
                "kind": "exchange",
                "name": f"{int(size)}",
                "numel": int(size),
                "repetitions": args.repetitions,
            }
            for size in args.sizes
        ]
        results = run_world(jobs, ranks, timeout=3000)
        rows = [row for job in jobs for row in _rows(str(job["name"]), results[str(job["name"])][0])]
        head = ["elements", "ZeRO", "stock, ms", "floor, ms", *(f"{rule} / stock" for rule in RULES), "bytes / stock"]
        title = f"{ranks} ranks"
        if args.markdown:
            lines = [f"{title}:", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
            print("\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]))
            continue
        table = Table(*head, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    return 0


def _rows(name: str, found: dict[str, Any]) -> list[list[str]]:
    if found.get("error"):
        raise SystemExit(f"{found['error']}\n{found.get('trace')}")
    rows = []
    for delivery, stages in DELIVERIES.items():
        times = found["times"][delivery]
        cells = []
        for rule in RULES:
            ratios = [ours / stock for ours, stock in zip(times[rule], times["stock"], strict=True)]
            cells.append(f"{statistics.median(ratios):.2f}")
        stock = statistics.median(times["stock"])
        sent = ", ".join(f"{found['bytes'][delivery][rule]:.4g}" for rule in ("mean", RULES[1]))
        floor = found["floors"][delivery]
        rows.append([f"{int(name):,}", stages, f"{stock * 1e3:.1f}", f"{floor * 1e3:.1f}", *cells, sent])
    return rows


if __name__ == "__main__":
    sys.exit(main())
