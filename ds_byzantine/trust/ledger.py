"""Who is suspected, on what evidence, since when: the ledger of a run. Plain arithmetic, no torch, no communication.

Null hypothesis: the replicas are exchangeable, that is, all draw their data and noise from the same distribution. Then
in each step every replica is the most outlying one with probability 1/n, whatever the distribution of gradients is
(heavy tails included), and if k rows are not finite every replica is among them with probability k/n. Against each
replica and for each kind of evidence the ledger keeps an e-process (see `betting`); a replica is named when one of them
reaches n kinds / alpha. So the probability that a healthy run ever names anybody is at most alpha.

Kinds: "outlying" (among the f most distant from the aggregate), "nonfinite" (NaN or Inf), "zero" (nothing but zeros),
"duplicate" (a row that is bit by bit another replica's, or one that the replica itself sent before).

Every rank feeds its ledger the same numbers and so reaches the same verdicts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log10
from typing import Any

from ds_byzantine.trust.betting import Betting

KINDS = ("outlying", "nonfinite", "zero", "duplicate")

# Two healthy rows agree in all sampled words by accident with a probability far below the chance; a small stake at
# these odds costs next to nothing over a run and multiplies the capital by 1,000 when it is won.
DUPLICATE_CHANCE, DUPLICATE_STAKE = 1e-9, 1e-6

QUIET = 0.5  # log10 of the e-value below which a stretch of evidence is over


@dataclass(frozen=True)
class Observation:
    """What one step showed, the same on all ranks.

    Args:
        step: its number.
        distances: of each replica from the aggregate; None where it was not measured or no row was usable.
        nonfinite: replicas with a row that was not finite.
        zeros: replicas that sent nothing but zeros.
        duplicates: replicas that sent another's row, or one of their own again; None if nobody looked.
    """

    step: int
    distances: Sequence[float | None]
    nonfinite: frozenset[int] = frozenset()
    zeros: frozenset[int] = frozenset()
    duplicates: frozenset[int] | None = None


@dataclass(frozen=True)
class Finding:
    """The evidence against a replica has reached the bound.

    Args:
        replica: index.
        kind: of the evidence.
        log10_e: log10 of the e-value.
        since: first step of the stretch in which it grew to this.
    """

    replica: int
    kind: str
    log10_e: float
    since: int


@dataclass
class Account:
    """All that is held against one replica."""

    processes: dict[str, Betting] = field(default_factory=lambda: {kind: _process(kind) for kind in KINDS})
    since: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys(KINDS))
    named: str | None = None  # the kind of evidence on which it was named

    def log10(self, kind: str) -> float:
        """log10 of an e-value, within the range of a float."""
        return log10(min(max(self.processes[kind].value, 1e-300), 1e300))


class Ledger:
    """The evidence of one run.

    Args:
        n: replicas.
        f: how many may be bad at once.
        alpha: largest probability of naming anybody in a healthy run.

    Example:
        >>> ledger = Ledger(n=5, f=1)
        >>> for step in range(20):
        ...     found = ledger.observe(Observation(step, [1.0, 1.1, 0.9, 1.0, 7.0]))
        ...     if found:
        ...         print(step, found[0].replica, found[0].kind)
        7 4 outlying
    """

    def __init__(self, n: int, f: int, alpha: float = 0.001) -> None:
        self.n, self.f, self.alpha = n, f, alpha
        self.accounts = [Account() for _ in range(n)]
        self.order: list[int] = []  # replicas named, in that order
        self.quarantined: list[int] = []

    @property
    def bound(self) -> float:
        """log10 of the e-value at which a replica is named."""
        return log10(max(self.n, 1) * len(KINDS) / self.alpha)

    def observe(self, seen: Observation) -> list[Finding]:
        """Take a step into account; the replicas that it makes us name."""
        for kind, bets in (
            ("outlying", self._outlying(seen)),
            ("nonfinite", self._some_of(seen.nonfinite)),
            ("zero", self._some_of(seen.zeros)),
            ("duplicate", self._duplicate(seen)),
        ):
            for replica, event, chance in bets:
                self._bet(replica, kind, event, chance, seen.step)
        return [finding for replica in range(self.n) for finding in self._judged(replica)]

    def evidence(self) -> dict[str, list[float]]:
        """log10 of all e-values, by kind."""
        return {kind: [round(account.log10(kind), 4) for account in self.accounts] for kind in KINDS}

    def quarantine(self, replica: int) -> bool:
        """Put a replica into quarantine, unless f are there already; whether it is there now."""
        if replica not in self.quarantined and len(self.quarantined) < self.f:
            self.quarantined.append(replica)
        return replica in self.quarantined

    def _present(self) -> list[int]:
        return [i for i in range(self.n) if i not in self.quarantined]

    def _outlying(self, seen: Observation) -> Iterator[tuple[int, float, float]]:
        """Whether each replica is among the most distant ones; ties share the places."""
        distances = {i: d for i in self._present() if (d := seen.distances[i]) is not None}
        places = min(max(self.f - len(self.quarantined), 1), len(distances) - 1)
        if len(distances) < 2:
            return
        for i, own in distances.items():
            above = sum(d > own for d in distances.values())
            level = sum(d == own for d in distances.values())
            share = min(max(places - above, 0) / level, 1.0)
            yield i, share, places / len(distances)

    def _some_of(self, concerned: Collection[int]) -> Iterator[tuple[int, float, float]]:
        """Whether each replica is among those concerned; no bet if it is nobody or everybody."""
        present = self._present()
        bad = [i for i in present if i in concerned]
        if 0 < len(bad) < len(present):
            for i in present:
                yield i, float(i in bad), len(bad) / len(present)

    def _duplicate(self, seen: Observation) -> Iterator[tuple[int, float, float]]:
        """Only if few replicas are concerned: if most send the same rows, they were all given the same data."""
        if seen.duplicates is None or len(seen.duplicates) > max(self.f + 1, 2) or len(seen.duplicates) == self.n:
            return
        for i in self._present():
            yield i, float(i in seen.duplicates), DUPLICATE_CHANCE

    def _bet(self, replica: int, kind: str, event: float, chance: float, step: int) -> None:
        account = self.accounts[replica]
        account.processes[kind].bet(event, chance)
        if account.log10(kind) < QUIET and not event:
            account.since[kind] = None
        elif event and account.since[kind] is None:
            account.since[kind] = step

    def _judged(self, replica: int) -> Iterator[Finding]:
        account = self.accounts[replica]
        if account.named is not None:
            return
        kind = max(KINDS, key=account.log10)
        if account.log10(kind) >= self.bound:
            account.named = kind
            self.order.append(replica)
            since = account.since[kind]
            yield Finding(replica, kind, account.log10(kind), 0 if since is None else since)

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self, ranks: Sequence[Sequence[int]] = (), hosts: Sequence[Sequence[str]] = ()) -> dict[str, Any]:
        """Plain lists and numbers for a checkpoint.

        Args:
            ranks, hosts: of each replica, by which a resumed run of another size finds its replicas again.
        """
        return {
            "n": self.n,
            "accounts": [
                {
                    "staked": {kind: list(a.processes[kind].staked) for kind in KINDS},
                    "started": {kind: a.processes[kind].started for kind in KINDS},
                    "value": {kind: a.processes[kind].value for kind in KINDS},
                    "since": dict(a.since),
                    "named": a.named,
                }
                for a in self.accounts
            ],
            "order": list(self.order),
            "quarantined": list(self.quarantined),
            "ranks": [list(r) for r in ranks],
            "hosts": [list(h) for h in hosts],
        }

    def load_state_dict(self, state: Mapping[str, Any], hosts: Sequence[Sequence[str]] = ()) -> dict[int, int]:
        """Go on from a checkpoint.

        With another number of replicas, or on other hosts, evidence follows the host: the j-th replica of a host takes
        over from the j-th replica that the host had. Replicas without a predecessor start anew.

        Returns:
            New index -> old index of the replicas that were found again.
        """
        found = _same_replicas(state["hosts"], hosts) if hosts and state["hosts"] else _by_index(state["n"], self.n)
        self.accounts = [Account() for _ in range(self.n)]
        for new, old in found.items():
            self.accounts[new] = _account(state["accounts"][old])
        back = {old: new for new, old in found.items()}
        self.order = [back[old] for old in state["order"] if old in back]
        self.quarantined = [back[old] for old in state["quarantined"] if old in back][: self.f]
        return found


def _process(kind: str) -> Betting:
    return Betting((DUPLICATE_STAKE,)) if kind == "duplicate" else Betting()


def _account(state: Mapping[str, Any]) -> Account:
    account = Account(since=dict(state["since"]), named=state["named"])
    for kind, process in account.processes.items():
        process.staked = list(state["staked"][kind])
        process.started = int(state["started"][kind])
        process.value = float(state["value"][kind])
    return account


def _by_index(old: int, new: int) -> dict[int, int]:
    return {i: i for i in range(min(old, new))}


def _same_replicas(old: Sequence[Sequence[str]], new: Sequence[Sequence[str]]) -> dict[int, int]:
    waiting: dict[tuple[str, ...], list[int]] = {}
    for index, hosts in enumerate(old):
        waiting.setdefault(tuple(sorted(hosts)), []).append(index)
    found = {}
    for index, hosts in enumerate(new):
        queue = waiting.get(tuple(sorted(hosts)), [])
        if queue:
            found[index] = queue.pop(0)
    return found
