"""From what a step showed to a verdict, and to what is done about it. No communication: every rank decides alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ds_byzantine.exchange.groups import Roster
from ds_byzantine.monitor.events import StepEvent, VerdictEvent
from ds_byzantine.trust.digest import Repeats
from ds_byzantine.trust.ledger import Finding, Ledger, Observation

Action = Literal["log", "quarantine", "checkpoint_exit"]

WHAT = {
    "outlying": "its gradient was the most distant one from the aggregate far more often than chance allows",
    "zero": "it sent nothing but zeros where others did not",
    "nonfinite": "it sent NaN or Inf where others did not",
    "duplicate": "it sent the same gradient as another replica, or one of its own again",
}


@dataclass(frozen=True)
class Considered:
    """What the guard makes of a step.

    Args:
        event: the step's event with the evidence filled in.
        verdicts: the replicas that are named in this step.
        same_data: every replica sent the same row: they were probably all given the same data.
    """

    event: StepEvent
    verdicts: list[VerdictEvent]
    same_data: bool


class Guard:
    """The evidence of a run and the action that follows from it.

    Args:
        roster: the replicas.
        f: bad replicas to tolerate.
        alpha: largest probability of naming anybody in a healthy run.
        action: what happens to a replica that is named.
    """

    def __init__(self, roster: Roster, f: int, alpha: float, action: Action) -> None:
        self.roster = roster
        self.action = action
        self.ledger = Ledger(roster.n, f, alpha)
        self.repeats = Repeats(roster.n)

    def consider(self, event: StepEvent, digests: Sequence[int]) -> Considered:
        """Take a step into account.

        Args:
            event: of the step, the same on all ranks.
            digests: a checksum of each replica's gradient.
        """
        dropped = frozenset(event.dropped)
        zeros = frozenset(i for i, digest in enumerate(digests) if not digest) - dropped
        concerned, pairs = self.repeats.observe([0 if i in dropped else d for i, d in enumerate(digests)])
        found = self.ledger.observe(Observation(event.step, event.distances, dropped, zeros, concerned))
        verdicts = [self._verdict(finding, event) for finding in found]
        told = replace(
            event,
            evidence=self.ledger.evidence(),
            named=list(self.ledger.order),
            quarantined=list(self.ledger.quarantined),
            duplicates=pairs,
        )
        return Considered(told, verdicts, len(concerned) == self.roster.n > 1)

    def _verdict(self, finding: Finding, event: StepEvent) -> VerdictEvent:
        action = self._act(finding)
        ranks = list(self.roster.replicas[finding.replica])
        if finding.replica == event.suspect:
            ranks = event.suspect_ranks
        why = f"replica {finding.replica}: {WHAT[finding.kind]} (steps {finding.since} to {event.step})"
        if finding.kind == "duplicate":
            others = sorted({i for pair in event.duplicates for i in pair} - {finding.replica})
            why += f"; together with {others}" if others else ""
        return VerdictEvent(
            step=event.step,
            replica=finding.replica,
            ranks=ranks,
            hosts=sorted({self.roster.hosts[rank] for rank in ranks}),
            evidence=finding.kind,
            log10_e=round(finding.log10_e, 3),
            bound=round(self.ledger.bound, 3),
            since=finding.since,
            alpha=self.ledger.alpha,
            action=action,
            why=why,
        )

    def _act(self, finding: Finding) -> str:
        """What is done about a finding. Of two replicas that send the same row one has to stay: either is as good."""
        if self.action != "quarantine":
            return self.action
        return "quarantine" if self.ledger.quarantine(finding.replica) else "none"

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: plain lists and numbers."""
        return self.ledger.state_dict(self.roster.replicas, self._hosts())

    def load_state_dict(self, state: Mapping[str, Any]) -> dict[int, int]:
        """Go on from a checkpoint; see `Ledger.load_state_dict`."""
        return self.ledger.load_state_dict(state, self._hosts())

    def _hosts(self) -> list[list[str]]:
        return [sorted({self.roster.hosts[rank] for rank in ranks}) for ranks in self.roster.replicas]
