"""The steps of a run as at most 200 columns, so that a long run can be looked at."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from ds_byzantine.report.read import Segment
from ds_byzantine.report.records import Step

MOST_COLUMNS = 200

Values = tuple[float | None, ...]


@dataclass(frozen=True)
class Column:
    """Consecutive steps of one segment. Values are by replica or of the whole job; None where there is nothing.

    Args:
        first, last: numbers of the steps.
        farness: mean rank of the distance, from 0 (always the nearest) to 1 (always the farthest).
        dropped: in how many of the steps a row was not finite.
        distances, norms: means.
        evidence: log10 of the e-value at the end, the largest over the kinds.
        quarantined: whether the replica was left out at the end.
        loss, regime_ratio, cosine_min, norm_dispersion: means; of R, which is skewed, the median.
    """

    first: int
    last: int
    farness: Values
    dropped: tuple[int, ...]
    distances: Values
    norms: Values
    evidence: Values
    quarantined: tuple[bool, ...]
    loss: float | None
    regime_ratio: float | None
    cosine_min: float | None
    norm_dispersion: float | None


def columns(segments: Sequence[Segment], most: int = MOST_COLUMNS) -> tuple[Column, ...]:
    """The steps of all segments in order, equally many to a column.

    Example:
        >>> from ds_byzantine.report.records import Run, parse
        >>> steps = {i: parse({"schema": 1, "kind": "step", "step": i, "distances": [1, 2, 9]}) for i in range(500)}
        >>> made = columns([Segment(Run(replicas=3), steps)])
        >>> len(made), made[0].last, made[0].farness
        (167, 2, (0.0, 0.5, 1.0))
    """
    per_column = max(1, math.ceil(sum(len(s.steps) for s in segments) / most))
    return tuple(chain.from_iterable(_of_segment(s, per_column) for s in segments))


def in_order(segment: Segment) -> list[Step]:
    """The steps of a segment by their numbers."""
    return [segment.steps[number] for number in sorted(segment.steps)]


def ranks(distances: Sequence[float]) -> Values:
    """From 0 (nearest) to 1 (farthest); equal distances share their mean rank; None for NaN.

    Example:
        >>> ranks([5.0, 1.0, float("nan"), 5.0])
        (0.75, 0.0, None, 0.75)
    """
    known = sorted(d for d in distances if not math.isnan(d))
    if len(known) < 2:
        return tuple(None if math.isnan(d) else 0.5 for d in distances)
    lowest, highest = dict[float, int](), dict[float, int]()
    for i, d in enumerate(known):
        lowest.setdefault(d, i)
        highest[d] = i
    scale = 2 * (len(known) - 1)
    return tuple(None if math.isnan(d) else (lowest[d] + highest[d]) / scale for d in distances)


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are numbers; None if none is."""
    known = _known(values)
    return math.fsum(v / len(known) for v in known) if known else None


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are numbers; None if none is."""
    return quantile(values, 0.5)


def quantile(values: Iterable[float | None], share: float) -> float | None:
    """Of those that are numbers, with interpolation; None if none is."""
    known = sorted(_known(values))
    if not known:
        return None
    at = share * (len(known) - 1)
    low = known[math.floor(at)]
    return low + (known[math.ceil(at)] - low) * (at - math.floor(at))


def strongest(step: Step, n: int) -> Values:
    """For each replica log10 of its e-value, the largest over the kinds of evidence."""
    kinds = [padded(v, n) for v in step.evidence.values()]
    return tuple(max(_known(row), default=None) for row in zip(*kinds, strict=True)) if kinds else (None,) * n


def padded(values: array[float], n: int) -> array[float]:
    """Exactly n numbers; NaN where there are too few."""
    return values[:n] + array("d", [math.nan] * (n - len(values)))


def _of_segment(segment: Segment, per_column: int) -> Iterable[Column]:
    steps, n = in_order(segment), segment.run.replicas
    for start in range(0, len(steps), per_column):
        yield _column(steps[start : start + per_column], n)


def _column(steps: Sequence[Step], n: int) -> Column:
    distances = [padded(s.distances, n) for s in steps]
    dropped = [0] * n
    for replica in chain.from_iterable(set(s.dropped) for s in steps):
        if replica < n:
            dropped[replica] += 1
    return Column(
        first=steps[0].step,
        last=steps[-1].step,
        farness=_over_steps([ranks(row) for row in distances], mean),
        dropped=tuple(dropped),
        distances=_over_steps(distances, mean),
        norms=_over_steps([padded(s.norms, n) for s in steps], mean),
        evidence=_last_known([strongest(s, n) for s in steps], n),
        quarantined=tuple(i in steps[-1].quarantined for i in range(n)),
        loss=mean(s.loss for s in steps),
        regime_ratio=median(s.regime_ratio for s in steps),
        cosine_min=mean(s.cosine_min for s in steps),
        norm_dispersion=mean(s.norm_dispersion for s in steps),
    )


def _over_steps(
    rows: Sequence[Sequence[float | None]], summary: Callable[[Iterable[float | None]], float | None]
) -> Values:
    return tuple(summary(values) for values in zip(*rows, strict=True))


def _last_known(rows: Sequence[Values], n: int) -> Values:
    for row in reversed(rows):
        if any(value is not None for value in row):
            return row
    return (None,) * n


def _known(values: Iterable[float | None]) -> list[float]:
    return [v for v in values if v is not None and not math.isnan(v)]
