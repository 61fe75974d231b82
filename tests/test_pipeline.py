"""The main path in one process: against `aggregate()` on the rows of each tensor, whatever the layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layouts, names_of, needed, per_tensor, shares_of, tensor_index
from pipeline_runs import (
    ALL_KINDS,
    COORDINATE,
    POINT,
    N,
    assert_near,
    check_against_definition,
    random_rows,
    rules,
    run,
    simple,
)
from torch import Tensor

from ds_byzantine.exchange.groups import Peers
from ds_byzantine.exchange.local import LocalTransport, LocalWorld
from ds_byzantine.pipeline import ShardAggregator
from ds_byzantine.rules.aggregate import aggregate
from ds_byzantine.rules.apply import Aggregator
from ds_byzantine.types import Bucket, Delivery, Layout

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
        path = ShardAggregator(Peers.plain(transport), Aggregator.create("median", 1))
        path.submit(Bucket(memory[2:13], layout), lambda flat: None)
        return memory

    for memory in LocalWorld(N, timeout=20).run(job):
        assert torch.equal(memory[[0, 1, 13, 14]], torch.full((4,), 9.0))
        assert torch.equal(memory[2:13], aggregate(random_rows(N, 11), rule="median", f=1))


def test_an_empty_bucket_is_left_alone() -> None:
    layout = Layout((), (0,) * (N + 1), Delivery.EVERYONE)
    [result, *_] = run([torch.empty(N, 0)], [layout], *POINT)
    assert result.event.bytes == (N - 1) * (3 * N + 1) * 8  # the books of the step


# -- rows that are not finite -----------------------------------------------------------------------------------------

BAD = [math.nan, math.inf, -math.inf]


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
