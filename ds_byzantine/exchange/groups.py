"""Who is a replica: which ranks of a job fail together, and which of them meet in which reduction.

A replica is everything that mixes before the aggregation: the pipeline and tensor ranks of one model copy, the ranks
that share a sequence, the ranks that exchange tokens with each other's experts; with `fault_domain: node`, all ranks of
a host. One bad rank can spoil whatever its replica contributes, so replicas are what `f` counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ds_byzantine.errors import UnsupportedHostError
from ds_byzantine.exchange.transport import Transport

BYTES = 64  # of a host's or a device's name


@dataclass(frozen=True)
class Membership:
    """What one rank says about itself. A group is named by its lowest global rank.

    Args:
        mixes: for each kind of group whose ranks mix before the aggregation (pipeline and tensor, sequence, expert,
            node), the name of this rank's group; its own rank where it mixes with nobody.
        reductions: for each kind of reduction (dense, experts), the name of the group in which this rank takes part.
        host: host name.
        device: what it computes on.
    """

    mixes: tuple[int, ...]
    reductions: tuple[int, ...]
    host: str
    device: str = ""


@dataclass(frozen=True)
class Roster:
    """The replicas of a job.

    Args:
        replicas: for each replica its global ranks, ascending; replicas by their lowest rank.
        reductions: for each global rank, the names of its reductions, one per kind.
        hosts, devices: for each global rank.
    """

    replicas: tuple[tuple[int, ...], ...]
    reductions: tuple[tuple[int, ...], ...]
    hosts: tuple[str, ...]
    devices: tuple[str, ...] = ()

    @classmethod
    def of(cls, members: Sequence[Membership]) -> Roster:
        """The roster of a job from what its ranks say, in rank order.

        Example:
            >>> pairs = [Membership((0,), (0,), "a"), Membership((0,), (1,), "a")]
            >>> pairs += [Membership((2,), (0,), "b"), Membership((2,), (1,), "b")]
            >>> Roster.of(pairs).replicas
            ((0, 1), (2, 3))
        """
        replicas = tuple(tuple(ranks) for ranks in _components([m.mixes for m in members]))
        hosts, devices = tuple(m.host for m in members), tuple(m.device for m in members)
        return cls(replicas, tuple(m.reductions for m in members), hosts, devices)

    @property
    def n(self) -> int:
        """Number of replicas."""
        return len(self.replicas)

    def replica_of(self, rank: int) -> int:
        """Index of the replica that a global rank belongs to."""
        return next(i for i, ranks in enumerate(self.replicas) if rank in ranks)

    def ranks_in(self, kind: int, name: int, replica: int) -> tuple[int, ...]:
        """The global ranks of a replica that take part in one reduction."""
        return tuple(r for r in self.replicas[replica] if self.reductions[r][kind] == name)

    @cached_property
    def ranks_of(self) -> dict[tuple[int, int], tuple[tuple[int, ...], ...]]:
        """For each reduction, by (kind, name), and each replica: the global ranks that take part."""
        keys = {key for names in self.reductions for key in enumerate(names)}
        return {key: tuple(self.ranks_in(*key, replica) for replica in range(self.n)) for key in sorted(keys)}

    def members(self, kind: int, name: int) -> tuple[int, ...]:
        """The global ranks of one reduction, ascending."""
        return tuple(r for r, names in enumerate(self.reductions) if names[kind] == name)

    @property
    def split(self) -> bool:
        """Whether the ranks of a replica take part in different reductions, so that no rank alone sees all of it."""
        return any(len({self.reductions[r] for r in ranks}) > 1 for ranks in self.replicas)


@dataclass(frozen=True)
class Part:
    """One reduction, seen by one of its ranks.

    Args:
        kind, name: which one, as in `Roster`.
        transport: its ranks.
        rows: for each rank of the transport, its replica.
        inner: the ranks of the reduction that are in the same replica; None if every replica has one rank in it.
        outer: one rank of each replica; None likewise.
    """

    transport: Transport
    rows: tuple[int, ...]
    kind: int = 0
    name: int = 0
    inner: Transport | None = None
    outer: Transport | None = None

    @classmethod
    def plain(cls, transport: Transport) -> Part:
        """Each rank is a replica."""
        return cls(transport, tuple(range(transport.size)))

    @property
    def n(self) -> int:
        """Rows, one per replica."""
        return len(set(self.rows))

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """For each place within a replica, the ranks of the transport in that place: what `outer` connects."""
        return columns_of(self.rows)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has put on the wire."""
        levels = (self.transport, self.inner, self.outer)
        return sum(level.bytes_sent for level in levels if level is not None)


@dataclass(frozen=True)
class Shared:
    """Tensors of which several ranks of a replica hold a copy: replicated over tensor ranks, tied over stages.

    Each of these ranks aggregates its copy with its own peers. The results are equal in exact arithmetic, if no rank is
    bad; the first rank's is taken by all, so that the copies cannot drift apart.

    Args:
        transport: the ranks that hold a copy, with the same index in their reduction.
        tensors: names.
        apart: these tensors lie in buckets of other composition elsewhere, and need buckets of their own.
    """

    transport: Transport
    tensors: frozenset[str]
    apart: bool = False

    @property
    def leads(self) -> bool:
        """Whether this rank's result is the one that counts."""
        return self.transport.rank == 0


@dataclass(frozen=True)
class Cut:
    """Tensors that are cut over several ranks of a replica, each of which aggregates its part with its own peers.

    Args:
        transport: the ranks that hold the parts, with the same index in their reduction.
        tensors: names of the tensors that are cut. These ranks hold copies of all others.
    """

    transport: Transport
    tensors: frozenset[str]

    def counts(self, tensor: str) -> bool:
        """Whether this rank's rows of the tensor count: its own part, or the first copy."""
        return self.transport.rank == 0 or tensor in self.tensors


@dataclass(frozen=True)
class Peers:
    """All that one rank has to know of the others.

    Args:
        parts: the reductions in which this rank takes part, by kind.
        roster: of the job.
        shared: copies that other ranks of the replica hold.
        replica: the ranks of this replica; None if all of them take part in the same reductions.
        cut: tensors of which other ranks of the replica hold the other parts.
    """

    parts: tuple[Part, ...]
    roster: Roster
    shared: tuple[Shared, ...] = ()
    replica: Transport | None = None
    cut: Cut | None = None

    @classmethod
    def plain(cls, transport: Transport) -> Peers:
        """Each rank is a replica, and there is one reduction."""
        ranks = range(transport.size)
        roster = Roster(tuple((r,) for r in ranks), ((0,),) * transport.size, ("",) * transport.size)
        return cls((Part.plain(transport),), roster)

    @property
    def n(self) -> int:
        """Number of replicas."""
        return self.roster.n

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has put on the wire."""
        others = [one.transport for one in self.shared]
        others += [self.replica] if self.replica is not None else []
        others += [self.cut.transport] if self.cut is not None else []
        return sum(part.bytes_sent for part in self.parts) + sum(one.bytes_sent for one in others)

    def shared_as(self, tensor: str) -> str | None:
        """What a bucket of this tensor alone is called (see `Bucket.shared_as`); None if it goes with the others."""
        return tensor if any(one.apart and tensor in one.tensors for one in self.shared) else None

    def counts(self, tensor: str) -> bool:
        """Whether this rank's copy of a tensor is the one that counts."""
        return all(one.leads or tensor not in one.tensors for one in self.shared)


def columns_of(rows: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """For each place within a replica, who is in it.

    Args:
        rows: for each rank of a reduction, its replica.

    Raises:
        UnsupportedHostError: some replica has more ranks in the reduction than another.

    Example:
        >>> columns_of([0, 0, 1, 1])
        ((0, 2), (1, 3))
    """
    of_replica: dict[int, list[int]] = defaultdict(list)
    for index, replica in enumerate(rows):
        of_replica[replica].append(index)
    counts = {replica: len(ranks) for replica, ranks in of_replica.items()}
    if len(set(counts.values())) > 1:
        raise UnsupportedHostError(
            f"byzantine: replicas take part in a reduction with different numbers of ranks ({counts}), so that their "
            "rows would not weigh the same. Give every host, sequence group and expert group the same number of ranks"
            ', or use "fault_domain": "replica".'
        )
    return tuple(tuple(sorted(column)) for column in zip(*of_replica.values(), strict=True))


def gather_memberships(world: Transport, own: Membership, device: torch.device) -> list[Membership]:
    """Everybody's membership, in rank order; a collective call over the job.

    Args:
        world: all ranks; index = global rank.
        own: the same numbers of `mixes` and `reductions` on all ranks.
        device: where the transport can send from.
    """
    words = b"".join(word.encode("ascii", "replace")[:BYTES].ljust(BYTES, b"\0") for word in (own.host, own.device))
    numbers = torch.tensor([*own.mixes, *own.reductions, *words], dtype=torch.int64, device=device)
    everybody = torch.empty(world.size * numbers.numel(), dtype=torch.int64, device=device)
    world.all_gather(everybody, numbers)
    k, m = len(own.mixes), len(own.mixes) + len(own.reductions)
    rows = everybody.view(world.size, -1).tolist()
    return [Membership(tuple(r[:k]), tuple(r[k:m]), _word(r[m : m + BYTES]), _word(r[m + BYTES :])) for r in rows]


def _word(numbers: Sequence[int]) -> str:
    return bytes(numbers).rstrip(b"\0").decode()


def _components(labels: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Ranks that are connected by common labels, each component ascending, by lowest rank."""
    leader = list(range(len(labels)))

    def find(rank: int) -> int:
        """The representative of a rank, with the path halved on the way."""
        while leader[rank] != rank:
            leader[rank] = leader[leader[rank]]
            rank = leader[rank]
        return rank

    first: dict[tuple[int, int], int] = {}
    for rank, names in enumerate(labels):
        for kind, name in enumerate(names):
            a, b = find(first.setdefault((kind, name), rank)), find(rank)
            leader[max(a, b)] = min(a, b)
    found: dict[int, list[int]] = defaultdict(list)
    for rank in range(len(labels)):
        found[find(rank)].append(rank)
    yield from found.values()
