"""Runs of the main path in an in-process world, for the tests of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from layouts import needed, per_tensor
from torch import Tensor

from ds_byzantine.exchange.groups import Peers
from ds_byzantine.exchange.local import LocalTransport, LocalWorld
from ds_byzantine.monitor.events import StepEvent
from ds_byzantine.pipeline import ShardAggregator
from ds_byzantine.rules.aggregate import aggregate
from ds_byzantine.rules.apply import Aggregator
from ds_byzantine.types import Bucket, Delivery, Layout, Segment, even_bounds

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
        path = ShardAggregator(Peers.plain(transport), ready, step_of=lambda: STEP, tap=taps(transport.rank), **options)
        flats = [torch.empty(0) for _ in rows]
        for i, (rows_ND, one) in enumerate(zip(rows, layout, strict=True)):
            host = rows_ND[transport.rank].clone()

            def commit(flat: Tensor, i: int = i) -> None:
                flats[i] = flat.clone()

            path.submit(Bucket(host, one, scale), commit)
            host.fill_(777.0)  # the host uses its memory for something else
        path.flush()
        return Run(flats, path.end_step(), path)

    return LocalWorld(layout[0].ranks, timeout=30).run(job)


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


ALL_KINDS = [POINT, COORDINATE, ("bulyan", 0, ()), ("trimmed_mean", 1, ("nnm",)), ("median", 1, ("nnm",))]
