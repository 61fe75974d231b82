"""The exchange in one process: who gets which elements, how many bytes that takes, and what memory is used again."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import DTYPES, layouts, needed, tensor_index
from torch import Tensor

from ds_byzantine.exchange.all_to_all import gather_partials, gather_rows, scatter_rows, sum_over_ranks
from ds_byzantine.exchange.deliver import deliver
from ds_byzantine.exchange.groups import Part
from ds_byzantine.exchange.local import LocalTransport, LocalWorld
from ds_byzantine.exchange.routes import Routes, routes
from ds_byzantine.exchange.workspace import Workspace
from ds_byzantine.types import Delivery, Layout, Segment, Slice, even_bounds

few = settings(max_examples=60, deadline=None)


def flat_of(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, all different within a rank and exact in every dtype."""
    return ((torch.arange(numel) * 7 + rank * 11) % 251 - 120).to(dtype)


def owned_by(*pieces: tuple[int, int, int], numel: int, n: int) -> Layout:
    owners = tuple(Slice(*piece) for piece in pieces)
    return Layout((Segment("w", 0, numel),), even_bounds(numel, n), Delivery.OWNERS, owners)


# Hypothesis finds such layouts as well; these are the ones that hosts make.
TYPICAL = {
    "one owner": owned_by((2, 0, 10), numel=10, n=3),
    "owners in order": owned_by((0, 0, 4), (1, 4, 8), (2, 8, 12), numel=12, n=3),
    "owners in descending order": owned_by((2, 0, 5), (1, 5, 9), (0, 9, 13), numel=13, n=3),
    "disjoint slices of one owner": owned_by((1, 0, 2), (0, 2, 5), (1, 5, 6), (0, 7, 11), (1, 11, 12), numel=12, n=2),
    "nobody's elements": owned_by((0, 2, 4), (1, 9, 10), numel=12, n=3),
    "nobody owns anything": owned_by(numel=5, n=2),
    "fewer elements than ranks": owned_by((3, 0, 1), (0, 1, 2), numel=2, n=4),
    "a slice over three chunks": owned_by((0, 1, 8), (2, 8, 9), numel=9, n=3),
}


def scatter_and_deliver(layout: Layout, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, int]]:
    """On every rank: the rows of its chunk; the bucket after the chunks' column sums were delivered; bytes sent."""

    def job(transport: LocalTransport) -> tuple[Tensor, Tensor, int]:
        flat, workspace = flat_of(transport.rank, layout.numel, dtype), Workspace()
        route = routes(layout, transport.rank)
        rows_ND = scatter_rows(Part.plain(transport), flat, route, workspace)
        seen = rows_ND.clone()
        layout.chunk_of(flat, transport.rank).copy_(rows_ND[0] * 2 + rows_ND[-1])
        deliver(transport, flat, layout, route, workspace)
        return seen, flat, transport.bytes_sent

    return LocalWorld(layout.ranks, timeout=20).run(job)


def expected_bytes(layout: Layout, rank: int) -> int:
    """Elements that leave a rank, counted one by one from the definitions."""
    n, bounds = layout.ranks, layout.bounds
    chunk = set(range(bounds[rank], bounds[rank + 1]))
    sent = layout.numel - len(chunk)
    if layout.delivery is Delivery.EVERYONE:
        sent += (n - 1) * len(chunk)
    elif layout.delivery is Delivery.OWNERS:
        sent += sum(len(chunk & set(range(s.start, s.stop))) for s in layout.owners if s.owner != rank)
    return sent


def check_round_trip(layout: Layout, dtype: torch.dtype) -> None:
    n, bounds = layout.ranks, layout.bounds
    rows_ND = torch.stack([flat_of(rank, layout.numel, dtype) for rank in range(n)])
    want = rows_ND[0] * 2 + rows_ND[-1]
    for rank, (seen, flat, sent) in enumerate(scatter_and_deliver(layout, dtype)):
        assert torch.equal(seen, rows_ND[:, bounds[rank] : bounds[rank + 1]])
        mask = needed(layout, rank)
        assert torch.equal(flat[mask], want[mask])
        assert flat.dtype == dtype
        assert sent == expected_bytes(layout, rank) * dtype.itemsize


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TYPICAL)
def test_typical_layouts(name: str, dtype: torch.dtype) -> None:
    check_round_trip(TYPICAL[name], dtype)


@few
@given(st.integers(1, 5).flatmap(lambda n: layouts(n)), st.sampled_from(DTYPES))
def test_any_layout(layout: Layout, dtype: torch.dtype) -> None:
    check_round_trip(layout, dtype)


@few
@given(st.integers(1, 5).flatmap(lambda n: layouts(n)))
def test_routes_agree_with_the_layout(layout: Layout) -> None:
    n = layout.ranks
    everybody = [routes(layout, rank) for rank in range(n)]
    for rank, route in enumerate(everybody):
        assert route.sizes == tuple(b - a for a, b in pairwise(layout.bounds))
        assert route.pieces == everybody[0].pieces
        assert route.receive == tuple(other.send[rank] for other in everybody)
        assert not route.send[rank]
    for number, name in enumerate(everybody[0].tensors):
        where = [
            layout.bounds[rank] + torch.arange(piece.start, piece.stop)
            for rank, pieces in enumerate(everybody[0].pieces)
            for piece in pieces
            if piece.tensor == number
        ]
        assert torch.equal(torch.cat(where), tensor_index(layout, name))


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_rows_take_as_many_bytes_as_a_ring_reduce_scatter(n: int) -> None:
    layout = Layout((Segment("w", 0, 40 * n),), even_bounds(40 * n, n), Delivery.AGGREGATOR)
    for _, _, sent in scatter_and_deliver(layout, torch.float32):
        assert sent * n == (n - 1) * layout.numel * 4


def test_owners_receive_as_many_bytes_as_they_own() -> None:
    layout = TYPICAL["owners in order"]  # chunk and slice coincide: nothing is left to deliver
    assert [sent for _, _, sent in scatter_and_deliver(layout, torch.float32)] == [8 * 4] * 3


def partials_job(layout: Layout, transport: LocalTransport) -> list[Tensor]:
    route = routes(layout, transport.rank)
    count = len(route.pieces[transport.rank])
    mine = torch.arange(count * 3, dtype=torch.float64).view(count, 3) + 100 * transport.rank
    return gather_partials(transport, mine, route)


@few
@given(st.integers(1, 5).flatmap(lambda n: layouts(n)))
def test_partials_come_from_the_rank_that_claims_them(layout: Layout) -> None:
    results = LocalWorld(layout.ranks, timeout=20).run(lambda transport: partials_job(layout, transport))
    for got in results:
        for rank, (partial, pieces) in enumerate(zip(got, routes(layout, 0).pieces, strict=True)):
            want = torch.arange(len(pieces) * 3, dtype=torch.float64).view(-1, 3) + 100 * rank
            assert torch.equal(partial, want)


def test_sums_are_the_same_bits_on_all_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(4, 6, generator=generator, dtype=torch.float64) * 10.0 ** torch.arange(6)
    world = LocalWorld(4)
    sums = world.run(lambda t: sum_over_ranks(t, numbers[t.rank], torch.device("cpu")))
    assert all(torch.equal(s, sums[0]) for s in sums)
    assert torch.allclose(sums[0], numbers.sum(0))


def test_gather_rows_takes_views() -> None:
    matrix = torch.arange(12.0).view(3, 4)
    rows = LocalWorld(4).run(lambda t: gather_rows(Part.plain(t), matrix[:, t.rank]))
    assert all(torch.equal(r, matrix.T) for r in rows)


@pytest.mark.parametrize("delivery", list(Delivery))
def test_buckets_that_grow_and_shrink_through_one_workspace(delivery: Delivery) -> None:
    sizes = [7, 31, 4, 1, 19, 31, 2]

    def bucket(numel: int) -> Layout:
        owners = (Slice(1, 0, numel // 2), Slice(0, numel // 2, numel)) if delivery is Delivery.OWNERS else ()
        return Layout((Segment("w", 0, numel),), even_bounds(numel, 3), delivery, owners)

    def job(transport: LocalTransport) -> tuple[list[Tensor], int]:
        workspace, out = Workspace(), []
        for i, numel in enumerate(sizes):
            layout = bucket(numel)
            flat, route = flat_of(transport.rank + i, numel, torch.float32), routes(layout, transport.rank)
            rows_ND = scatter_rows(Part.plain(transport), flat, route, workspace)
            layout.chunk_of(flat, transport.rank).copy_(rows_ND.sum(0))
            deliver(transport, flat, layout, route, workspace)
            out.append(flat)
        return out, workspace.nbytes

    for rank, (flats, nbytes) in enumerate(LocalWorld(3, timeout=20).run(job)):
        for i, numel in enumerate(sizes):
            want = sum(flat_of(k + i, numel, torch.float32) for k in range(3))
            mask = needed(bucket(numel), rank)
            assert torch.equal(flats[i][mask], want[mask])
        assert nbytes <= (3 * 11) * 4  # one bucket, with the last chunk padded to the others


def test_workspace_lends_the_same_memory_and_grows() -> None:
    workspace, like = Workspace(), torch.empty(0)
    first = workspace.take(8, like)
    assert workspace.take(5, like).data_ptr() == first.data_ptr()
    assert workspace.take(9, like).numel() == 9
    assert workspace.nbytes == 9 * 4
    assert workspace.take(3, like.bfloat16()).dtype == torch.bfloat16
    assert workspace.nbytes == 9 * 4 + 3 * 2


def test_routes_are_computed_once_per_layout() -> None:
    def build() -> Layout:
        return owned_by((1, 0, 3), (0, 3, 6), numel=6, n=2)

    found: Routes = routes(build(), 1)
    assert routes(build(), 1) is found
    assert routes(build(), 0) is not found


def test_a_rank_that_fails_ends_the_world() -> None:
    def job(transport: LocalTransport) -> None:
        if transport.rank == 1:
            raise KeyError("rank 1")
        transport.all_gather(torch.empty(2), torch.ones(1))

    with pytest.raises(KeyError, match="rank 1"):
        LocalWorld(2, timeout=20).run(job)


def test_a_rank_that_leaves_early_is_an_error() -> None:
    def job(transport: LocalTransport) -> None:
        if transport.rank == 1:
            transport.all_gather(torch.empty(2), torch.ones(1))

    with pytest.raises(RuntimeError, match="same collectives"):
        LocalWorld(2, timeout=0.2).run(job)


def test_splits_that_do_not_fit_are_an_error() -> None:
    def job(transport: LocalTransport) -> None:
        transport.all_to_all(torch.empty(4), torch.ones(4), [1, 3], [2, 2])

    with pytest.raises(ValueError, match="expected"):
        LocalWorld(2, timeout=20).run(job)
