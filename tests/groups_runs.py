"""Jobs whose replicas have several ranks, in one process: a thread for each rank, a world for each group of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

import pytest
import torch
from layouts import needed
from pipeline_runs import STEP, assert_near
from torch import Tensor

from ds_byzantine.exchange.all_to_all import scatter_rows
from ds_byzantine.exchange.groups import Membership, Part, Peers, Roster, Shared, columns_of
from ds_byzantine.exchange.local import LocalTransport, LocalWorld
from ds_byzantine.exchange.routes import routes
from ds_byzantine.exchange.workspace import Workspace
from ds_byzantine.monitor.events import StepEvent
from ds_byzantine.pipeline import ShardAggregator
from ds_byzantine.rules.aggregate import aggregate
from ds_byzantine.rules.apply import Aggregator
from ds_byzantine.types import Bucket, Delivery, Layout, Segment, Slice, even_bounds

Result = TypeVar("Result")
Gradients = list[list[dict[str, Tensor]]]  # of each global rank its buckets, of each bucket its tensors by name
Source = tuple[int, int, str]  # kind and name of a reduction, tensor in it

TIMEOUT = 20.0


@dataclass(frozen=True)
class Copies:
    """Tensors of which the ranks of each of these groups hold a copy; see `Shared`."""

    groups: tuple[tuple[int, ...], ...]
    tensors: frozenset[str]
    apart: bool = False


def grid(stages: int, n: int, tensors: int) -> list[Membership]:
    """Pipeline x data x tensor, in DeepSpeed's order of ranks: the tensor ranks of a stage are neighbours."""
    return [
        Membership((replica * tensors,), (stage * n * tensors + place,), f"host {stage}")
        for stage in range(stages)
        for replica in range(n)
        for place in range(tensors)
    ]


def experts(n: int, *sizes: int) -> list[Membership]:
    """n ranks with a kind of experts for each expert-parallel size: as many neighbours hold different ones of them."""
    return [
        Membership(tuple(rank - rank % size for size in sizes), (0, *(rank % size for size in sizes)), "host")
        for rank in range(n)
    ]


def on_hosts(members: Sequence[Membership], ranks_per_host: int) -> list[Membership]:
    """The same job with `fault_domain: node`: a label for each host."""
    return [
        Membership((*m.mixes, 1000 + rank // ranks_per_host), m.reductions, f"host {rank // ranks_per_host}")
        for rank, m in enumerate(members)
    ]


def closure(labels: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Components by repeated squaring of the relation "have a label in common"."""
    met = torch.tensor([[any(a == b for a, b in zip(one, two, strict=True)) for two in labels] for one in labels])
    for _ in labels:
        met = (met.double() @ met.double()) > 0
    return sorted({tuple(row.nonzero()[:, 0].tolist()) for row in met})


class Groups:
    """The groups of a job; a world is made when the first of its ranks asks for it."""

    def __init__(self) -> None:
        self._worlds: dict[tuple[str, tuple[int, ...]], LocalWorld] = {}

    def join(self, what: str, ranks: Sequence[int], rank: int) -> LocalTransport:
        """The place of global rank `rank` in the group of these ranks."""
        world = self._worlds.setdefault((what, tuple(ranks)), LocalWorld(len(ranks), TIMEOUT))
        return LocalTransport(world, list(ranks).index(rank))

    def part(self, roster: Roster, kind: int, rank: int) -> Part:
        """The reduction of one kind in which a rank takes part."""
        name = roster.reductions[rank][kind]
        ranks = roster.members(kind, name)
        rows = tuple(map(roster.replica_of, ranks))
        transport = self.join(f"part {kind}", ranks, rank)
        columns = columns_of(rows)
        if len(columns) == 1:
            return Part(transport, rows, kind, name)
        inner = self.join(f"inner {kind}", roster.ranks_in(kind, name, roster.replica_of(rank)), rank)
        [column] = [[ranks[k] for k in column] for column in columns if transport.rank in column]
        return Part(transport, rows, kind, name, inner, self.join(f"outer {kind}", column, rank))

    def peers(self, roster: Roster, rank: int, copies: Sequence[Copies] = ()) -> Peers:
        """All that a rank has to know of the others."""
        shared = [
            Shared(self.join(f"shared {sorted(one.tensors)}", ranks, rank), one.tensors, one.apart)
            for one in copies
            for ranks in one.groups
            if rank in ranks
        ]
        parts = tuple(self.part(roster, kind, rank) for kind in range(len(roster.reductions[rank])))
        ranks = roster.replicas[roster.replica_of(rank)]
        return Peers(parts, roster, tuple(shared), self.join("replica", ranks, rank) if roster.split else None)


def on_all_ranks(size: int, job: Callable[[Groups, LocalTransport], Result]) -> list[Result]:
    """Run `job` on every rank of a job; it gets the groups and the rank's place among all."""
    groups = Groups()

    def body(world: LocalTransport) -> Result:
        try:
            return job(groups, world)
        except threading.BrokenBarrierError as error:
            raise RuntimeError(f"rank {world.rank} waited in vain for the others of a group") from error

    return LocalWorld(size, TIMEOUT).run(body)


@dataclass
class Outcome:
    """What one rank has after a step: its tensors, which of their elements were delivered to it, and the event."""

    event: StepEvent
    results: dict[str, Tensor] = field(default_factory=dict)
    delivered: dict[str, Tensor] = field(default_factory=dict)

    @property
    def told(self) -> dict[str, Any]:
        """What every rank of the job has to say alike. Of unsafe tensors elsewhere a rank knows the replicas only."""
        own = ("bytes", "stock_bytes", "exchange_ms", "rule_ms")
        record = {k: v for k, v in asdict(self.event).items() if k not in own}
        return record | {"unsafe": bool(self.event.unsafe)}


def packed(tensors: Mapping[str, Tensor], ranks: int, delivery: Delivery) -> tuple[Tensor, Layout]:
    """A bucket of these tensors in equal chunks; owners, if any, hold equal slices in descending order."""
    segments, start = [], 0
    for name, tensor in tensors.items():
        segments.append(Segment(name, start, start + tensor.numel()))
        start += tensor.numel()
    bounds = even_bounds(start, ranks)
    owners = [Slice(ranks - 1 - k, bounds[k], bounds[k + 1]) for k in range(ranks) if bounds[k] < bounds[k + 1]]
    chosen = tuple(owners) if delivery is Delivery.OWNERS else ()
    return torch.cat(list(tensors.values())), Layout(tuple(segments), bounds, delivery, chosen)


@dataclass(frozen=True)
class Job:
    """One step of a job: who takes part, with which gradients.

    Args:
        roster: of the job.
        gradients: of each global rank its buckets.
        copies: tensors that several ranks of a replica hold.
        kinds: the reductions of tensors that are not dense.
        delivery: of all buckets.
    """

    roster: Roster
    gradients: Gradients
    copies: Sequence[Copies] = ()
    kinds: Mapping[str, int] = field(default_factory=dict)
    delivery: Delivery = Delivery.EVERYONE

    def run(self, rule: str, f: int, pre: Sequence[Any] = (), scope: str = "tensor") -> list[Outcome]:
        """The main path on all ranks."""

        def job(groups: Groups, world: LocalTransport) -> Outcome:
            peers, rank = groups.peers(self.roster, world.rank, self.copies), world.rank
            path = ShardAggregator(peers, Aggregator.create(rule, f, pre), scope=scope, step_of=lambda: STEP)
            results, delivered = {}, {}
            for tensors in self.gradients[rank]:
                first = next(iter(tensors))
                kind = self.kinds.get(first, 0)
                transport = peers.parts[kind].transport
                flat, layout = packed(tensors, transport.size, self.delivery)
                mask = needed(layout, transport.rank)

                def commit(result: Tensor, layout: Layout = layout, mask: Tensor = mask) -> None:
                    for name, start, stop in layout.segments:
                        results[name], delivered[name] = result[start:stop].clone(), mask[start:stop]

                path.submit(Bucket(flat, layout, kind=kind, shared_as=peers.shared_as(first)), commit)
                flat.fill_(777.0)  # the host uses its memory for something else
            path.flush()
            return Outcome(path.end_step(), results, delivered)

        return on_all_ranks(len(self.gradients), job)

    def source(self, rank: int, tensor: str) -> Source:
        """Whose rows decide about a rank's tensor: those of its own reduction, or of the first holder of a copy."""
        for one in self.copies:
            for ranks in one.groups:
                if tensor in one.tensors and rank in ranks[1:]:
                    return self.source(ranks[0], tensor)
        kind = self.kinds.get(tensor, 0)
        return kind, self.roster.reductions[rank][kind], tensor

    def rows(self) -> dict[Source, Tensor]:
        """What the replicas contribute, [n, D] each: the means over their ranks. Every tensor once."""
        held = [{name: one for bucket in buckets for name, one in bucket.items()} for buckets in self.gradients]
        sources = sorted({self.source(rank, tensor) for rank, tensors in enumerate(held) for tensor in tensors})
        found = {}
        for kind, name, tensor in sources:
            ranks = [self.roster.ranks_in(kind, name, replica) for replica in range(self.roster.n)]
            found[kind, name, tensor] = torch.stack(
                [torch.stack([held[r][tensor] for r in one]).mean(0) for one in ranks]
            )
        return found

    def check(self, rule: str, f: int, pre: Sequence[Any] = (), scope: str = "tensor") -> list[Outcome]:
        """Run, and compare with `aggregate()` on the rows of each tensor or, with scope "model", of all in one.

        With scope "shard" only that the ranks agree, with each other and with the distances.
        """
        rows, outcomes = self.rows(), self.run(rule, f, pre, scope)
        got = self.same_bits(outcomes)
        want = {key: aggregate(one, rule=rule, f=f, pre=pre, seed=STEP) for key, one in rows.items()}
        if scope == "model":
            whole = aggregate(torch.cat(list(rows.values()), 1), rule=rule, f=f, pre=pre, seed=STEP)
            want = dict(zip(rows, torch.split(whole, [one.shape[1] for one in rows.values()]), strict=True))
        assert got.keys() == want.keys()
        if scope == "shard":
            want = got
        for key, result in got.items():
            assert_near(result, want[key], 20.0)
        self.check_distances(outcomes, {key: one - want[key] for key, one in rows.items()})
        return outcomes

    def same_bits(self, outcomes: Sequence[Outcome]) -> dict[Source, Tensor]:
        """Every tensor that came out, after a check that all ranks to which an element was delivered hold the same."""
        found: dict[Source, Tensor] = {}
        known: dict[Source, Tensor] = {}
        for rank, outcome in enumerate(outcomes):
            for tensor, result in outcome.results.items():
                key, mask = self.source(rank, tensor), outcome.delivered[tensor]
                seen = found.setdefault(key, torch.zeros_like(result))
                both = mask & known.setdefault(key, torch.zeros_like(mask))
                torch.testing.assert_close(result[both], seen[both], rtol=0, atol=0, equal_nan=True)
                seen[mask], known[key] = result[mask], known[key] | mask
        assert all(bool(mask.all()) for mask in known.values())
        return found

    def check_distances(self, outcomes: Sequence[Outcome], differences: Mapping[Source, Tensor]) -> None:
        """All ranks have the same event, in which distances are those over all tensors of the job."""
        distances = torch.cat(list(differences.values()), 1).double().norm(dim=1).tolist()
        for outcome in outcomes:
            assert outcome.told == outcomes[0].told
        event = outcomes[0].event
        assert [d is None for d in event.distances] == [replica in event.dropped for replica in range(self.roster.n)]
        for replica in event.kept:
            assert event.distances[replica] == pytest.approx(distances[replica], rel=1e-4)


def members_of(rows: Sequence[int]) -> Roster:
    """A roster with one reduction in which rank k belongs to replica rows[k]."""
    return Roster.of([Membership((row,), (0,), "") for row in rows])


def whole_numbers(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Exact in every dtype, and so are their sums over few ranks in float32."""
    return ((torch.arange(numel) * 7 + rank * 11) % 251 - 120).to(dtype)


def means(rows: Sequence[int], flats: Sequence[Tensor]) -> Tensor:
    """Row i: the mean over the ranks of replica i, computed in float64."""
    replicas = members_of(rows).replicas
    return torch.stack([torch.stack([flats[r].double() for r in ranks]).mean(0) for ranks in replicas]).to(
        flats[0].dtype
    )


def scattered(rows: Sequence[int], layout: Layout, flats: Sequence[Tensor]) -> list[tuple[Tensor, int, int]]:
    """On every rank: the rows of its chunk, the bytes sent between replicas, and all bytes sent."""
    roster = members_of(rows)

    def job(groups: Groups, world: LocalTransport) -> tuple[Tensor, int, int]:
        part = groups.part(roster, 0, world.rank)
        flat = flats[world.rank].clone()
        rows_ND = scatter_rows(part, flat, routes(layout, world.rank), Workspace()).clone()
        assert torch.equal(flat.isnan(), flats[world.rank].isnan())
        assert torch.equal(flat.nan_to_num(), flats[world.rank].nan_to_num())  # what was sent is left alone
        return rows_ND, part.outer.bytes_sent if part.outer is not None else -1, part.bytes_sent

    return on_all_ranks(len(rows), job)


def check_scatter(rows: Sequence[int], layout: Layout, dtype: torch.dtype) -> None:
    flats = [whole_numbers(rank, layout.numel, dtype) for rank in range(len(rows))]
    want = means(rows, flats)
    for rank, (rows_ND, _, _) in enumerate(scattered(rows, layout, flats)):
        assert rows_ND.dtype == dtype
        assert torch.equal(rows_ND, want[:, layout.bounds[rank] : layout.bounds[rank + 1]])


def by_stage(stages: Sequence[Sequence[dict[str, Tensor]]], n: int) -> Gradients:
    """Of each stage its buckets with rows [n, D] by tensor -> of each rank of `grid(stages, n, 1)` its buckets."""
    return [
        [{name: rows_ND[replica].clone() for name, rows_ND in bucket.items()} for bucket in stage]
        for stage in stages
        for replica in range(n)
    ]


def healthy(n: int, numel: int, seed: int) -> Tensor:
    """Rows [n, D] that resemble each other."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) + 0.3 * torch.randn(n, numel, generator=generator)


def spoil(buckets: list[dict[str, Tensor]], factor: float = -20.0) -> None:
    """Make a rank bad."""
    for bucket in buckets:
        for tensor in bucket.values():
            tensor *= factor


def two_stages(n: int) -> Job:
    """Two buckets in each of two pipeline stages."""
    first = [{"a": healthy(n, 12, 1), "b": healthy(n, 8, 2)}, {"c": healthy(n, 3, 3)}]
    second = [{"d": healthy(n, 30, 4)}, {"e": healthy(n, 7, 5), "f": healthy(n, 1, 6)}]
    return Job(Roster.of(grid(2, n, 1)), by_stage([first, second], n))


def tied(n: int, delivery: Delivery, *names: str) -> Job:
    """`two_stages` with tied tensors of different sizes, which the stages meet in opposite order."""
    plain = two_stages(n)
    for rank, buckets in enumerate(plain.gradients):
        for k, name in enumerate(names):
            buckets.insert(len(buckets) if rank < n else 0, {name: healthy(n, 5 + 4 * k, 10 + k)[rank % n]})
    pairs = tuple((replica, n + replica) for replica in range(n))
    copies = [Copies(pairs, frozenset([name]), apart=True) for name in names]
    return replace(plain, copies=copies, delivery=delivery)


def replicated(n: int, stages: int) -> Job:
    """Two tensor ranks hold a half of w each and copies of the rest. With two stages one of these is tied as well.

    Replica 2 is near the mean of the others.
    """
    gradients: Gradients = []

    def row(numel: int, seed: int, replica: int) -> Tensor:
        rows_ND = healthy(n, numel, seed)
        others = [other for other in range(n) if other != 2]
        return rows_ND[replica].lerp(rows_ND[others].mean(0), 0.9 if replica == 2 else 0.0)

    for rank in range(2 * n * stages):
        replica, stage = rank // 2 % n, rank // (2 * n)
        w, norm = row(16, rank % 2 + 2 * stage, replica), row(9, 8 + stage, replica)
        gradients.append([{"tied": row(7, 20, replica)}, {"norm": norm[:4], "w": w, "bias": norm[4:]}])
    pairs = tuple((rank, rank + 1) for rank in range(0, len(gradients), 2))
    copies = [Copies(pairs, frozenset(["norm", "bias", "tied"]))]
    if stages == 2:
        copies.append(Copies(tuple((rank, rank + 2 * n) for rank in range(2 * n)), frozenset(["tied"]), apart=True))
    return Job(Roster.of(grid(stages, n, 2)), gradients, copies)
