"""What the examples in this folder share: options, real text, and the replica that stood out, read from the log."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
VOCABULARY = 256  # bytes


def options(about: str | None, config: str) -> argparse.ArgumentParser:
    """Options of every example. `config`: name of the DeepSpeed JSON taken by default."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", type=Path, default=ROOT / "configs" / config, help="the DeepSpeed JSON")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drill", help="let the last replica misbehave: an attack such as sign_flip, or its JSON file")
    parser.add_argument("--log", help="folder of events.jsonl, instead of the JSON's")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # the launcher adds it
    return parser


def load_config(args: argparse.Namespace) -> dict[str, Any]:
    """The DeepSpeed config, with what the command line adds to its "byzantine" section."""
    config: dict[str, Any] = json.loads(args.deepspeed_config.read_text())
    section = config["byzantine"]
    if args.drill:
        section["drill"] = args.drill
    if args.log:
        section["monitor"] = {**section.get("monitor", {}), "dir": args.log}
    return config


def batches(size: int, seq_len: int, seed: int, replica: int) -> Iterator[torch.Tensor]:
    """Endless [size, seq_len] bytes of Python's own language reference.

    Every replica draws from the whole text, as a rule takes replicas to be alike; the ranks of a replica have to draw
    the same.
    """
    text = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))
    generator = torch.Generator().manual_seed(1000 * seed + replica)
    while True:
        starts = torch.randint(len(text) - seq_len, (size,), generator=generator)
        yield torch.stack([text[start : start + seq_len] for start in starts])


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each byte, given those before it."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def most_distant(config: dict[str, Any]) -> str:
    """Which replica of the last run in the log was most often the farthest from the aggregate, and where it ran."""
    log = Path(config["byzantine"]["monitor"]["dir"]) / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    start = max(i for i, event in enumerate(events) if event["kind"] == "run")
    run, steps = events[start], [event for event in events[start:] if event["kind"] == "step"]
    replica, times = Counter(event["suspect"] for event in steps).most_common(1)[0]
    where = f"ranks {run['ranks'][str(replica)]} on {', '.join(run['hosts'][str(replica)])}"
    return f"most distant: replica {replica} of {run['replicas']} in {times} of {len(steps)} steps ({where})"
