"""The main path: scopes, and the books of a step."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layouts, names_of, needed, per_tensor, tensor_index
from pipeline_runs import ALL_KINDS, COORDINATE, POINT, RULES, STEP, N, assert_near, random_rows, rules, run, simple
from torch import Tensor

from ds_byzantine.exchange.groups import Part, Peers
from ds_byzantine.exchange.local import LocalTransport, LocalWorld
from ds_byzantine.monitor.events import StepEvent
from ds_byzantine.pipeline import ShardAggregator
from ds_byzantine.rules.aggregate import aggregate
from ds_byzantine.rules.apply import Aggregator
from ds_byzantine.types import Bucket, Delivery, Layout, Segment, Slice, even_bounds

# -- scopes -----------------------------------------------------------------------------------------------------------

BOOKS = (N - 1) * (3 * N + 1) * 8  # bytes that a rank sends at the end of a step


@rules
def test_scope_model_is_the_rule_on_all_gradients_at_once(rule: str, f: int, pre: tuple[str, ...]) -> None:
    sizes = [(12, 8), (3,), (1, 30)]
    rows = [random_rows(N, sum(s), seed=i) for i, s in enumerate(sizes)]
    together = torch.cat(rows, 1)
    want = aggregate(together, rule=rule, f=f, pre=pre, seed=STEP)
    results = run(rows, [simple(*s) for s in sizes], rule, f, pre, scope="model")
    for result in results:
        assert_near(torch.cat(result.flats), want, 20.0)
        distances = (together - want).double().norm(dim=1).tolist()
        assert result.event.distances == pytest.approx(distances, rel=1e-4)


@pytest.mark.parametrize(("rule", "f", "pre"), ALL_KINDS)
def test_scope_model_drops_a_row_everywhere(rule: str, f: int, pre: tuple[str, ...]) -> None:
    rows = [random_rows(N, 20, seed=i) for i in range(3)]
    rows[1][2, 7] = math.nan
    want = aggregate(torch.cat(rows, 1), rule=rule, f=f, pre=pre, seed=STEP)
    for result in run(rows, [simple(12, 8)] * 3, rule, f, pre, scope="model"):
        assert_near(torch.cat(result.flats), want, 20.0)
        assert result.event.dropped == [2]
        assert result.event.unsafe == ({} if f else {"all tensors": [2]})


@settings(max_examples=15, deadline=None)
@given(data=st.data(), chosen=st.sampled_from(RULES))
def test_scope_model_on_any_layout(data: st.DataObject, chosen: tuple[str, int, tuple[str, ...]]) -> None:
    many = [data.draw(layouts(N, largest=20)) for _ in range(data.draw(st.integers(1, 3)))]
    rows = [random_rows(N, one.numel, seed=i) for i, one in enumerate(many)]
    rule, f, pre = chosen
    want = aggregate(torch.cat(rows, 1), rule=rule, f=f, pre=pre, seed=STEP)
    parts = torch.split(want, [one.numel for one in many])
    for rank, result in enumerate(run(rows, many, rule, f, pre, scope="model")):
        for one, flat, part in zip(many, result.flats, parts, strict=True):
            mask = needed(one, rank)
            assert_near(flat[mask], part[mask], 20.0)


def test_scope_model_commits_nothing_before_the_flush() -> None:
    def job(transport: LocalTransport) -> list[str]:
        order: list[str] = []
        path = ShardAggregator(Peers.plain(transport), Aggregator.create("centered_clip", 1), scope="model")
        for name in ("first", "second"):
            rows_ND = random_rows(N, 9)
            path.submit(Bucket(rows_ND[transport.rank], simple(9)), lambda flat, name=name: order.append(name))
        order.append("flush")
        path.flush()
        path.flush()  # nothing left to do
        return order

    assert LocalWorld(N, timeout=20).run(job) == [["flush", "first", "second"]] * N


def pieces_of(layout: Layout, rule: Callable[[Tensor], Tensor], rows_ND: Tensor) -> Tensor:
    """The rule on what each rank holds of each tensor: the definition of scope "shard"."""
    out = torch.empty_like(rows_ND[0])
    for rank in range(layout.ranks):
        for name in names_of(layout):
            index = tensor_index(layout, name)
            index = index[(index >= layout.bounds[rank]) & (index < layout.bounds[rank + 1])]
            if len(index):
                out[index] = rule(rows_ND[:, index])
    return out


@settings(max_examples=25, deadline=None)
@given(layout=layouts(N), chosen=st.sampled_from(RULES), spoiled=st.booleans())
def test_scope_shard_is_the_rule_on_each_piece(
    layout: Layout, chosen: tuple[str, int, tuple[str, ...]], spoiled: bool
) -> None:
    rule, f, pre = chosen
    rows_ND = random_rows(N, layout.numel)
    if spoiled:
        rows_ND[1, layout.numel // 2] = math.nan
    want = pieces_of(layout, lambda part: aggregate(part, rule=rule, f=f, pre=pre, seed=STEP), rows_ND)
    results = run([rows_ND], [layout], rule, f, pre, scope="shard")
    for rank, result in enumerate(results):
        mask = needed(layout, rank)
        assert_near(result.flats[0][mask], want[mask], 20.0)
        assert result.event.dropped == ([1] if spoiled else [])
        assert bool(result.event.unsafe) == (spoiled and f == 0)
    distances = (rows_ND - want)[:, want.isfinite()].double().norm(dim=1)
    for result in results:
        for replica in result.event.kept:
            assert result.event.distances[replica] == pytest.approx(float(distances[replica]), rel=1e-3, abs=1e-5)


def test_scope_shard_sends_no_statistics() -> None:
    rows_ND = random_rows(N, 20)
    sent = {scope: run([rows_ND], [simple(20)], *POINT, scope=scope)[0].event.bytes for scope in ("tensor", "shard")}
    buckets, books = 2 * 15 * 4, BOOKS
    statistics = (N - 1) * (N + (N + 1) * (N + 2) // 2) * 8
    assert sent == {"tensor": buckets + statistics + books, "shard": buckets + books}


# -- books ------------------------------------------------------------------------------------------------------------


@rules
@settings(max_examples=6, deadline=None)
@given(layout=layouts(N))
def test_distances_are_those_of_the_rows_to_the_result(rule: str, f: int, pre: tuple[str, ...], layout: Layout) -> None:
    rows_ND = random_rows(N, layout.numel)
    want = per_tensor(rows_ND, layout, lambda part: aggregate(part, rule=rule, f=f, pre=pre, seed=STEP))
    distances = (rows_ND - want).double().norm(dim=1).tolist()
    for result in run([rows_ND], [layout], rule, f, pre):
        assert result.event.distances == pytest.approx(distances, rel=1e-4, abs=1e-5)
        assert result.event.suspect == max(range(N), key=distances.__getitem__)
        assert result.event.step == STEP


def test_no_distance_no_suspect() -> None:
    rows_ND = torch.ones(N, 20)
    for result in run([rows_ND], [simple(20)], *COORDINATE):
        assert result.event.distances == [0.0] * N
        assert result.event.suspect is None


def test_distances_are_measured_every_so_many_steps() -> None:
    rows_ND = random_rows(N, 20)
    assert max(run([rows_ND], [simple(20)], *COORDINATE, distances_every=STEP)[0].event.distances) > 0
    event = run([rows_ND], [simple(20)], *COORDINATE, distances_every=STEP + 1)[0].event
    assert event.distances == [None] * len(event.distances)


@pytest.mark.parametrize(
    ("delivery", "passes"), [(Delivery.OWNERS, 2), (Delivery.EVERYONE, 2), (Delivery.AGGREGATOR, 1)]
)
@pytest.mark.parametrize("chosen", [POINT, COORDINATE])
def test_bytes_of_a_step(chosen: tuple[str, int, tuple[str, ...]], delivery: Delivery, passes: int) -> None:
    owners = (Slice(0, 0, 20),) if delivery is Delivery.OWNERS else ()
    layout = Layout((Segment("a", 0, 12), Segment("b", 12, 20)), even_bounds(20, N), delivery, owners)
    rows = random_rows(N, 20, torch.bfloat16)
    pieces = 2  # in the third chunk, [10, 15)
    record = (N + (N + 1) * (N + 2) // 2) * 8 if chosen is POINT else N
    for rank, result in enumerate(run([rows, rows], [layout] * 2, *chosen)):
        delivered = {Delivery.OWNERS: 5 * (rank != 0), Delivery.EVERYONE: 15, Delivery.AGGREGATOR: 0}[delivery]
        per_bucket = (15 + delivered) * 2 + (N - 1) * pieces * record
        assert result.event.bytes == 2 * per_bucket + BOOKS
        assert result.event.stock_bytes == 2 * passes * 20 * 2 * (N - 1) // N


def test_the_books_start_anew_after_a_step() -> None:
    rows_ND = random_rows(N, 20)
    rows_ND[2, 3] = math.nan

    def job(transport: LocalTransport) -> list[StepEvent]:
        path = ShardAggregator(Peers.plain(transport), Aggregator.create("centered_clip", 1))
        events = []
        for _ in range(2):
            path.submit(Bucket(rows_ND[transport.rank].clone(), simple(20)), lambda flat: None)
            events.append(path.end_step())
        return [*events, path.end_step()]

    for first, second, empty in LocalWorld(N, timeout=20).run(job):
        assert first.nonfinite == second.nonfinite == [0, 0, 1, 0]
        assert first.distances == second.distances
        assert first.bytes == second.bytes > 0
        assert (empty.nonfinite, empty.bytes, empty.suspect) == ([0] * N, BOOKS, None)


def test_the_tap_comes_before_the_exchange() -> None:
    """What a drill writes is what the others receive."""
    honest = torch.ones(N, 20)
    seen: list[int] = []

    def tap_of(rank: int) -> Callable[[Tensor, int, Part], object] | None:
        def tap(flat: Tensor, step: int, part: Part) -> None:
            seen.append(step)
            flat.fill_(100.0)

        return tap if rank == 2 else None

    results = run([honest], [simple(20)], "mean", 0, tap=tap_of)
    assert seen == [STEP]
    for result in results:
        assert torch.allclose(result.flats[0], torch.full((20,), 103.0 / 4))
        assert result.event.suspect == 2


def test_every_rank_knows_which_tensors_passed_through() -> None:
    """Also a rank whose chunk is empty and which, with scope "shard", judges nothing."""
    for scope in ("tensor", "shard", "model"):

        def job(transport: LocalTransport, scope: str = scope) -> set[str]:
            path = ShardAggregator(Peers.plain(transport), Aggregator.create("median", 1), scope=scope)
            path.submit(Bucket(torch.ones(2), simple(1, 1)), lambda flat: None)
            path.flush()
            return path.recorder.tensors

        assert all(seen >= {"t0", "t1"} for seen in LocalWorld(N, timeout=20).run(job))
