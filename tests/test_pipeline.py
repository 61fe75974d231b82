"""The main path in one process: against `aggregate()` on the rows of each tensor, whatever the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layouts, names_of, needed, per_tensor, shares_of, tensor_index
from torch import Tensor

from ds_byzantine.exchange.local import LocalTransport, LocalWorld
from ds_byzantine.monitor.events import StepEvent
from ds_byzantine.pipeline import ShardAggregator
from ds_byzantine.rules.aggregate import aggregate
from ds_byzantine.rules.apply import Aggregator
from ds_byzantine.types import Bucket, Delivery, Layout, Segment, Slice, even_bounds

N = 4
STEP = 5

# (rule, f, pre): one of each kind and of each way through `Aggregator`.
RULES: list[tuple[str, int, tuple[str, ...]]] = [
    ("mean", 0, ()),
    ("median", 1, ()),
    ("trimmed_mean", 1, ()),
    ("sign_majority", 1, ()),
    ("centered_clip", 1, ()),
    ("geometric_median", 1, ()),
    ("mda", 1, ()),
    ("caf_gated", 1, ()),
    ("cge", 1, ()),
    ("bulyan", 0, ()),
    ("trimmed_mean", 1, ("nnm",)),
    ("centered_clip", 1, ("arc", "nnm")),
    ("median", 0, ("bucketing",)),
]
rules = pytest.mark.parametrize(("rule", "f", "pre"), RULES, ids=lambda v: str(v) if v else "-")
POINT = ("centered_clip", 1, ())
COORDINATE = ("median", 1, ())


def random_rows(n: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Rows like gradients, the last one an outlier."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(numel, generator=generator) + 0.5 * torch.randn(n, numel, generator=generator)
    rows[-1] *= -20.0
    return rows.to(dtype)


@dataclass
class Run:
    """What one rank has after some buckets: the buckets, the event, and its aggregator."""

    flats: list[Tensor]
    event: StepEvent
    path: ShardAggregator


def run(
    rows: Sequence[Tensor], layout: Sequence[Layout], rule: str, f: int, pre: Sequence[Any] = (), **options: Any
) -> list[Run]:
    """Reduce buckets of the given rows on all ranks; end the step."""
    scale = options.pop("scale", 1.0)
    taps = options.pop("tap", lambda rank: None)

    def job(transport: LocalTransport) -> Run:
        ready = Aggregator.create(rule, f, pre)
        path = ShardAggregator(transport, ready, step_of=lambda: STEP, tap=taps(transport.rank), **options)
        flats = [torch.empty(0) for _ in rows]
        for i, (rows_ND, one) in enumerate(zip(rows, layout, strict=True)):
            host = rows_ND[transport.rank].clone()

            def commit(flat: Tensor, i: int = i) -> None:
                flats[i] = flat.clone()

            path.submit(Bucket(host, one, scale), commit)
            host.fill_(777.0)  # the host uses its memory for something else
        path.flush()
        return Run(flats, path.end_step(), path)

    return LocalWorld(layout[0].replicas, timeout=30).run(job)


def simple(*sizes: int, n: int = N, delivery: Delivery = Delivery.EVERYONE) -> Layout:
    """Tensors "t0", "t1", ... one after the other, in equal chunks."""
    segments, start = [], 0
    for t, size in enumerate(sizes):
        segments.append(Segment(f"t{t}", start, start + size))
        start += size
    return Layout(tuple(segments), even_bounds(start, n), delivery)


def assert_near(got: Tensor, want: Tensor, size: float) -> None:
    """Equal up to a few roundings of numbers of this size in the dtype."""
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=1e-5, atol=8 * torch.finfo(got.dtype).eps * size, equal_nan=True)


def check_against_definition(layout: Layout, rows_ND: Tensor, rule: str, f: int, pre: Sequence[str]) -> list[Run]:
    want = per_tensor(rows_ND, layout, lambda part: aggregate(part, rule=rule, f=f, pre=pre, seed=STEP))
    results = run([rows_ND], [layout], rule, f, pre)
    seen: dict[int, float] = {}
    for rank, result in enumerate(results):
        mask = needed(layout, rank)
        assert_near(result.flats[0][mask], want[mask], float(rows_ND.float().abs().nan_to_num(0, 0).max()))
        for at in mask.nonzero()[:, 0].tolist():  # ranks that share data hold the same bits
            value = float(result.flats[0][at])
            assert seen.setdefault(at, value) == value or math.isnan(value)
    events = [result.event for result in results]
    for event in events[1:]:
        assert (event.distances, event.kept, event.unsafe) == (events[0].distances, events[0].kept, events[0].unsafe)
    return results


# -- result -----------------------------------------------------------------------------------------------------------


@rules
@settings(max_examples=12, deadline=None)
@given(layout=layouts(N), seed=st.integers(0, 2**16))
def test_result_is_the_rule_on_each_tensor(rule: str, f: int, pre: tuple[str, ...], layout: Layout, seed: int) -> None:
    check_against_definition(layout, random_rows(N, layout.numel, seed=seed), rule, f, pre)


@pytest.mark.parametrize(("rule", "f", "n"), [("bulyan", 1, 7), ("krum", 1, 5), ("multi_krum", 1, 5), ("smea", 2, 5)])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_rules_that_need_more_replicas(rule: str, f: int, n: int, data: st.DataObject) -> None:
    layout = data.draw(layouts(n))
    check_against_definition(layout, random_rows(n, layout.numel, seed=3), rule, f, ())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("rule", "f", "pre"), [POINT, COORDINATE, ("trimmed_mean", 1, ("nnm",))])
@settings(max_examples=8, deadline=None)
@given(layout=layouts(N))
def test_other_dtypes(rule: str, f: int, pre: tuple[str, ...], dtype: torch.dtype, layout: Layout) -> None:
    check_against_definition(layout, random_rows(N, layout.numel, dtype), rule, f, pre)


@pytest.mark.parametrize("delivery", [Delivery.EVERYONE, Delivery.AGGREGATOR])
@pytest.mark.parametrize(("rule", "f", "pre"), [POINT, COORDINATE])
def test_one_element(rule: str, f: int, pre: tuple[str, ...], delivery: Delivery) -> None:
    check_against_definition(simple(1, delivery=delivery), random_rows(N, 1), rule, f, pre)


@pytest.mark.parametrize(("rule", "f", "pre"), [("centered_clip", 0, ()), ("median", 0, ()), ("mean", 0, ("nnm",))])
def test_a_single_replica_keeps_its_gradient(rule: str, f: int, pre: tuple[str, ...]) -> None:
    rows_ND = random_rows(1, 6)
    [result] = run([rows_ND], [simple(4, 2, n=1)], rule, f, pre)
    assert torch.equal(result.flats[0], rows_ND[0])
    assert result.event.bytes == 0
    assert result.event.distances == [0.0]


@rules
def test_the_same_on_every_layout(rule: str, f: int, pre: tuple[str, ...]) -> None:
    """ZeRO 0, 1, 2 and 3 cut the same two tensors differently."""
    sizes = [13, 6]
    rows_ND = random_rows(N, sum(sizes))
    whole = simple(*sizes)
    segments, bounds = shares_of(sizes, N)
    shares = Layout(segments, bounds, Delivery.AGGREGATOR)
    packed = torch.cat([tensor_index(shares, f"t{t}") for t in range(2)])  # position in the shares of each element
    rows_in_shares = torch.empty_like(rows_ND)
    rows_in_shares[:, packed] = rows_ND
    want = run([rows_ND], [whole], rule, f, pre)[0].flats[0]
    for rank, result in enumerate(run([rows_in_shares], [shares], rule, f, pre)):
        mask = needed(shares, rank)
        unpacked, known = result.flats[0][packed], mask[packed]
        assert_near(unpacked[known], want[known], 20.0)
    one_by_one = run([rows_ND[:, :13], rows_ND[:, 13:]], [simple(13), simple(6)], rule, f, pre)[0].flats
    assert_near(torch.cat(one_by_one), want, 20.0)


def test_scale() -> None:
    rows_ND, layout = random_rows(N, 9), simple(5, 4)
    plain = run([rows_ND], [layout], *POINT)[0]
    fourfold = run([rows_ND], [layout], *POINT, scale=4.0)[0]
    assert torch.equal(fourfold.flats[0], 4.0 * plain.flats[0])
    assert fourfold.event.distances == plain.event.distances  # of the rows to the aggregate itself
    coordinate = [run([rows_ND], [layout], *COORDINATE, scale=s)[0].event.distances for s in (1.0, 0.25)]
    assert coordinate[0] == coordinate[1]


def test_two_dtypes_in_turn() -> None:
    layout = simple(7, 4)
    single, half = random_rows(N, 11), random_rows(N, 11, torch.bfloat16, seed=1)
    for result in run([single, half, single], [layout] * 3, *POINT):
        for flat, rows_ND in zip(result.flats, (single, half, single), strict=True):
            want = per_tensor(rows_ND, layout, lambda part: aggregate(part, rule="centered_clip", f=1))
            assert_near(flat, want, 20.0)


def test_the_host_memory_is_not_written_beyond_the_bucket() -> None:
    layout = simple(6, 5)

    def job(transport: LocalTransport) -> Tensor:
        memory = torch.full((15,), 9.0)
        memory[2:13] = random_rows(N, 11)[transport.rank]
        path = ShardAggregator(transport, Aggregator.create("median", 1))
        path.submit(Bucket(memory[2:13], layout), lambda flat: None)
        return memory

    for memory in LocalWorld(N, timeout=20).run(job):
        assert torch.equal(memory[[0, 1, 13, 14]], torch.full((4,), 9.0))
        assert torch.equal(memory[2:13], aggregate(random_rows(N, 11), rule="median", f=1))


def test_an_empty_bucket_is_left_alone() -> None:
    layout = Layout((), (0,) * (N + 1), Delivery.EVERYONE)
    [result, *_] = run([torch.empty(N, 0)], [layout], *POINT)
    assert result.event.bytes == 0


# -- rows that are not finite -----------------------------------------------------------------------------------------

BAD = [math.nan, math.inf, -math.inf]
ALL_KINDS = [POINT, COORDINATE, ("bulyan", 0, ()), ("trimmed_mean", 1, ("nnm",)), ("median", 1, ("nnm",))]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("at", [0, 11, 12, 19])
@pytest.mark.parametrize(("rule", "f", "pre"), [POINT, COORDINATE, ("trimmed_mean", 1, ("nnm",))])
def test_one_bad_element_removes_the_row_from_the_whole_tensor(
    rule: str, f: int, pre: tuple[str, ...], at: int, bad: float
) -> None:
    """Chunks are [0, 5), [5, 10), ...: `at` lies in one of the three that share t0."""
    layout = simple(12, 8)
    rows_ND = random_rows(N, 20)
    rows_ND[1, at] = bad
    results = check_against_definition(layout, rows_ND, rule, f, pre)
    spoiled = "t0" if at < 12 else "t1"
    index = tensor_index(layout, spoiled)
    without = rows_ND[[0, 2, 3]][:, index]
    for result in results:
        assert_near(result.flats[0][index], aggregate(without, rule=rule, f=f - 1, pre=pre), 20.0)
        assert (result.event.dropped, result.event.kept) == ([1], [0, 2, 3])
        assert result.event.nonfinite == [0, 1, 0, 0]
        assert result.event.suspect == 1
        assert result.event.unsafe == {}
        assert result.event.distances[1] is None


@pytest.mark.parametrize(("rule", "f", "pre"), ALL_KINDS)
def test_more_bad_rows_than_f_make_that_tensor_nan(rule: str, f: int, pre: tuple[str, ...]) -> None:
    layout = simple(12, 8)
    rows_ND = random_rows(N, 20)
    for replica in range(f + 1):
        rows_ND[replica, 5 * replica] = math.nan  # each in another chunk of t0
    for result in check_against_definition(layout, rows_ND, rule, f, pre):
        assert result.flats[0][:12].isnan().all()
        assert result.flats[0][12:].isfinite().all()
        assert result.event.unsafe == {"t0": list(range(f + 1))}
        assert result.event.dropped == list(range(f + 1))


@pytest.mark.parametrize("scope", ["tensor", "shard", "model"])
@pytest.mark.parametrize(("rule", "f", "pre"), ALL_KINDS)
def test_all_rows_nan_is_a_skipped_step_not_a_crash(rule: str, f: int, pre: tuple[str, ...], scope: str) -> None:
    rows_ND = torch.full((N, 20), math.nan)
    for result in run([rows_ND], [simple(12, 8)], rule, f, pre, scope=scope):
        assert result.flats[0].isnan().all()
        assert result.event.unsafe
        assert result.event.dropped == [0, 1, 2, 3]
        assert result.event.distances == [None] * 4


def test_all_rows_lost_in_different_chunks() -> None:
    """No row is finite everywhere, although each chunk has three that are."""
    rows_ND = random_rows(N, 20)
    rows_ND[torch.arange(4), torch.arange(4) * 5] = math.inf
    for result in check_against_definition(simple(20), rows_ND, *POINT):
        assert result.event.unsafe == {"t0": [0, 1, 2, 3]}


@settings(max_examples=25, deadline=None)
@given(
    layout=layouts(N),
    spots=st.lists(st.tuples(st.integers(0, N - 1), st.integers(0, 10**6), st.sampled_from(BAD)), max_size=4),
    chosen=st.sampled_from(ALL_KINDS),
)
def test_bad_elements_anywhere(
    layout: Layout, spots: list[tuple[int, int, float]], chosen: tuple[str, int, tuple[str, ...]]
) -> None:
    rule, f, pre = chosen
    rows_ND = random_rows(N, layout.numel)
    for replica, at, value in spots:
        rows_ND[replica, at % layout.numel] = value
    lost = {t: (~rows_ND[:, tensor_index(layout, t)].isfinite().all(1)) for t in names_of(layout)}
    for result in check_against_definition(layout, rows_ND, rule, f, pre):
        assert result.event.nonfinite == torch.stack(list(lost.values())).sum(0).tolist()
        assert result.event.unsafe == {
            t: bad.nonzero()[:, 0].tolist() for t, bad in sorted(lost.items()) if int(bad.sum()) > f
        }


@pytest.mark.parametrize("chosen", [POINT, ("trimmed_mean", 1, ("nnm",))])
def test_float64_squares_that_overflow_remove_the_row(chosen: tuple[str, int, tuple[str, ...]]) -> None:
    rows_ND = random_rows(N, 20, torch.float64)
    rows_ND[1, 13] = 1e200
    for result in check_against_definition(simple(12, 8), rows_ND, *chosen):
        assert result.event.dropped == [1]


@pytest.mark.parametrize("chosen", [POINT, COORDINATE, ("trimmed_mean", 1, ("nnm",))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_largest_finite_numbers_do_no_harm(chosen: tuple[str, int, tuple[str, ...]], dtype: torch.dtype) -> None:
    rows_ND = random_rows(N, 20, dtype)
    rows_ND[-1] = torch.finfo(dtype).max
    rows_ND[-1, ::2] *= -1
    for result in run([rows_ND], [simple(12, 8)], *chosen):
        assert result.flats[0].isfinite().all()
        assert result.flats[0].abs().max() <= 2 * rows_ND[:-1].abs().max()
        assert result.event.suspect == 3


# -- scopes -----------------------------------------------------------------------------------------------------------


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
        path = ShardAggregator(transport, Aggregator.create("centered_clip", 1), scope="model")
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
    for rank in range(layout.replicas):
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
    buckets, books = 2 * 15 * 4, (N - 1) * (2 * N + 1) * 8
    statistics = (N - 1) * (N + (N + 1) * (N + 2) // 2) * 8
    assert sent == {"tensor": buckets + statistics, "shard": buckets + books}


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
        books = 0 if chosen is POINT else (N - 1) * (2 * N + 1) * 8
        assert result.event.bytes == 2 * per_bucket + books
        assert result.event.stock_bytes == 2 * passes * 20 * 2 * (N - 1) // N


def test_the_books_start_anew_after_a_step() -> None:
    rows_ND = random_rows(N, 20)
    rows_ND[2, 3] = math.nan

    def job(transport: LocalTransport) -> list[StepEvent]:
        path = ShardAggregator(transport, Aggregator.create("centered_clip", 1))
        events = []
        for _ in range(2):
            path.submit(Bucket(rows_ND[transport.rank].clone(), simple(20)), lambda flat: None)
            events.append(path.end_step())
        return [*events, path.end_step()]

    for first, second, empty in LocalWorld(N, timeout=20).run(job):
        assert first.nonfinite == second.nonfinite == [0, 0, 1, 0]
        assert first.distances == second.distances
        assert first.bytes == second.bytes > 0
        assert (empty.nonfinite, empty.bytes, empty.suspect) == ([0] * N, 0, None)


def test_the_tap_comes_before_the_exchange() -> None:
    """What a drill writes is what the others receive."""
    honest = torch.ones(N, 20)
    seen: list[int] = []

    def tap_of(rank: int) -> Callable[[Tensor, int], object] | None:
        def tap(flat: Tensor, step: int) -> None:
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
            path = ShardAggregator(transport, Aggregator.create("median", 1), scope=scope)
            path.submit(Bucket(torch.ones(2), simple(1, 1)), lambda flat: None)
            path.flush()
            return path.recorder.tensors

        assert all(seen >= {"t0", "t1"} for seen in LocalWorld(N, timeout=20).run(job))
