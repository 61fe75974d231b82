"""One line of events.jsonl as a checked record. What is in the file is untrusted: wrong types, odd text, huge numbers.

Fields that are missing or make no sense get their defaults, so that files of older versions can be read.
"""

from __future__ import annotations

import math
import unicodedata
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_byzantine.errors import ByzantineError

SCHEMA = 1  # newest that is understood; that of monitor/events.py

MOST_REPLICAS = 16_384

MOST_TEXT = 300

Evidence = dict[str, "array[float]"]
Indices = tuple[int, ...]


class ReportError(ByzantineError, ValueError):
    """A file of events that cannot be reported on: missing, empty, or of a newer schema."""


class Malformed(ValueError):
    """A line that is no record at all; readers skip and count it."""


@dataclass(frozen=True, slots=True)
class Run:
    """A start or a resumption; as `RunEvent`, with ranks, hosts and devices by replica index."""

    replicas: int
    step: int = 0
    version: str = ""
    rule: str = ""
    f: int | None = None
    scope: str = ""
    host: str = ""
    drill: str = ""
    parallel: str = ""
    alpha: float = 0.001
    on_suspect: str = "log"
    started: float | None = None
    ranks: dict[int, Indices] = field(default_factory=dict)
    hosts: dict[int, tuple[str, ...]] = field(default_factory=dict)
    devices: dict[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step; as `StepEvent`. NaN stands for null in numbers and arrays."""

    step: int
    distances: array[float]
    norms: array[float]
    evidence: Evidence
    suspect: int | None = None
    dropped: Indices = ()
    unsafe: tuple[str, ...] = ()
    named: Indices = ()
    quarantined: Indices = ()
    bytes: float = math.nan
    stock_bytes: float = math.nan
    exchange_ms: float = math.nan
    rule_ms: float = math.nan
    step_ms: float = math.nan
    time: float = math.nan
    loss: float = math.nan
    cosine_min: float = math.nan
    norm_dispersion: float = math.nan
    regime_ratio: float = math.nan
    duplicates: tuple[Indices, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The evidence against a replica reached the bound; as `VerdictEvent`."""

    step: int
    replica: int
    kind: str
    log10_e: float
    bound: float
    alpha: float
    since: int | None
    ranks: Indices = ()
    hosts: tuple[str, ...] = ()
    action: str = "log"
    why: str = ""


Record = Run | Step | Verdict


def parse(raw: Any) -> Record | None:
    """The record behind a decoded line; None for a kind that this version does not know.

    Raises:
        ReportError: the line is of a newer schema.
        Malformed: it is no record.

    Example:
        >>> parse({"schema": 1, "kind": "run", "replicas": 4}).replicas
        4
        >>> parse({"schema": 1, "kind": "weather"}) is None
        True
    """
    if not isinstance(raw, dict) or not isinstance(raw.get("kind"), str):
        raise Malformed("no kind")
    schema = _whole(raw.get("schema"))
    if schema is None:
        raise Malformed("no schema")
    if schema > SCHEMA:
        raise ReportError(
            f"The events have schema {schema}; this version of ds_byzantine reads schema {SCHEMA} and older. "
            "Report with the version that wrote them, or a newer one."
        )
    readers: dict[str, Callable[[Mapping[str, Any]], Record]] = {"run": _run, "step": _step, "verdict": _verdict}
    reader = readers.get(raw["kind"])
    return None if reader is None else reader(raw)


def clean(value: Any) -> str:
    """Text that is safe to show: no control or direction characters, no lone surrogates, of bounded length.

    Example:
        >>> clean("node-\\x1b[31m7")
        'node-\\ufffd[31m7'
    """
    if not isinstance(value, str):
        return ""
    cut = value if len(value) <= MOST_TEXT else value[: MOST_TEXT - 3] + "..."
    return "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else c for c in cut)


_SCALARS = (
    *("bytes", "stock_bytes", "exchange_ms", "rule_ms", "step_ms", "time", "loss"),
    *("cosine_min", "norm_dispersion", "regime_ratio"),
)


def _run(raw: Mapping[str, Any]) -> Run:
    n = _whole(raw.get("replicas"))
    if n is None or not 1 <= n <= MOST_REPLICAS:
        raise Malformed("replicas")
    alpha = _number(raw.get("alpha"))
    return Run(
        replicas=n,
        step=max(0, _whole(raw.get("step")) or 0),
        version=clean(raw.get("version")),
        rule=clean(raw.get("rule")),
        f=_whole(raw.get("f")),
        scope=clean(raw.get("scope")),
        host=clean(raw.get("host")),
        drill=clean(raw.get("drill")),
        parallel=clean(raw.get("parallel")),
        alpha=alpha if 0 < alpha < 1 else 0.001,
        on_suspect=clean(raw.get("on_suspect")) or "log",
        started=_number(raw.get("started")) if _number(raw.get("started")) > 0 else None,
        ranks={i: _indices(v) for i, v in _by_replica(raw.get("ranks"), n)},
        hosts={i: _texts(v) for i, v in _by_replica(raw.get("hosts"), n)},
        devices={i: _texts(v) for i, v in _by_replica(raw.get("devices"), n)},
    )


def _step(raw: Mapping[str, Any]) -> Step:
    evidence, unsafe = raw.get("evidence"), raw.get("unsafe")
    kinds = {clean(k): _numbers(v) for k, v in evidence.items()} if isinstance(evidence, dict) else {}
    duplicates = raw.get("duplicates")
    suspect = _whole(raw.get("suspect"))
    return Step(
        step=_required(raw, "step"),
        distances=_numbers(raw.get("distances")),
        norms=_numbers(raw.get("norms")),
        evidence={k: v for k, v in kinds.items() if v},
        suspect=suspect if suspect is not None and 0 <= suspect < MOST_REPLICAS else None,
        dropped=_indices(raw.get("dropped")),
        unsafe=tuple(map(clean, unsafe)) if isinstance(unsafe, dict) else (),
        named=_indices(raw.get("named")),
        quarantined=_indices(raw.get("quarantined")),
        duplicates=tuple(map(_indices, duplicates)) if isinstance(duplicates, list) else (),
        **{name: _number(raw.get(name)) for name in _SCALARS},
    )


def _verdict(raw: Mapping[str, Any]) -> Verdict:
    alpha = _number(raw.get("alpha"))
    replica = _required(raw, "replica")
    if replica >= MOST_REPLICAS:
        raise Malformed("replica")
    return Verdict(
        step=_required(raw, "step"),
        replica=replica,
        kind=clean(raw.get("evidence")),
        log10_e=_number(raw.get("log10_e")),
        bound=_number(raw.get("bound")),
        alpha=alpha if 0 < alpha < 1 else 0.001,
        since=_whole(raw.get("since")),
        ranks=_indices(raw.get("ranks")),
        hosts=_texts(raw.get("hosts")),
        action=clean(raw.get("action")) or "log",
        why=clean(raw.get("why")),
    )


def _required(raw: Mapping[str, Any], name: str) -> int:
    value = _whole(raw.get(name))
    if value is None or not 0 <= value < 2**53:
        raise Malformed(name)
    return value


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _numbers(value: Any) -> array[float]:
    return array("d", map(_number, value[:MOST_REPLICAS]) if isinstance(value, list) else ())


def _indices(value: Any) -> Indices:
    if not isinstance(value, list):
        return ()
    return tuple(i for i in value[:MOST_REPLICAS] if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(clean(v) for v in value[:MOST_REPLICAS] if isinstance(v, str)) if isinstance(value, list) else ()


def _by_replica(value: Any, n: int) -> list[tuple[int, Any]]:
    if not isinstance(value, dict):
        return []
    return [(int(k), v) for k, v in value.items() if k.isascii() and k.isdigit() and len(k) < 7 and int(k) < n]
