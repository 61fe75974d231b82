"""Synthetic event files, written by the package's own EventLog."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_byzantine.monitor.events import EventLog, RunEvent, StepEvent, VerdictEvent

KINDS = ("outlying", "nonfinite", "zero", "duplicate")


@dataclass(frozen=True)
class Job:
    """What happens in a made-up run.

    Args:
        bad: replica that turns bad, or None.
        start: first bad step.
        nonfinite: the bad replica sends NaN in every other step instead of large gradients.
        first: number of the first step; not 0 for a resumption.
    """

    replicas: int = 5
    steps: int = 60
    f: int = 1
    bad: int | None = None
    start: int = 30
    nonfinite: bool = False
    first: int = 0
    alpha: float = 0.001
    ranks_each: int = 1
    action: str = "log"
    drill: str | None = None
    seed: int = 0
    products_every: int = 1
    noise: float = 0.3


def write(folder: Path, job: Job) -> Path:
    """Append the run to `<folder>/events.jsonl`."""
    log = EventLog(folder)
    log.write(run_event(job))
    for event in events(job):
        log.write(event)
    log.close()
    return log.path


def run_event(job: Job) -> RunEvent:
    n, r = job.replicas, job.ranks_each
    return RunEvent(
        version="0.1.0",
        rule="centered_clip" if n > 1 else "mean",
        f=job.f,
        replicas=n,
        scope="tensor",
        stage=2,
        host="ZeRO-2",
        drill=job.drill,
        ranks={str(i): list(range(i * r, (i + 1) * r)) for i in range(n)},
        hosts={str(i): [f"node-{i * r // 8:02d}"] for i in range(n)},
        parallel="" if r == 1 else f"tensor {r}",
        alpha=job.alpha,
        on_suspect=job.action,
        started=1_767_225_600.0,
        step=job.first,
        devices={str(i): ["NVIDIA H100 80GB HBM3"] * r for i in range(n)},
    )


def events(job: Job) -> list[StepEvent | VerdictEvent]:
    """Steps, with a verdict where the evidence reaches the bound."""
    random_ = random.Random(job.seed)
    n, named = job.replicas, list[int]()
    bound = math.log10(n * len(KINDS) / job.alpha)
    evidence = {kind: [0.0] * n for kind in KINDS}
    out: list[StepEvent | VerdictEvent] = []
    for number in range(job.first, job.first + job.steps):
        step = _step(number, job, random_, named if job.action == "quarantine" else [])
        _bet(evidence, step, [i for i in range(n) if job.action != "quarantine" or i not in named])
        now = [i for i in range(n) if max(evidence[k][i] for k in KINDS) >= bound and i not in named]
        named += now
        gone = list(named) if job.action == "quarantine" else []
        seen = {k: list(v) for k, v in evidence.items()}
        out.append(replace(step, evidence=seen if n > 1 else {}, named=list(named), quarantined=gone))
        out += [_verdict(i, step, evidence, bound, job) for i in now]
    return out


def _step(number: int, job: Job, random_: random.Random, left_out: list[int]) -> StepEvent:
    n = job.replicas
    bad = job.bad if job.bad is not None and number >= job.start and job.bad not in left_out else None
    lost = [bad] if bad is not None and job.nonfinite and number % 2 == 0 else []
    size = 2.0 / (1 + number / 40) + 0.5
    norms = [size * random_.lognormvariate(0, 0.08) for _ in range(n)]
    distances: list[float | None] = [0.6 * size * random_.lognormvariate(0, 0.12) for _ in range(n)]
    if bad is not None:
        distances[bad] = None if lost else 6.0 * size * random_.lognormvariate(0, 0.1)
        norms[bad] *= 5
    for i in left_out:
        distances[i] = None
    far = max(range(n), key=lambda i: distances[i] or 0.0)
    return StepEvent(
        step=number,
        kept=[i for i in range(n) if i not in lost and i not in left_out],
        dropped=lost,
        nonfinite=[2 if i in lost else 0 for i in range(n)],
        distances=distances if n > 1 else [0.0],
        suspect=(lost[0] if lost else far) if n > 1 else None,
        suspect_ranks=[far * job.ranks_each],
        unsafe={},
        bytes=1_973_632,
        stock_bytes=3_149_824,
        exchange_ms=30 * random_.lognormvariate(0, 0.25),
        rule_ms=5 * random_.lognormvariate(0, 0.2),
        step_ms=None if number == job.first else 410 * random_.lognormvariate(0, 0.1),
        time=1_767_225_600.0 + 0.4 * number,
        loss=2.2 + 1.6 * math.exp(-number / 30) + random_.gauss(0, 0.03),
        **(_products(number, job, norms, bad, random_) if number % job.products_every == 0 else {}),
    )


def _products(number: int, job: Job, norms: list[float], bad: int | None, random_: random.Random) -> dict[str, Any]:
    """What is known only in steps whose inner products were computed."""
    return {
        "norms": [*norms],
        "cosine_min": random_.uniform(0.3, 0.5) if bad is None else random_.uniform(-0.95, -0.8),
        "norm_dispersion": max(norms) / sorted(norms)[len(norms) // 2],
        "regime_ratio": job.noise * random_.lognormvariate(0, 0.4) * (1 + number / 60),
    }


def _bet(evidence: dict[str, list[float]], step: StepEvent, present: list[int]) -> None:
    """A fair bet of 30% of the wealth that i is the farthest, started anew before it is worth less than 0.1."""
    for i in present:
        stake = 0.7 + 0.3 * len(present) * (i == step.suspect and not step.dropped)
        evidence["outlying"][i] = max(-1.0, evidence["outlying"][i] + math.log10(stake))
        evidence["nonfinite"][i] += 1.0 * (i in step.dropped)


def _verdict(i: int, step: StepEvent, evidence: dict[str, list[float]], bound: float, job: Job) -> VerdictEvent:
    kind = max(KINDS, key=lambda k: evidence[k][i])
    return VerdictEvent(
        step=step.step,
        replica=i,
        ranks=[i * job.ranks_each],
        hosts=[f"node-{i * job.ranks_each // 8:02d}"],
        evidence=kind,
        log10_e=evidence[kind][i],
        bound=bound,
        since=job.start,
        alpha=job.alpha,
        action=job.action,
        why=f"replica {i} was the farthest one in nearly every step since {job.start}",
    )
