"""What each rank does for `training_step.py`: build engines side by side, step them in turn, and read the meters."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECTIONS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "centered_clip": {"f": 1},
    "median": {"rule": "median", "f": 1},
    "trimmed_mean": {"rule": "trimmed_mean", "f": 1},
    "nnm+trimmed_mean": {"pre": ["nnm"], "rule": "trimmed_mean", "f": 1},
    "caf_gated": {"rule": "caf_gated", "f": 1},
}


def build(job: dict[str, Any], section: dict[str, Any] | None) -> Any:
    """An engine on a Llama of the size that the job names, or on the model in its folder."""
    import deepspeed
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if job.get("model"):
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32, use_cache=False)
    else:
        model = LlamaForCausalLM(LlamaConfig(use_cache=False, tie_word_embeddings=False, **job["size"]))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": job["stage"]},
        "steps_per_print": 10**9,
    }
    if section is not None:
        config["byzantine"] = {**section, "monitor": {"dir": tempfile.mkdtemp(), "every": 10**6}}
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def one_step(engine: Any, tokens: torch.Tensor) -> float:
    """Seconds of one step, from a barrier to the next."""
    dist.barrier()
    began = time.perf_counter()
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    dist.barrier()
    return time.perf_counter() - began


def own_tokens(job: dict[str, Any]) -> torch.Tensor:
    """A sequence of this rank's own, as in training: equal rows on all ranks are a special case of some rules."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, job["size"]["vocab_size"], (1, job["tokens"]), generator=generator)


def speed(job: dict[str, Any]) -> dict[str, Any]:
    """Step times of the sections in turn, in one process: [repetitions] seconds each, without the first two."""
    from ds_byzantine.rules import native

    engines = {name: build(job, SECTIONS[name]) for name in job["sections"]}
    tokens = own_tokens(job)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for repetition in range(job["repetitions"] + 2):
        for name, engine in engines.items():
            seconds = one_step(engine, tokens)
            if repetition == 1:
                native.settle()  # networks that are being compiled in the background
            if repetition >= 2:
                times[name].append(seconds)
    parameters = sum(int(getattr(p, "ds_numel", p.numel())) for p in next(iter(engines.values())).module.parameters())
    for engine in engines.values():
        engine.destroy()
    return {"times": times, "parameters": parameters}


def memory(job: dict[str, Any]) -> dict[str, Any]:
    """Peak resident memory of this rank over a few steps with one section, and the bytes it sent per step."""
    engine = build(job, SECTIONS[job["section"]])
    tokens = own_tokens(job)
    one_step(engine, tokens)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    sent = stock = 0
    for _ in range(2):
        one_step(engine, tokens)
    from ds_byzantine.activation import attachment_of

    attachment = attachment_of(engine)
    if attachment is not None:
        recorder, transport = attachment.aggregator.recorder, attachment.aggregator.peers.parts[0].transport
        before = transport.bytes_sent
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        stock = recorder.stock_bytes
        engine.step()
        sent = transport.bytes_sent - before
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    return {"peak": peak, "sent": sent, "stock": stock}


def median_ratio(times: dict[str, list[float]], name: str) -> tuple[float, float, float]:
    """Median, least and largest ratio to stock, pair by pair."""
    ratios = [ours / stock for ours, stock in zip(times[name], times["stock"], strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)
