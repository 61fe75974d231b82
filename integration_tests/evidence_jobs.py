"""Jobs about evidence: what a drill leaves in the events, on a tiny Llama in five replicas."""

from __future__ import annotations

import json
from pathlib import Path

import torch.distributed as dist
from jobs import engine_of, events, held_out_loss, messages, own_directory, steps


def watch(job: dict) -> dict:
    """Train and say what was found: the events, the messages, and what every rank knows."""
    from ds_byzantine.activation import attachment_of

    directory = own_directory(job)
    with messages() as said:
        engine = engine_of(job)
        steps(engine, job, 0, job.get("steps", 40))
    attachment = attachment_of(engine)
    last = attachment.last_event
    result = {
        "held_out": held_out_loss(engine),
        "events": events(directory),
        "messages": said,
        "evidence": last.evidence,
        "named": last.named,
        "quarantined": last.quarantined,
    }
    engine.destroy()
    return result


def interrupted(job: dict) -> dict:
    """Half of the steps, a checkpoint, a new engine that goes on from it."""
    from ds_byzantine.activation import attachment_of

    half = job["steps"] // 2
    own_directory(job)
    engine = engine_of(job)
    steps(engine, job, 0, half)
    engine.save_checkpoint(job["directory"], tag="half")
    before = attachment_of(engine).last_event
    directory = Path(job["byzantine"]["monitor"]["dir"])
    engine.destroy()
    engine = engine_of(job)
    engine.load_checkpoint(job["directory"], tag="half")
    steps(engine, job, half, job["steps"])
    after = attachment_of(engine).last_event
    result = {
        "before": before.evidence,
        "after": after.evidence,
        "named": after.named,
        "quarantined": after.quarantined,
        "named_before": before.named,
        "events": events(directory),
    }
    engine.destroy()
    return result


def monitors(job: dict) -> dict:
    """A few steps with DeepSpeed's own monitors switched on."""
    own_directory(job)
    engine = engine_of(job)
    steps(engine, job, 0, 4)
    engine.destroy()
    dist.barrier()
    return {}


def read_events(folder: Path) -> list[dict]:
    """The events of a run, for tests that launch scripts of their own."""
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def taken_over(job: dict) -> dict:
    """What an engine of another size takes over from a checkpoint."""
    from ds_byzantine.activation import attachment_of

    own_directory(job)
    engine = engine_of(job)
    engine.load_checkpoint(job["directory"], tag=job["tag"])
    result = {"evidence": attachment_of(engine).hook.guard.ledger.evidence()}
    engine.destroy()
    return result
