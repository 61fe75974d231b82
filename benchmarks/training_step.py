"""Step time, bytes and memory of robust rules over stock DeepSpeed's mean: `python -m benchmarks.training_step`.

Gloo ranks on this machine train a Llama of about 20 million parameters, or another `--model`, in ZeRO 1, 2 and 3. The
engines of all rules live side by side in each rank and step in turn: every ratio compares neighbours in time. On a
machine with fewer cores than ranks the wire is memory and the rule competes with the training itself: a hard case for
the rule.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration_tests"))

from world import run_world

from benchmarks.step_jobs import SECTIONS, median_ratio

SIZE = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 8192,
}


def main() -> int:
    """Run, print the tables and say where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--model", help="folder of a causal language model, in place of the small Llama")
    parser.add_argument("--rules", nargs="*", default=[name for name in SECTIONS if name != "stock"])
    parser.add_argument("--skip-memory", action="store_true")
    args = parser.parse_args()
    shared = {
        "module": "benchmarks.step_jobs",
        "size": SIZE,
        "tokens": args.tokens,
        "repetitions": args.repetitions,
        "model": args.model,
        "sections": ["stock", *args.rules],
    }
    console = Console(width=160)
    jobs = [{**shared, "name": f"speed{s}", "kind": "speed", "stage": s} for s in args.stages]
    results = run_world(jobs, args.ranks, timeout=3000)
    table = Table("ZeRO", "stock, s", *[f"{name} / stock" for name in args.rules])
    for stage in args.stages:
        first = _good(results[f"speed{stage}"][0])
        stock = sorted(first["times"]["stock"])[len(first["times"]["stock"]) // 2]
        cells = ["{:.2f} ({:.2f}-{:.2f})".format(*median_ratio(first["times"], n)) for n in args.rules]
        table.add_row(str(stage), f"{stock:.3f}", *cells)
    millions = first["parameters"] / 1e6
    console.print(f"Step time, {args.ranks} ranks, {millions:.1f}M parameters, fp32, median ratio (least-largest)")
    console.print(table)
    if not args.skip_memory and not args.model:
        _memory(console, shared, args.stages, args.ranks)
    return 0


def _memory(console: Console, shared: dict[str, Any], stages: list[int], ranks: int) -> None:
    """A world of its own per figure: the high-water mark of a process cannot be shared."""
    table = Table("ZeRO", "rule", "bytes / stock", "peak over stock, MiB", "gradients, MiB")
    for stage in stages:
        peaks = {}
        for section in ("stock", "centered_clip"):
            job = {**shared, "name": "memory", "kind": "memory", "stage": stage, "section": section}
            found = [_good(r) for r in run_world([job], ranks, timeout=900)["memory"]]
            peaks[section] = max(r["peak"] for r in found)
        traffic = sum(r["sent"] for r in found) / sum(r["stock"] for r in found)
        extra = (peaks["centered_clip"] - peaks["stock"]) / 2**20
        gradients = 4 * _parameters() / 2**20
        table.add_row(str(stage), "centered_clip", f"{traffic:.4f}", f"{extra:.1f}", f"{gradients:.1f}")
    console.print("Bytes on the wire and peak memory; one bucket holds all gradients at this size")
    console.print(table)


def _parameters() -> int:
    h, i, layers, v = (SIZE[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"))
    return 2 * v * h + layers * (4 * h * h + 3 * h * i + 2 * h) + h


def _good(result: dict[str, Any]) -> dict[str, Any]:
    if result.get("error"):
        raise SystemExit(f"{result['error']}\n{result.get('trace')}")
    return result


if __name__ == "__main__":
    sys.exit(main())
