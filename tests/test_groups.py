"""Replicas of several ranks: who they are, the exchange in two hops, shared tensors, and the books of such jobs."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from groups_runs import (
    Gradients,
    Groups,
    Job,
    by_stage,
    check_scatter,
    closure,
    experts,
    grid,
    healthy,
    means,
    members_of,
    on_all_ranks,
    on_hosts,
    replicated,
    scattered,
    spoil,
    tied,
    two_stages,
    whole_numbers,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layouts
from pipeline_runs import assert_near
from torch import Tensor

from ds_byzantine.errors import UnsupportedHostError
from ds_byzantine.exchange.all_to_all import gather_rows
from ds_byzantine.exchange.deliver import share
from ds_byzantine.exchange.groups import BYTES, Membership, Roster, Shared, columns_of, gather_memberships
from ds_byzantine.exchange.local import LocalTransport, LocalWorld
from ds_byzantine.exchange.routes import routes
from ds_byzantine.rules.aggregate import aggregate
from ds_byzantine.types import Delivery, Layout, Segment, even_bounds

CPU = torch.device("cpu")
MEDIAN, CLIP, KRUM = ("median", 1, ()), ("centered_clip", 1, ()), ("krum", 1, ())
Chosen = tuple[str, int, tuple[str, ...]]

# -- who is a replica -------------------------------------------------------------------------------------------------

LAYOUTS = {
    "plain": (grid(1, 3, 1), [(0,), (1,), (2,)], False),
    "pipeline": (grid(2, 2, 1), [(0, 2), (1, 3)], True),
    "tensor": (grid(1, 2, 2), [(0, 1), (2, 3)], True),
    "pipeline x tensor": (grid(2, 2, 2), [(0, 1, 4, 5), (2, 3, 6, 7)], True),
    "experts": (experts(4, 2), [(0, 1), (2, 3)], True),
    "experts of two kinds": (experts(8, 2, 4), [(0, 1, 2, 3), (4, 5, 6, 7)], True),
    "hosts": (on_hosts(grid(1, 6, 1), 2), [(0, 1), (2, 3), (4, 5)], False),
    "hosts of two pipelines each": (on_hosts(grid(2, 4, 1), 2), [(0, 1, 4, 5), (2, 3, 6, 7)], True),
    "everything on one host": (on_hosts(grid(2, 2, 1), 4), [(0, 1, 2, 3)], True),
}


@pytest.mark.parametrize(("members", "replicas", "split"), LAYOUTS.values(), ids=LAYOUTS)
def test_replicas(members: list[Membership], replicas: list[tuple[int, ...]], split: bool) -> None:
    roster = Roster.of(members)
    assert roster.replicas == tuple(replicas)
    assert (roster.n, roster.split) == (len(replicas), split)
    assert roster.hosts == tuple(m.host for m in members)
    for replica, ranks in enumerate(replicas):
        assert [roster.replica_of(rank) for rank in ranks] == [replica] * len(ranks)


def test_ranks_of_a_reduction() -> None:
    roster = Roster.of(grid(2, 3, 2))
    assert roster.members(0, 0) == (0, 2, 4)
    assert roster.members(0, 7) == (7, 9, 11)
    assert [roster.ranks_in(0, 7, replica) for replica in range(3)] == [(7,), (9,), (11,)]
    moe = Roster.of(experts(8, 2, 4))
    assert moe.members(0, 0) == tuple(range(8))
    assert moe.ranks_in(0, 0, 1) == (4, 5, 6, 7)
    assert (moe.members(1, 1), moe.ranks_in(1, 1, 1)) == ((1, 3, 5, 7), (5, 7))
    assert (moe.members(2, 3), moe.ranks_in(2, 3, 1)) == ((3, 7), (7,))
    assert moe.members(1, 3) == ()


def test_a_chain_of_labels_is_one_replica() -> None:
    """Rank 5 meets 1, which meets 4, which meets 0; labels of different kinds are different though equal."""
    labels = [(0, 9), (1, 7), (2, 2), (3, 3), (0, 7), (1, 5), (3, 6)]
    assert Roster.of([Membership(one, (0,), "") for one in labels]).replicas == ((0, 1, 4, 5), (2,), (3, 6))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 3).flatmap(lambda k: st.lists(st.tuples(*[st.integers(0, 6)] * k), min_size=1, max_size=9)))
def test_replicas_are_the_transitive_closure(labels: list[tuple[int, ...]]) -> None:
    want = closure(labels) if labels[0] else [(rank,) for rank in range(len(labels))]
    assert list(Roster.of([Membership(one, (0,), "") for one in labels]).replicas) == want


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([0, 1, 2], ((0, 1, 2),)),
        ([0, 0, 1, 1], ((0, 2), (1, 3))),
        ([0, 1, 0, 1], ((0, 1), (2, 3))),
        ([0, 1, 1, 0, 0, 1], ((0, 1), (2, 3), (4, 5))),
        ([1, 1, 0, 0], ((0, 2), (1, 3))),
    ],
)
def test_columns(rows: list[int], columns: tuple[tuple[int, ...], ...]) -> None:
    assert columns_of(rows) == columns


def test_replicas_of_different_size_are_refused() -> None:
    with pytest.raises(UnsupportedHostError, match=r"different numbers of ranks \(\{0: 3, 4: 1\}\)") as caught:
        columns_of([0, 4, 0, 0])
    assert '"fault_domain": "replica"' in str(caught.value)


def test_memberships_travel() -> None:
    hosts = ["a", "knoten-ä-" + "x" * 80, "y" * BYTES, ""]
    own = [Membership((rank, 2**56 - 1 - rank), (rank % 2,), host) for rank, host in enumerate(hosts)]
    arrived = ["a", "knoten-?-" + "x" * (BYTES - 9), "y" * BYTES, ""]
    want = [Membership(m.mixes, m.reductions, host) for m, host in zip(own, arrived, strict=True)]
    assert LocalWorld(4, timeout=20).run(lambda world: gather_memberships(world, own[world.rank], CPU)) == [want] * 4


# -- rows in two hops -------------------------------------------------------------------------------------------------

PLACES = {
    "consecutive pairs": (0, 0, 1, 1, 2, 2),
    "interleaved pairs": (0, 1, 2, 0, 1, 2),
    "consecutive triples": (0, 0, 0, 1, 1, 1),
    "interleaved triples": (0, 1, 0, 1, 0, 1),
    "pairs in turn": (0, 1, 2, 1, 2, 0),
    "one replica": (0, 0, 0, 0, 0, 0),
    "one rank each": (0, 1, 2, 3, 4, 5),
}
BOUNDS = {
    "even": even_bounds(24, 6),
    "short at the end": even_bounds(21, 6),
    "fewer elements than ranks": even_bounds(4, 6),
    "uneven": (0, 1, 9, 9, 10, 17, 23),
    "all at one rank": (0, 0, 0, 0, 13, 13, 13),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("rows", PLACES.values(), ids=PLACES)
def test_rows_are_the_means_over_replicas(rows: tuple[int, ...], bounds: tuple[int, ...], dtype: torch.dtype) -> None:
    check_scatter(rows, Layout((Segment("w", 0, bounds[-1]),), bounds, Delivery.AGGREGATOR), dtype)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), n=st.integers(1, 3), g=st.integers(1, 3))
def test_rows_on_any_layout(data: st.DataObject, n: int, g: int) -> None:
    rows = data.draw(st.permutations([replica for replica in range(n) for _ in range(g)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    check_scatter(rows, data.draw(layouts(n * g)), dtype)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rows", [PLACES["consecutive pairs"], PLACES["interleaved triples"]], ids=["pairs", "triples"])
def test_a_rank_spoils_the_row_of_its_replica_only(rows: tuple[int, ...], value: float) -> None:
    layout = Layout((Segment("w", 0, 20),), even_bounds(20, 6), Delivery.AGGREGATOR)
    flats = [whole_numbers(rank, 20, torch.float32) for rank in range(6)]
    flats[3][5:9] = value
    for rank, (rows_ND, _, _) in enumerate(scattered(rows, layout, flats)):
        lost = torch.zeros_like(rows_ND, dtype=torch.bool)
        chunk = torch.arange(layout.bounds[rank], layout.bounds[rank + 1])
        lost[rows[3]] = (chunk >= 5) & (chunk < 9)
        assert torch.equal(~rows_ND.isfinite(), lost)
        assert torch.equal(rows_ND[~lost], means(rows, flats)[:, chunk][~lost])


@pytest.mark.parametrize("rows", list(PLACES.values())[:5], ids=list(PLACES)[:5])
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_the_mean_leaves_a_replica_once(rows: tuple[int, ...], bounds: tuple[int, ...]) -> None:
    """Between replicas travels 1/g of what each rank for itself would send to the aggregators of other replicas."""
    sizes, g = [b - a for a, b in pairwise(bounds)], rows.count(0)
    flat = sum(4 * size for here in rows for there, size in zip(rows, sizes, strict=True) if here != there)
    layout = Layout((Segment("w", 0, bounds[-1]),), bounds, Delivery.AGGREGATOR)
    results = scattered(rows, layout, [torch.ones(bounds[-1])] * 6)
    assert g * sum(outer for _, outer, _ in results) == flat
    if len(set(sizes)) == 1:
        assert [g * outer for _, outer, _ in results] == [flat // 6] * 6
        assert [total - outer for _, outer, total in results] == [4 * bounds[-1] * (g - 1) // g] * 6


@pytest.mark.parametrize("rows", PLACES.values(), ids=PLACES)
def test_gather_rows_takes_the_means_as_well(rows: tuple[int, ...]) -> None:
    flats, roster = [whole_numbers(rank, 10, torch.float32) for rank in range(6)], members_of(rows)
    strided = torch.stack(flats, 1)

    def job(groups: Groups, world: LocalTransport) -> Tensor:
        return gather_rows(groups.part(roster, 0, world.rank), strided[:, world.rank])

    assert all(torch.equal(got, means(rows, flats)) for got in on_all_ranks(6, job))


# -- shared tensors ---------------------------------------------------------------------------------------------------

MIXED = [("a", 5), ("shared 1", 3), ("shared 2", 4), ("b", 6), ("shared 3", 2), ("c", 9), ("a", 1), ("shared 1", 2)]


class Silent(LocalTransport):
    """A transport on which nothing may be said."""

    def broadcast(self, tensor: Tensor) -> None:
        raise AssertionError("a chunk without shared tensors was announced")


@pytest.mark.parametrize("bounds", [(0, 32), (0, 6, 14, 32), (0, 5, 5, 12, 20, 29, 32)], ids=len)
def test_share_copies_the_leaders_bits(bounds: tuple[int, ...]) -> None:
    """Each chunk has three holders. Elements of other tensors, and of other chunks, are nobody's business."""
    edges = [0, *torch.tensor([size for _, size in MIXED]).cumsum(0).tolist()]
    segments = tuple(Segment(name, a, b) for (name, _), (a, b) in zip(MIXED, pairwise(edges), strict=True))
    layout = Layout(segments, bounds, Delivery.EVERYONE)
    tensors = frozenset(name for name, _ in MIXED if name.startswith("shared"))
    flats = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    quiet = 0
    for chunk, (start, stop) in enumerate(pairwise(bounds)):
        mask = torch.zeros(32, dtype=torch.bool)
        for segment in segments:
            if segment.tensor in tensors:
                mask[max(segment.start, start) : min(segment.stop, stop)] = True
        kind = LocalTransport if mask.any() else Silent
        quiet += kind is Silent
        world = LocalWorld(3, timeout=20)
        holders = [Shared(kind(world, rank), tensors) for rank in range(3)]

        def job(one: LocalTransport, chunk: int = chunk, holders: list[Shared] = holders) -> tuple[Tensor, int]:
            flat = flats[one.rank].clone()
            share(holders[one.rank], flat, layout, routes(layout, chunk), chunk)
            return flat, holders[one.rank].transport.bytes_sent

        for rank, (flat, sent) in enumerate(world.run(job)):
            assert torch.equal(flat, torch.where(mask, flats[0], flats[rank]))
            assert sent == (2 * 4 * int(mask.sum()) if rank == 0 else 0)
    assert quiet == (3 if len(bounds) > 4 else 0)


# -- whole steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [MEDIAN, CLIP, ("trimmed_mean", 1, ("nnm",))], ids=str)
@pytest.mark.parametrize("scope", ["tensor", "model", "shard"])
def test_pipeline(scope: str, chosen: Chosen) -> None:
    job = two_stages(3)
    for buckets in job.gradients[:3]:  # large layers have large distances in healthy replicas too
        spoil(buckets, 1.0 if scope == "model" else 40.0)
    spoil(job.gradients[5])
    event = job.check(*chosen, scope)[0].event
    assert (event.suspect, event.suspect_ranks, event.dropped) == (2, [5], [])


@pytest.mark.parametrize("chosen", [KRUM, CLIP, ("caf_gated", 1, ()), ("bulyan", 0, ()), MEDIAN], ids=str)
def test_scope_model_decides_over_all_stages(chosen: Chosen) -> None:
    """The row that lies in the middle in the first stage is the bad one in the second."""
    job = two_stages(5)
    for k, bucket in enumerate(job.gradients[4]):
        for name, tensor in bucket.items():
            tensor.copy_(torch.stack([job.gradients[rank][k][name] for rank in range(4)]).mean(0))
    spoil(job.gradients[9])
    model = job.check(*chosen, "model")[0]
    assert (model.event.suspect, model.event.suspect_ranks) == (4, [9])
    if chosen == KRUM:  # which takes one row as it is
        middle = job.gradients[4][0]["a"]
        assert torch.equal(job.check(*chosen, "tensor")[0].results["a"], middle)
        assert not torch.equal(model.results["a"], middle)


@pytest.mark.parametrize("chosen", [KRUM, CLIP, ("caf_gated", 1, ()), MEDIAN], ids=str)
def test_scope_model_drops_a_replica_in_all_stages(chosen: Chosen) -> None:
    job = two_stages(6)
    job.gradients[8][0]["d"][17] = math.nan
    event = job.check(*chosen, "model")[0].event
    assert (event.dropped, event.suspect, event.unsafe) == ([2], 2, {})
    assert (event.nonfinite, event.suspect_ranks) == ([0, 0, 1, 0, 0, 0], [8])
    job.gradients[3][1]["c"][0] = math.inf  # another replica, in the other stage: more than f in all
    for outcome in job.run(*chosen, "model"):
        assert all(bool(result.isnan().all()) for result in outcome.results.values())
        assert (outcome.event.dropped, bool(outcome.event.unsafe)) == ([2, 3], True)


@pytest.mark.parametrize("chosen", [CLIP, MEDIAN], ids=str)
def test_scope_model_with_a_stage_that_has_no_gradients(chosen: Chosen) -> None:
    job = two_stages(3)
    for buckets in job.gradients[:3]:
        buckets.clear()
    assert job.check(*chosen, "model")[0].event.suspect is not None


@pytest.mark.parametrize("scope", ["tensor", "shard"])
@pytest.mark.parametrize("chosen", [MEDIAN, CLIP], ids=str)
def test_rows_that_are_not_finite_name_their_rank(chosen: Chosen, scope: str) -> None:
    job = two_stages(3)
    job.gradients[5][0]["d"][17] = math.nan
    job.gradients[5][1]["e"][:] = math.inf
    event = job.check(*chosen, scope)[0].event
    pieces = 1 if scope == "tensor" else 3  # e lies in three chunks
    assert (event.dropped, event.suspect, event.suspect_ranks, event.unsafe) == ([2], 2, [5], {})
    assert event.nonfinite == [0, 0, 1 + pieces]
    job.gradients[0][1]["c"][2] = math.nan  # a second replica, but f in every tensor
    assert [outcome.event.unsafe for outcome in job.run(*chosen, scope)] == [{}] * 6
    job.gradients[4][0]["d"][17] = math.nan  # more than f in a tensor of the second stage: the first knows as well
    for outcome in job.run(*chosen, scope):
        assert (outcome.event.dropped, bool(outcome.event.unsafe)) == ([0, 1, 2], True)


def test_a_stage_without_gradients_takes_part_in_the_books() -> None:
    job = two_stages(3)
    spoil(job.gradients[5])
    for buckets in job.gradients[:3]:
        buckets.clear()
    for chosen in (MEDIAN, CLIP):
        event = job.check(*chosen)[0].event
        assert (event.suspect, event.suspect_ranks) == (2, [5])


@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("chosen", [MEDIAN, CLIP], ids=str)
def test_experts(chosen: Chosen, scope: str) -> None:
    """Two ranks are a replica: both have the dense parameters, each has an expert of its own."""
    gradients: Gradients = []
    for rank in range(6):
        dense, expert = healthy(6, 25, 1)[rank], healthy(6, 14, 2 + rank % 2)[rank]
        gradients.append([{"w": dense[:20], "v": dense[20:]}, {"expert": expert}])
    job = Job(Roster.of(experts(6, 2)), gradients, kinds={"expert": 1})
    spoil(gradients[5][1:])
    event = job.check(*chosen, scope)[0].event
    assert (event.suspect, event.suspect_ranks) == (2, [5])
    spoil(gradients[5][:1], 1e4)
    event = job.check(*chosen, scope)[0].event
    assert (event.suspect, event.suspect_ranks) == (2, [4, 5])  # a mean does not tell whose fault it is


@pytest.mark.parametrize("delivery", list(Delivery))
def test_hosts_as_replicas(delivery: Delivery) -> None:
    job = Job(Roster.of(on_hosts(grid(1, 6, 1), 2)), by_stage([[{"w": healthy(6, 21, 1)}]], 6), delivery=delivery)
    spoil(job.gradients[3])
    for chosen in (MEDIAN, CLIP):
        event = job.check(*chosen)[0].event
        assert (event.suspect, event.suspect_ranks) == (1, [2, 3])


# -- copies of a tensor within a replica ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "scope", "delivery"),
    [
        (MEDIAN, "tensor", Delivery.EVERYONE),
        (MEDIAN, "shard", Delivery.OWNERS),
        (CLIP, "tensor", Delivery.OWNERS),
        (CLIP, "model", Delivery.AGGREGATOR),
        (KRUM, "tensor", Delivery.EVERYONE),
        (KRUM, "model", Delivery.OWNERS),
    ],
    ids=str,
)
def test_tied_tensors_stay_equal_and_count_once(chosen: Chosen, scope: str, delivery: Delivery) -> None:
    """That both stages end with the same bits is part of the check."""
    n = 5 if chosen == KRUM else 3
    job = tied(n, delivery, "t1", "t2", "t3")
    quiet = job.check(*chosen, scope)[0].event
    spoil([bucket for bucket in job.gradients[n + 2] if bucket.keys() & {"t1", "t3"}])
    assert job.check(*chosen, scope)[0].event.distances == quiet.distances  # these copies are not used
    spoil(job.gradients[2])
    event = job.check(*chosen, scope)[0].event
    assert (event.suspect, event.suspect_ranks) == (2, [2])


def test_a_copy_that_is_not_finite_is_reported() -> None:
    job = tied(3, Delivery.EVERYONE, "t")
    [bucket] = [bucket for bucket in job.gradients[4] if "t" in bucket]
    bucket["t"][3] = math.nan
    for chosen in (MEDIAN, CLIP):
        outcomes = job.run(*chosen)
        want = aggregate(job.rows()[0, 0, "t"], rule=chosen[0], f=1)
        assert_near(job.same_bits(outcomes)[0, 0, "t"], want, 20.0)
        assert (outcomes[0].event.dropped, outcomes[0].event.suspect_ranks) == ([1], [4])


@pytest.mark.parametrize(
    ("chosen", "scope", "stages"),
    [(MEDIAN, "tensor", 1), (CLIP, "tensor", 2), (KRUM, "tensor", 1), (KRUM, "model", 1), (MEDIAN, "model", 2)],
    ids=str,
)
def test_replicated_parameters_stay_equal(chosen: Chosen, scope: str, stages: int) -> None:
    """Replica 2 is the one that krum takes: with scope "model" also where its second rank has bad copies."""
    job = replicated(5 if chosen == KRUM else 3, stages)
    quiet = job.check(*chosen, scope)[0]
    if chosen == KRUM:
        assert torch.equal(quiet.results["norm"], job.gradients[4][1]["norm"])

    def spoil_copies(rank: int) -> None:
        spoil([{name: one for bucket in job.gradients[rank] for name, one in bucket.items() if name != "w"}])

    spoil_copies(5)
    assert job.check(*chosen, scope)[0].event.distances == quiet.event.distances  # they are not used
    if scope == "tensor":
        alone = Job(job.roster, job.gradients).run(*chosen)
        assert not torch.equal(alone[0].results["norm"], alone[1].results["norm"])  # what sharing prevents
    spoil_copies(4)
    event = job.check(*chosen, scope)[0].event
    assert (event.suspect, event.suspect_ranks) == (2, [4])
