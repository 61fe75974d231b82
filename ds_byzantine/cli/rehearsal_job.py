"""One rank of a rehearsal: trains a tiny Llama on Python's own help texts once for each entry of a table.

`deepspeed --num_gpus N --module ds_byzantine.cli.rehearsal_job TABLE.json OUT`. All runs share one launched world. The
first rank writes OUT/<name>.json when a run is over; a run whose file exists is not repeated.
"""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_byzantine.cli.rehearsal import made

LENGTH, VOCABULARY, BATCH = 24, 96, 4


def main(table: str, out: str) -> None:
    """Run what the table asks for."""
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # built for inference, takes a minute to compile
    deepspeed.init_distributed(verbose=False)
    text = _text()
    for run in json.loads(Path(table).read_text(encoding="utf-8")):
        path = Path(out) / f"{run['name']}.json"
        if _known(Path(out), run):
            continue
        found = rehearse(run, text, Path(out) / "events" / run["name"])
        if dist.get_rank() == 0:
            path.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
            path.with_suffix(".part").replace(path)
    dist.barrier()


def rehearse(run: dict[str, Any], text: torch.Tensor, events: Path) -> dict[str, Any]:
    """Train once.

    Args:
        run: name, section (of "byzantine"; absent: stock DeepSpeed), steps, stage, lr, seed.
        text: [length] int64, tokens below `VOCABULARY`.
        events: folder for events.jsonl.

    Returns:
        held_out: loss on text that nobody trains on; named: [[step, replica, evidence], ...]; seconds.
    """
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    start = time.perf_counter()
    torch.manual_seed(run["seed"])
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )
    engine = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=_config(run, events),
        optimizer=torch.optim.SGD(model.parameters(), lr=run["lr"], momentum=0.5),
    )[0]
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(run["steps"]):
        tokens = _batch(text, run["seed"] + step * world + rank, BATCH, held_out=False).to(engine.device)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    with torch.no_grad():
        tokens = _batch(text, 10**6, 32, held_out=True).to(engine.device)
        held_out = float(engine(input_ids=tokens, labels=tokens).loss)
    named = _named(events) if rank == 0 else []
    engine.destroy()
    return {**run, "held_out": held_out, "named": named, "seconds": round(time.perf_counter() - start, 2)}


def _config(run: dict[str, Any], events: Path) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": run["stage"]},
    }
    if run.get("section") is not None:
        config["byzantine"] = {**run["section"], "monitor": {"dir": str(events)}}
    return config


def _named(events: Path) -> list[list[Any]]:
    file = events / "events.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return [[e["step"], e["replica"], e["evidence"]] for e in found if e["kind"] == "verdict"]


def _known(out: Path, run: dict[str, Any]) -> bool:
    """Whether the first rank has the result of a run already."""
    from deepspeed.accelerator import get_accelerator

    flag = torch.tensor([int(made(out, run))], device=get_accelerator().current_device_name())
    dist.broadcast(flag, 0)
    return bool(flag.item())


def _text() -> torch.Tensor:
    joined = "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    raw = torch.tensor(list(joined.encode("ascii", "ignore")), dtype=torch.long)
    return torch.where((raw >= 32) & (raw < 127), raw - 32, torch.zeros_like(raw))[:200_000]


def _batch(text: torch.Tensor, seed: int, size: int, *, held_out: bool) -> torch.Tensor:
    cut = int(0.9 * len(text))
    low, high = (cut, len(text)) if held_out else (0, cut)
    starts = torch.randint(low, high - LENGTH - 1, (size,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[s : s + LENGTH] for s in starts.tolist()])


if __name__ == "__main__":
    main(*[argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo aborts now and then in the interpreter's exit
