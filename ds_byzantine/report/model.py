"""What a run became, as plain numbers: the verdict, the replicas, the cost. The words are in words.py."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, Literal

from ds_byzantine.report.read import Segment, Story
from ds_byzantine.report.records import Run, Step, Verdict
from ds_byzantine.report.series import Column, columns, in_order, mean, median, quantile, strongest

Status = Literal["named", "quiet", "no_evidence", "single", "empty"]

LISTED = 20  # unsafe steps that are listed one by one


@dataclass(frozen=True)
class Case:
    """What speaks against one replica.

    Args:
        replica: index, among `of` replicas.
        ranks, hosts: where the trouble is concentrated; of the whole replica if nothing more is known.
        kind: of evidence: "outlying", "nonfinite", "zero", "duplicate"; None if only that it is named is known.
        log10_e: the largest log10 of the e-value against it in the run.
        bound: what has to be reached to name a replica.
        log10_chance: log10 of a bound on the probability that evidence this strong, against any replica, ever turns up
            in a run of healthy replicas; 0 if it is worth nothing.
        since: first step of the stretch in which the evidence grew to this.
        decided: step in which the bound was reached.
        farthest: share of the steps in which it was the most distant replica.
        current: whether the index still stands for the same replica, that is, n was not changed by a resumption since.
    """

    replica: int
    of: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    kind: str | None
    log10_e: float | None
    bound: float | None
    log10_chance: float | None
    since: int | None = None
    decided: int | None = None
    action: str = ""
    why: str = ""
    farthest: float | None = None
    current: bool = True


@dataclass(frozen=True)
class Replica:
    """One replica of the last segment. `evidence`: log10 of the e-values at the end, by kind."""

    replica: int
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    evidence: dict[str, float]
    farthest: float | None
    dropped_steps: int
    named: bool
    quarantined: bool

    @property
    def strongest(self) -> float | None:
        """The largest evidence of any kind."""
        return max(self.evidence.values(), default=None)


@dataclass(frozen=True)
class Cost:
    """What the rule took, over all steps; times in milliseconds on rank 0, as (median, 95th percentile).

    Args:
        share: (exchange + rule) / step, of the medians. The exchange stands in for the host's own reduction, so it is
            not all extra.
        bytes, stock_bytes: sent by rank 0 in a step, and what the host's own reduction would have sent.
    """

    exchange_ms: tuple[float | None, float | None]
    rule_ms: tuple[float | None, float | None]
    step_ms: tuple[float | None, float | None]
    share: float | None
    bytes: float | None
    stock_bytes: float | None

    @property
    def ratio(self) -> float | None:
        """Bytes against stock."""
        return self.bytes / self.stock_bytes if self.bytes is not None and self.stock_bytes else None


@dataclass(frozen=True)
class Unsafe:
    """A step that was skipped because more than f rows of a tensor were not finite."""

    step: int
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    """Everything that the terminal, the page and the pictures show."""

    name: str
    run: Run
    status: Status
    cases: tuple[Case, ...]
    suspect: Case | None
    replicas: tuple[Replica, ...]
    columns: tuple[Column, ...]
    steps: int
    first: int | None
    last: int | None
    ended: float | None
    resumptions: tuple[tuple[int, int], ...]
    bound: float | None
    loss: tuple[float | None, float | None]
    regime_ratio: float | None
    regime_above: float | None
    cost: Cost
    unsafe_steps: int
    unsafe: tuple[Unsafe, ...]
    earlier_runs: int
    redone: int
    unreadable: int

    @property
    def most_replicas(self) -> int:
        """The largest number of replicas over all resumptions."""
        return max([self.run.replicas, *(len(c.farness) for c in self.columns)])

    def as_json(self) -> dict[str, Any]:
        """Plain values; no NaN."""
        out: dict[str, Any] = _plain(asdict(self))
        out["cost"]["ratio"] = _plain(self.cost.ratio)
        return out


def summarize(story: Story, name: str = "") -> Summary:
    """The summary of a story.

    Args:
        story: what `Reader` has read so far.
        name: what to call the run, e.g. its folder.

    Example:
        >>> from ds_byzantine.report.records import parse
        >>> story = Story()
        >>> story.add(parse({"schema": 1, "kind": "run", "replicas": 4, "rule": "median"}))
        >>> summarize(story).status
        'empty'
    """
    segments = story.segments or [Segment(Run(replicas=1))]
    steps = list(chain.from_iterable(map(in_order, segments)))
    run = segments[-1].run
    cases = _cases(story)
    replicas = _replicas(segments[-1], cases)
    bound = _bound(segments[-1], story)
    suspect = None if cases else _suspect(segments, replicas, bound)
    unsafe = [Unsafe(s.step, s.unsafe) for s in steps if s.unsafe]
    ratios = [s.regime_ratio for s in steps if not math.isnan(s.regime_ratio)]
    losses = [s.loss for s in steps if not math.isnan(s.loss)]
    times = [s.time for s in steps if s.time > 0]
    return Summary(
        name=name,
        run=run,
        status=_status(cases, steps, run, bound),
        cases=cases,
        suspect=suspect,
        replicas=replicas,
        columns=columns(segments),
        steps=len(steps),
        first=steps[0].step if steps else None,
        last=steps[-1].step if steps else None,
        ended=max(times, default=None),
        resumptions=tuple((s.run.step, s.run.replicas) for s in segments if s.run.step > 0),
        bound=bound,
        loss=(losses[0], losses[-1]) if losses else (None, None),
        regime_ratio=median(ratios),
        regime_above=mean(float(r > 1) for r in ratios),
        cost=_cost(steps),
        unsafe_steps=len(unsafe),
        unsafe=tuple(unsafe[:LISTED]),
        earlier_runs=story.earlier_runs,
        redone=story.redone,
        unreadable=story.unreadable,
    )


def log10_chance(log10_e: float, bound: float, alpha: float) -> float:
    """How improbable it is that healthy replicas ever show evidence this strong, as log10 of a probability bound.

    By Ville's inequality an e-value ever reaches 10^x with probability at most 10^-x. `bound` is log10 of n kinds /
    alpha, so n kinds = alpha 10^bound is over how many e-values a maximum was taken.

    Example:
        >>> log10_chance(log10_e=9.0, bound=4.0, alpha=0.001)
        -8.0
    """
    return min(0.0, math.log10(alpha) + bound - log10_e)


# -- who ---------------------------------------------------------------------------------------------------------------


def _cases(story: Story) -> tuple[Case, ...]:
    """Verdicts, the first one for each replica and number of replicas; then those that are only known as named.

    After a resumption with another number of replicas the plug-in finds a named replica again by its host: that is one
    case, not two.
    """
    found: dict[tuple[int, int], Case] = {}
    for verdict, segment in story.verdicts:
        found.setdefault((segment.run.replicas, verdict.replica), _case(verdict, segment, story))
    last = story.segments[-1] if story.segments else None
    for segment in story.segments:
        for step in in_order(segment):
            for replica in step.named:
                key = (segment.run.replicas, replica)
                if replica < key[0] and key not in found:
                    found[key] = _named_only(replica, step.step, segment, story)
    if last is not None:
        _follow_hosts(found, last.run)
    return tuple(sorted(found.values(), key=lambda case: (not case.current, case.decided or 0, case.replica)))


def _case(verdict: Verdict, segment: Segment, story: Story) -> Case:
    run, i = segment.run, verdict.replica
    same = [s for s in story.segments if s.run.replicas == run.replicas]
    largest = _largest(same, verdict.kind, i, verdict.log10_e)
    bound = None if math.isnan(verdict.bound) else verdict.bound
    known = largest is not None and bound is not None
    return Case(
        replica=i,
        of=run.replicas,
        ranks=verdict.ranks or run.ranks.get(i, ()),
        hosts=verdict.hosts or run.hosts.get(i, ()),
        kind=verdict.kind or None,
        log10_e=largest,
        bound=bound,
        log10_chance=log10_chance(largest or 0.0, bound or 0.0, verdict.alpha) if known else None,
        since=verdict.since if verdict.since is not None and 0 <= verdict.since <= verdict.step else None,
        decided=verdict.step,
        action=verdict.action,
        why=verdict.why,
        farthest=_farthest(same).get(i),
        current=run.replicas == story.segments[-1].run.replicas,
    )


def _named_only(replica: int, step: int, segment: Segment, story: Story) -> Case:
    """A replica that is named in the steps of a segment, with the verdict itself lost or of an earlier file."""
    run = segment.run
    kinds = sorted({kind for s in segment.steps.values() for kind in s.evidence})
    by_kind = {kind: _largest([segment], kind, replica, math.nan) for kind in kinds}
    known = {kind: e for kind, e in by_kind.items() if e is not None}
    kind = max(known, key=lambda k: known[k], default=None)
    bound = bound_of(run, len(kinds))
    e = known[kind] if kind is not None else None
    return Case(
        replica=replica,
        of=run.replicas,
        ranks=run.ranks.get(replica, ()),
        hosts=run.hosts.get(replica, ()),
        kind=kind,
        log10_e=e,
        bound=bound,
        log10_chance=log10_chance(e, bound, run.alpha) if e is not None and bound is not None else None,
        decided=step,
        farthest=_farthest([segment]).get(replica),
        current=run.replicas == story.segments[-1].run.replicas,
    )


def _largest(segments: Sequence[Segment], kind: str, replica: int, least: float) -> float | None:
    """The largest log10 of an e-value, which is as good as the last one: it may be looked at in any step."""
    seen = [_at(s.evidence[kind], replica) for t in segments for s in t.steps.values() if kind in s.evidence]
    return max((e for e in (*seen, least) if not math.isnan(e)), default=None)


def _follow_hosts(found: dict[tuple[int, int], Case], run: Run) -> None:
    """Join a replica that is named in the steps only with the verdict against a replica of the same hosts before."""
    earlier = [key for key, case in found.items() if not case.current and case.action]
    for key, case in list(found.items()):
        if not case.current or case.action:
            continue
        hosts = set(run.hosts.get(case.replica, ()))
        before = next(
            (k for k in earlier if k in found and found[k].kind == case.kind and set(found[k].hosts) & hosts), None
        )
        if before is not None:
            old = found.pop(before)
            found[key] = replace(case, since=old.since, decided=old.decided, action=old.action, why=old.why)


def _suspect(segments: Sequence[Segment], replicas: Sequence[Replica], bound: float | None) -> Case | None:
    """The replica with the most against it when none is named: by evidence, or else by how often it was farthest."""
    run = segments[-1].run
    with_evidence = [r for r in replicas if r.strongest is not None]
    if not with_evidence:
        worst = max((r for r in replicas if r.farthest), key=lambda r: (r.farthest or 0.0, -r.replica), default=None)
    else:
        worst = max(with_evidence, key=lambda r: (r.strongest or 0.0, r.farthest or 0.0, -r.replica))
    if worst is None or run.replicas == 1:
        return None
    kind = max(worst.evidence, key=lambda k: worst.evidence[k], default=None)
    e = worst.strongest
    chance = log10_chance(e, bound, run.alpha) if e is not None and bound is not None else None
    return Case(
        replica=worst.replica,
        of=run.replicas,
        ranks=worst.ranks,
        hosts=worst.hosts,
        kind=kind,
        log10_e=e,
        bound=bound,
        log10_chance=chance,
        farthest=worst.farthest,
    )


def _replicas(segment: Segment, cases: Sequence[Case]) -> tuple[Replica, ...]:
    run, steps = segment.run, in_order(segment)
    farthest = _farthest([segment])
    dropped = Counter(chain.from_iterable(set(s.dropped) for s in steps))
    evidence = next((s.evidence for s in reversed(steps) if s.evidence), {})
    named = {case.replica for case in cases if case.current}
    out = steps[-1].quarantined if steps else ()
    return tuple(
        Replica(
            replica=i,
            ranks=run.ranks.get(i, ()),
            hosts=run.hosts.get(i, ()),
            devices=run.devices.get(i, ()),
            evidence={k: e for k, v in evidence.items() if not math.isnan(e := _at(v, i))},
            farthest=farthest.get(i),
            dropped_steps=dropped[i],
            named=i in named,
            quarantined=i in out,
        )
        for i in range(run.replicas)
    )


def _at(values: Sequence[float], i: int) -> float:
    """Element i, NaN if there is none."""
    return values[i] if i < len(values) else math.nan


def _farthest(segments: Sequence[Segment]) -> dict[int, float]:
    """For each replica the share of steps, of those with a suspect, in which it was that. Empty without any."""
    suspects = [s.suspect for t in segments for s in t.steps.values() if s.suspect is not None]
    counts = Counter(suspects)
    n = max((t.run.replicas for t in segments), default=0)
    return {i: counts[i] / len(suspects) for i in range(n)} if suspects else {}


def _bound(segment: Segment, story: Story) -> float | None:
    """log10 of n kinds / alpha: as a verdict says, or counted from the kinds of evidence in the file."""
    for verdict, of in reversed(story.verdicts):
        if of.run.replicas == segment.run.replicas and not math.isnan(verdict.bound):
            return verdict.bound
    return bound_of(segment.run, max((len(s.evidence) for s in segment.steps.values()), default=0))


def bound_of(run: Run, kinds: int) -> float | None:
    """log10 of the e-value that names a replica; None without evidence."""
    return math.log10(run.replicas * kinds / run.alpha) if kinds else None


def _status(cases: Sequence[Case], steps: Sequence[Step], run: Run, bound: float | None) -> Status:
    if cases:
        return "named"
    if not steps:
        return "empty"
    if run.replicas == 1:
        return "single"
    return "quiet" if bound is not None and any(strongest(s, run.replicas) for s in steps) else "no_evidence"


# -- cost --------------------------------------------------------------------------------------------------------------


def _cost(steps: Sequence[Step]) -> Cost:
    exchange, rule, step = ([getattr(s, name) for s in steps] for name in ("exchange_ms", "rule_ms", "step_ms"))
    middle = [median(values) for values in (exchange, rule, step)]
    share = None
    if middle[0] is not None and middle[1] is not None and middle[2]:
        share = (middle[0] + middle[1]) / middle[2]
    return Cost(
        exchange_ms=(middle[0], quantile(exchange, 0.95)),
        rule_ms=(middle[1], quantile(rule, 0.95)),
        step_ms=(middle[2], quantile(step, 0.95)),
        share=share,
        bytes=mean(s.bytes for s in steps),
        stock_bytes=mean(s.stock_bytes for s in steps),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
