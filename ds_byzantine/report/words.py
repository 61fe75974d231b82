"""The summary in plain words. Sentences say what was seen, how sure that is, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone

from ds_byzantine.report.model import Case, Replica, Summary

_SEEN = {
    "outlying": "its gradients were among the farthest from the aggregate far more often than chance explains",
    "nonfinite": "it kept sending gradients with NaN or Inf in them while others did not",
    "zero": "it kept sending nothing but zeros while others did not",
    "duplicate": "it sent the same gradients as another replica, or its own once more, which replicas with fresh data "
    "do not",
}
_ACTION = {
    "log": "It was only logged: the replica is still in the job.",
    "quarantine": "It was quarantined: its gradients have been left out since.",
    "checkpoint_exit": "The job saved a checkpoint and stopped.",
    "none": "It could not be quarantined, because f replicas already are: it is still in the job.",
}
TIMES = "\u00d7"

LEAST_CHANCE = -30  # log10: beyond it the assumptions, not the numbers, are what is uncertain

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def headline(summary: Summary) -> str:
    """The verdict in one line."""
    now = [c for c in summary.cases if c.current]
    if now:
        one = len(now) == 1
        names = f"Replica{'' if one else 's'} {listed([c.replica for c in now])}"
        return f"{names} {'is' if one else 'are'} named as bad"
    if summary.cases:
        case = summary.cases[0]
        n = summary.run.replicas
        return f"Replica {case.replica} of {case.of} was named as bad, before the job went on with {n}"
    return {
        "quiet": "No replica is named",
        "no_evidence": "No verdict: the file holds no evidence",
        "single": "One replica: there is no other to compare it with",
    }.get(summary.status, "No step has been written yet")


def lead(summary: Summary) -> list[str]:
    """The sentences under the headline."""
    if summary.cases:
        return [sentence for case in summary.cases for sentence in _case(case, len(summary.cases) > 1)]
    suspect = summary.suspect
    if summary.status == "quiet" and suspect is not None:
        return _quiet(suspect)
    if summary.status == "no_evidence":
        why = "Evidence needs ds_byzantine to have written it while training; older versions did not."
        return [*([_farthest(suspect)] if suspect else []), why]
    if summary.status == "single":
        return ["Its gradients pass through unchanged. Nothing here says whether they are right."]
    return ["Rank 0 writes one line a step. Nothing can be said before the first."]


def seen(case: Case) -> str:
    """What the kind of evidence means; starts in lower case."""
    return _SEEN.get(case.kind or "", f"evidence of the kind {case.kind}" if case.kind else "the evidence against it")


def place(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """'rank 4 on host node-7'; empty if nothing is known."""
    who = f"rank{'' if len(ranks) == 1 else 's'} {listed(ranks)}" if ranks else ""
    where = f"host{'' if len(hosts) == 1 else 's'} {listed(hosts)}" if hosts else ""
    return " on ".join(part for part in (who, where) if part)


def what_to_do(summary: Summary) -> list[str]:
    """Steps for whoever is on duty."""
    out = []
    if summary.run.drill:
        out.append(f"This run has a drill ({summary.run.drill}): a fault on purpose. No machine has to be drained.")
    for case in [c for c in summary.cases if not c.current]:
        where = place(case.ranks, case.hosts) or f"what was replica {case.replica} of {case.of}"
        out.append(f"Make sure that {where} has no part in the job any more.")
    for case in [c for c in summary.cases if c.current]:
        out += [] if summary.run.drill else [*_machine(case), _cause(case)]
    if summary.cases:
        out.append(_weights(summary))
    if summary.unsafe_steps:
        out.append(
            f"{count(summary.unsafe_steps, 'step')} had more than f rows that were not finite and were skipped. When "
            "several replicas overflow at once, look at the loss scale, the learning rate and the data first."
        )
    if summary.regime_above is not None and summary.regime_above > 0.5:
        out.append(
            f"R was above 1 in {percent(summary.regime_above)} of the steps: noise drowns the gradient, and no rule "
            "helps then. Raise the local batch or accumulate more micro-batches."
        )
    if summary.status == "single":
        out.append("Train with three replicas or more: then each is compared with the others.")
    if summary.status == "no_evidence":
        out.append("Train with the current version of ds_byzantine: it writes evidence that holds at any step.")
    dropped = [r.replica for r in summary.replicas if r.dropped_steps]
    if dropped and not summary.cases:
        out.append(f"Rows of replica {listed(dropped)} were not finite at times and were left out; see the table.")
    return out or ["Nothing. Keep the events with the checkpoints; a report can be made from them at any time."]


def not_proved(summary: Summary) -> list[str]:
    """What a reader must not conclude."""
    out = []
    if summary.cases:
        out += [
            "That the machine is broken. Bad hardware, bad data and a software fault on that replica look alike here.",
            f"That it is certain. In {percent(summary.run.alpha)} of all healthy jobs, at most, a replica is named "
            "wrongly at some step. That bounds false alarms; it is not the probability that this one is.",
        ]
    elif summary.status == "quiet":
        out.append("That all replicas are healthy. A fault smaller than the noise between batches is not seen.")
    return [
        *out,
        "That the replicas are alike. The bound holds when all draw their data from one distribution: a replica that "
        "reads other data than the rest looks like a bad one.",
        "Anything about a fault that all replicas share: the code, the data loader, the learning rate.",
        "Anything about the weights. Gradients are compared here; a rank that corrupts the optimizer state or the "
        "parameters which it owns is not seen.",
        "More than rank 0 knows. It wrote the events; if its machine is not to be trusted, neither is this page.",
    ]


def facts(summary: Summary) -> list[tuple[str, str]]:
    """The run: what protected what, when."""
    run, s = summary.run, summary
    inside = f", each {run.parallel}" if run.parallel else ""
    steps = "none" if s.first is None else f"{s.first} to {s.last}" + (f" ({s.steps} written)" if s.steps else "")
    rows = [
        ("rule", f"{run.rule or 'unknown'}" + (f", f = {run.f}" if run.f is not None else "")),
        ("replicas", f"{run.replicas}{inside}"),
        ("host", " · ".join(part for part in (run.host, f"scope {run.scope}" if run.scope else "") if part)),
        ("steps", steps),
        ("first event", moment(run.started)),
        ("last event", moment(s.ended)),
        ("when a replica is named", run.on_suspect if s.bound is not None or s.cases else ""),
        ("false alarms", f"at most {percent(run.alpha)} of healthy jobs" if s.bound is not None else ""),
        ("resumed", "; ".join(f"at step {step} with {count(n, 'replica')}" for step, n in s.resumptions)),
        ("drill", run.drill),
        ("written by", f"ds_byzantine {run.version}" if run.version else ""),
    ]
    return [(label, value) for label, value in rows if value]


def notes(summary: Summary) -> list[str]:
    """What about the file itself a reader should know."""
    out = []
    if summary.earlier_runs:
        out.append(f"The file also holds {count(summary.earlier_runs, 'earlier run')}; this is the last one.")
    if summary.redone:
        out.append(f"{count(summary.redone, 'step')} were done again after a resumption; the later ones are shown.")
    if summary.unreadable:
        out.append(f"{count(summary.unreadable, 'line')} could not be read and were left out, e.g. torn by a kill.")
    return out


# -- numbers -----------------------------------------------------------------------------------------------------------


def count(number: int, what: str) -> str:
    """'1 step', '1,200 steps'."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def listed(items: Sequence[object]) -> str:
    """'1', '1 and 2', '1, 2 and 3'; long lists are cut."""
    texts = [str(item) for item in items]
    if len(texts) > 8:
        texts = [*texts[:7], f"{len(texts) - 7} more"]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + f" and {texts[-1]}" if texts else ""


def percent(share: float) -> str:
    """'92%', '0.1%'."""
    return f"{100 * share:.3g}%"


def one_in(log10_chance: float) -> str:
    """A small probability: '1 in 4,000', '1 in 3.2 million', '1 in 10¹⁷'.

    Example:
        >>> one_in(-3.6), one_in(-6.5), one_in(-17.2)
        ('1 in 4,000', '1 in 3.2 million', '1 in 10¹⁷')
    """
    log10_chance = max(log10_chance, LEAST_CHANCE)
    if log10_chance <= -12:
        return f"1 in {power(math.floor(-log10_chance))}"
    number = float(f"{10**-log10_chance:.2g}")
    for size, name in ((1e9, " billion"), (1e6, " million")):
        if number >= size:
            return f"1 in {number / size:g}{name}"
    return f"1 in {number:,.{0 if number >= 10 else 1}f}"


def power(log10: float) -> str:
    """A power of ten: '10¹⁷', '10⁴·²' for one that is not whole; small ones written out."""
    if -2 <= log10 < 4:
        return f"{10**log10:,.3g}" if log10 < 3 else f"{float(f'{10**log10:.2g}'):,.0f}"
    whole = math.floor(log10)
    factor = 10 ** (log10 - whole)
    lead_digit = "" if factor < 1.05 else f"{factor:.1f} {TIMES} "
    return (lead_digit if abs(whole) < 16 else "") + "10" + str(whole).translate(_SUPERSCRIPTS)


def moment(seconds: float | None) -> str:
    """Unix time as '2031-05-04 12:30:00 UTC'; empty if there is none or no calendar has it."""
    if seconds is None:
        return ""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return ""


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits, thousands separated; '-' for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 10**digits and abs(value) < 1e9 else f"{value:.{digits}g}"


def size(value: float | None) -> str:
    """Bytes as '1.97 MB'; '-' for None.

    Example:
        >>> size(1973696), size(12.0)
        ('1.97 MB', '12 B')
    """
    if value is None:
        return "-"
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.0f} B"


def state(replica: Replica) -> str:
    """'named', 'quarantined', or nothing."""
    return "quarantined" if replica.quarantined else "named" if replica.named else ""


# -- sentences ---------------------------------------------------------------------------------------------------------


def _case(case: Case, several: bool) -> list[str]:
    since = f"since step {case.since} " if case.since is not None else ""
    reached = "" if case.decided is None else f"; the evidence reached the bound in step {case.decided}"
    sentence = f"{since}{seen(case)}{reached}."
    where = place(case.ranks, case.hosts)
    out = [f"Replica {case.replica}: {sentence}" if several else sentence[0].upper() + sentence[1:]]
    out.append(f"The trouble is in {where}." if where else "")
    if case.log10_chance is not None and case.log10_chance < 0:
        out.append(
            f"If all replicas were healthy, at most {one_in(case.log10_chance)} jobs would ever show evidence this "
            "strong."
        )
    if not case.current:
        out.append(f"The number of replicas has changed since from {case.of}, so the index may mean another one now.")
    elif case.action:
        out.append(_ACTION.get(case.action, f"Action: {case.action}."))
    return [one for one in out if one]


def _quiet(suspect: Case) -> list[str]:
    where = place(suspect.ranks, suspect.hosts)
    who = f"replica {suspect.replica}" + (f" ({where})" if where else "")
    e, bound = suspect.log10_e or 0.0, suspect.bound or 0.0
    if e <= 0:
        return [f"There is no evidence against any of them: the largest e-value is {power(e)}, and 1 means nothing."]
    way = f"{percent(e / bound)} of the way on the logarithmic scale" if bound > 0 else ""
    return [
        f"The most suspicious is {who}, with evidence of {power(e)}. Naming it takes {power(bound)}: {way}.",
        "Evidence that small turns up in healthy jobs all the time."
        if (suspect.log10_chance or 0.0) > -1
        else f"If all were healthy, at most {one_in(suspect.log10_chance or 0.0)} jobs would ever show as much.",
    ]


def _farthest(case: Case) -> str:
    share = percent(case.farthest or 0.0)
    where = place(case.ranks, case.hosts)
    return (
        f"Replica {case.replica}{f' ({where})' if where else ''} was the most distant one in {share} of the steps; if "
        f"all were alike each would be in about {percent(1 / case.of)}. A hint, no proof."
    )


def _machine(case: Case) -> list[str]:
    where = place(case.ranks, case.hosts) or f"replica {case.replica}"
    logs = "Keep its kernel log, its ECC and Xid records and this file."
    if case.action == "quarantine":
        return [f"Take {where} out at the next restart; until then it has no influence. {logs}"]
    if case.action == "checkpoint_exit":
        return [f"Restart from the checkpoint without {where}. {logs}"]
    return [f"Take {where} out of the job and restart without it. {logs}"]


def _cause(case: Case) -> str:
    if case.kind == "duplicate":
        return (
            f"Look at the data sampler: if replica {case.replica} reads the same batches as another one or again and "
            "again, all are healthy and the seed or the sharding is wrong."
        )
    if case.kind == "zero":
        return (
            f"Look at replica {case.replica}'s batches: empty or fully masked ones give zeros. If they are fine, its "
            "backward pass is not running or its collectives are stuck."
        )
    if case.kind == "nonfinite":
        return (
            f"Look at replica {case.replica}'s batches for empty or extreme samples. If they are fine, run the "
            "accelerator's own diagnostics on that host."
        )
    return (
        f"Find the cause: give the data of replica {case.replica} to another host. If that one is named next it is the "
        "data; if this host is named again with other data it is the machine or its software."
    )


def _weights(summary: Summary) -> str:
    run = summary.run
    since = min((c.since if c.since is not None else c.decided or 0) for c in summary.cases)
    before = f"from before step {since}" if since else "from before this run"
    current = [c for c in summary.cases if c.current]
    if run.f is not None and len(current) > run.f:
        why = "the rule tolerates none (f = 0)" if run.f == 0 else f"the rule tolerates {run.f}"
        named = count(len(current), "replica")
        return f"{named} named and {why}: the weights are in doubt. Go back to a checkpoint {before}."
    return (
        f"Compare the held-out loss with a checkpoint {before}: the rule bounds what a bad replica "
        "does to the weights, it does not undo it."
    )
