"""The events of a run and the file they are written to.

`events.jsonl` holds one JSON object a line, flushed at once, so that it can be read while it grows and after a kill.
Every object carries `schema` and `kind`; unknown kinds are to be skipped by readers.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

SCHEMA = 1


@dataclass(frozen=True)
class RunEvent:
    """First line of a run, and of every resumption: what protects what.

    Args:
        ranks: the global ranks of each replica.
        hosts: the hosts of each replica.
        parallel: the kinds of parallelism within a replica, e.g. "pipeline 2 x tensor 2"; empty if it is one rank.
        alpha: largest probability of naming a healthy replica in the whole run.
        on_suspect: what happens to a replica that is named.
        started: Unix time in seconds.
        step: optimizer steps taken before, 0 unless resumed.
        devices: what each rank of a replica computes on, by replica.
    """

    kind: ClassVar[str] = "run"
    version: str
    rule: str
    f: int
    replicas: int
    scope: str
    stage: int
    host: str
    drill: str | None = None
    ranks: dict[str, list[int]] = field(default_factory=dict)
    hosts: dict[str, list[str]] = field(default_factory=dict)
    parallel: str = ""
    alpha: float = 0.001
    on_suspect: str = "log"
    started: float = 0.0
    step: int = 0
    devices: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class StepEvent:
    """One optimizer step.

    Args:
        step: number of the step, from 0.
        kept: replicas whose rows took part in every tensor.
        dropped: replicas that lost a row in at least one tensor because it was not finite.
        nonfinite: for each replica, in how many aggregated tensors its row was not finite (a tensor that is replicated
            over tensor ranks or tied over stages counts once for each copy).
        distances: for each replica, the square root of the summed squared distances of its rows to the aggregate;
            null where no row of it could be used.
        suspect: the replica with the largest distance, or null. One step is no evidence: see `evidence`.
        suspect_ranks: the global ranks of that replica in which the distance, or the rows that were not finite, are
            concentrated. The ranks of a replica differ only under pipeline, tensor or expert parallelism.
        unsafe: tensors in which more than f rows were not finite, with the replicas they came from; the aggregate is
            NaN there and the step is skipped.
        bytes: what rank 0 sent for gradients in this step.
        stock_bytes: what the host's own reduction would have sent (ring algorithms).
        exchange_ms, rule_ms: wall-clock time on rank 0 in collectives and in the rule.
        step_ms: wall-clock time between the ends of this step and the one before on rank 0; null in the first.
        time: Unix time in seconds at the end of the step.
        loss: training loss of the first replica, the mean over the micro-steps; null if the host does not say.
        evidence: by kind ("outlying", "nonfinite", "zero", "duplicate"), log10 of the e-value against each replica.
        named: replicas against which the evidence has reached the bound, in the order in which it did.
        quarantined: replicas whose rows are left out from now on.
        norms: norm of each replica's gradient, null where unknown. This and the next four are null or empty where the
            step's inner products were not computed.
        cosine_min: smallest cosine between the gradients of two replicas.
        norm_dispersion: largest norm over the median norm.
        regime_ratio: R = kappa Var / ||grad L||^2: below 1 the rule has something to work with.
        duplicates: pairs of replicas that sent the same row.
    """

    kind: ClassVar[str] = "step"
    step: int
    kept: list[int]
    dropped: list[int]
    nonfinite: list[int]
    distances: list[float | None]
    suspect: int | None
    suspect_ranks: list[int]
    unsafe: dict[str, list[int]]
    bytes: int
    stock_bytes: int
    exchange_ms: float
    rule_ms: float
    step_ms: float | None = None
    time: float = 0.0
    loss: float | None = None
    evidence: dict[str, list[float]] = field(default_factory=dict)
    named: list[int] = field(default_factory=list)
    quarantined: list[int] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    cosine_min: float | None = None
    norm_dispersion: float | None = None
    regime_ratio: float | None = None
    duplicates: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class VerdictEvent:
    """The evidence against a replica has reached the bound.

    Args:
        step: in which step.
        replica: index.
        ranks: its global ranks in which the trouble is concentrated.
        hosts: where these run.
        evidence: the kind that reached the bound.
        log10_e: log10 of the e-value.
        bound: log10 of n kinds / alpha, which it reached.
        since: first step of the stretch in which the evidence grew to this.
        alpha: largest probability of such a verdict against any healthy replica in the whole run.
        action: "log", "quarantine" or "checkpoint_exit"; "none" where it could not be taken.
        why: one sentence for people.
    """

    kind: ClassVar[str] = "verdict"
    step: int
    replica: int
    ranks: list[int]
    hosts: list[str]
    evidence: str
    log10_e: float
    bound: float
    since: int
    alpha: float
    action: str
    why: str


Event = RunEvent | StepEvent | VerdictEvent


class EventLog:
    """Appends events to `<directory>/events.jsonl`.

    Args:
        directory: created if missing.

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory) / "events.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, event: Event) -> None:
        """Append one event and flush it to the operating system."""
        record = {"schema": SCHEMA, "kind": event.kind, **asdict(event)}
        self._file.write(json.dumps(_plain(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; later writes fail."""
        self._file.close()


def _plain(value: Any) -> Any:
    """JSON has no NaN and no Inf: they become null."""
    if isinstance(value, float):
        return round(value, 9) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
