"""Every rule against `rows.mean(0)`, PyTorch's own order statistics and other libraries.

`python -m benchmarks.rules_speed`: one thread, standard normal rows. All ways are called in turn on the same rows;
the figure is the median of the ratios call by call. "compiled" is what a CPU with a C++ compiler runs, "eager" what
runs without one. The floor is the time to read n x d and write d elements at the speed of a local copy. Coordinate-
wise rules include the search for rows that are not finite. Other libraries run in environments of their own, each
started with its own Python:

    python -m benchmarks.rules_speed --peer byzfl=ENV/bin/python --peer byzpy=OTHER/bin/python --peer krum=...

`--growth` shows the time per coordinate and the memory for n = 4..64 rows and d = 1e6..1e9 coordinates, in a stream of
pieces of a million, as an aggregator sees them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from math import comb
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ds_byzantine import aggregate
from ds_byzantine.rules import native
from ds_byzantine.rules.catalog import MOST_SUBSETS, RULES
from ds_byzantine.rules.gram import partial_basis

COORDINATE = ("median", "trimmed_mean", "meamed")
GRAM = ("krum", "multi_krum", "bulyan", "geometric_median", "centered_clip", "nnm+trimmed_mean", "smea", "caf_gated")
WORKER = Path(__file__).with_name("peer_worker.py")
SLOW = 5.0  # seconds of a call after which it is made once only


class Peer:
    """Another library in a process of its own."""

    def __init__(self, name: str, python: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [python, str(WORKER), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def seconds(self, **asked: Any) -> float | None:
        """Of one call; None if the library has no such rule."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        found = json.loads(self.process.stdout.readline())
        return found.get("seconds")  # type: ignore[no-any-return]


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def ours(rule: str, x: Tensor, f: int) -> Callable[[], Any]:
    """One call of a rule, with its pre-aggregations: "nnm+median"."""
    *pre, last = rule.split("+")
    return lambda: aggregate(x, rule=last, f=f, pre=pre)


def without_library(call: Callable[[], Any]) -> Callable[[], Any]:
    """The same call in PyTorch alone."""

    def run() -> None:
        with patch.object(native, "ready", return_value=False):
            call()

    return run


def compare(rule: str, n: int, d: int, dtype: str, peers: list[Peer], repetitions: int) -> dict[str, float | None]:
    """Median ratios: ours over the mean, and everybody else over ours."""
    f = max(1, (n - 3) // 4)
    while RULES[rule.split("+")[-1]].searches_subsets and comb(n, f) > MOST_SUBSETS:
        f -= 1
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    call = ours(rule, x, f)
    ways: dict[str, Callable[[], float | None]] = {
        "mean": lambda: timed(lambda: x.mean(0)),
        "compiled": lambda: timed(call),
        "eager": lambda: timed(without_library(call)),
    }
    if rule == "median":
        ways["torch.median"] = lambda: timed(lambda: x.median(0))
    if rule in COORDINATE:
        ways["torch.sort"] = lambda: timed(lambda: x.sort(0))
    else:
        ways["rows @ rows.T"] = lambda: timed(lambda: x @ x.T)
        ways["gram"] = lambda: timed(lambda: partial_basis(x))
    for peer in peers:
        if rule != "smea" or n <= 16:  # they search all subsets of the vectors: hours
            ways[peer.name] = partial(peer.seconds, rule=rule, n=n, f=f, d=d, dtype=dtype, seed=0)
    for _ in range(-(-(1 << 26) // x.numel()) + 1):  # until the networks are worth a compilation of their own
        call()
    native.settle()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items():  # once to warm up
        first = way()
        if first is None or first > SLOW:
            seconds[name] = [] if first is None else [first] * repetitions
    for _ in range(repetitions):
        for name, way in ways.items():
            found = way() if len(seconds[name]) < repetitions else None
            if found is not None:
                seconds[name].append(found)
    copy = torch.zeros_like(x)
    floor = min(timed(lambda: copy.copy_(x)) for _ in range(5)) / 2 * (n + 1) / n
    out: dict[str, float | None] = {"mean": statistics.median(seconds["mean"]), "floor": floor}
    for name in ("compiled", "eager"):
        out[name] = _ratio(seconds[name], seconds["mean"])
    for name in ("torch.median", "torch.sort", *(peer.name for peer in peers)):
        out[name] = _ratio(seconds.get(name), seconds["compiled"])
        out[f"{name}/eager"] = _ratio(seconds.get(name), seconds["eager"])
    if "gram" in seconds:
        out["gram"] = _ratio(seconds["gram"], seconds["rows @ rows.T"])
    return out


def _ratio(above: list[float] | None, below: list[float]) -> float | None:
    if not above:
        return None
    return statistics.median(a / b for a, b in zip(above, below, strict=False))


def growth(sizes: list[int]) -> None:
    """Time per coordinate and memory for many rows and many coordinates."""
    piece = 10**6
    print(
        "| n | d | median, ns/coordinate | centered_clip, ns/coordinate | memory besides the rows, MiB |\n"
        "|---|---|---|---|---|"
    )
    for n in (4, 8, 16, 32, 64):
        x = torch.randn(n, piece)
        for d in sizes:
            calls = [ours("median", x, 1), ours("centered_clip", x, 1)]
            for call in calls:
                for _ in range(-(-(1 << 26) // x.numel()) + 1):
                    call()
            native.settle()
            Path("/proc/self/clear_refs").write_text("5")
            before = _resident("VmRSS")
            nanoseconds = []
            for call in calls:
                began = time.perf_counter()
                for _ in range(d // piece):
                    call()
                nanoseconds.append((time.perf_counter() - began) / d * 1e9)
            extra = (_resident("VmHWM") - before) / 2**20
            print(f"| {n} | {d:.0e} | {nanoseconds[0]:.2f} | {nanoseconds[1]:.2f} | {extra:.0f} |", flush=True)


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def main() -> None:
    """Print the tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[4, 8, 16, 64])
    parser.add_argument("--dimensions", type=float, nargs="*", default=[1e6])
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--peer", action="append", default=[], metavar="byzfl=PYTHON", help="byzfl, byzpy or krum")
    parser.add_argument("--growth", type=float, nargs="*", metavar="D", help="coordinates, default 1e6 to 1e9")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.growth is not None:
        growth([int(d) for d in args.growth or (1e6, 1e7, 1e8, 1e9)])
        return
    with ExitStack() as stack:
        peers = [Peer(*one.split("=", 1)) for one in args.peer]
        for peer in peers:
            stack.callback(peer.process.kill)
        columns = ["mean, ms", "floor, ms", "compiled / mean", "eager / mean", "gram / rows@rows.T"]
        others = ["torch.median", "torch.sort", *(peer.name for peer in peers)]
        print(f"| rule | n | d | dtype | {' | '.join(columns)} | {' | '.join(f'{o} / ours' for o in others)} |")
        print("|---" * (4 + len(columns) + len(others)) + "|")
        for dtype in args.dtypes:
            for d in args.dimensions:
                for n in args.rows:
                    for rule in (*COORDINATE, *GRAM):
                        if dtype == "float32" or rule in COORDINATE:
                            _line(rule, n, int(d), dtype, peers, args.repetitions, others)


def _line(rule: str, n: int, d: int, dtype: str, peers: list[Peer], repetitions: int, others: list[str]) -> None:
    try:
        found = compare(rule, n, d, dtype, peers, repetitions)
    except Exception as error:  # a rule that does not hold for so few rows
        print(f"| {rule} | {n} | {d:.0e} | {dtype} | {type(error).__name__} |" + " |" * (4 + len(others)), flush=True)
        return

    def show(key: str, factor: float = 1.0) -> str:
        value = found.get(key)
        return "-" if value is None else f"{value * factor:.3g}"

    def against(key: str) -> str:
        value = show(key)
        return value if value == "-" else f"{value} ({show(f'{key}/eager')})"

    cells = [show("mean", 1e3), show("floor", 1e3), show("compiled"), show("eager"), show("gram")]
    print(
        f"| {rule} | {n} | {d:.0e} | {dtype} | {' | '.join(cells)} | {' | '.join(against(o) for o in others)} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
