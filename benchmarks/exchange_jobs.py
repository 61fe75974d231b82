"""What each rank does for `exchange.py`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DELIVERIES = {"everyone": "0", "owners": "1, 2", "aggregator": "3"}
RULES = ("mean", "centered_clip", "median", "trimmed_mean", "nnm+trimmed_mean", "caf_gated")
TENSORS = 16


def exchange(job: dict[str, Any]) -> dict[str, Any]:
    """Times of all ways in turn, in seconds, [repetitions] each; bytes sent over stock's; floors in seconds."""
    from ds_byzantine.exchange.transport import TorchTransport
    from ds_byzantine.rules import native
    from ds_byzantine.types import Delivery

    numel, n = job["numel"], dist.get_world_size()
    own = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
    flat = torch.empty_like(own)
    times: dict[str, dict[str, list[float]]] = {}
    sent: dict[str, dict[str, float]] = {}
    floors = {}
    for name in DELIVERIES:
        delivery = Delivery(name)
        layout = _layout(numel, n, delivery)
        ways: dict[str, Callable[[], None]] = {"stock": _stock(flat, n, delivery)}
        transports = {}
        for rule in RULES:
            transports[rule] = TorchTransport()
            ways[rule] = _ours(flat, layout, rule, transports[rule])
        times[name] = {way: [] for way in ways}
        for repetition in range(job["repetitions"] + 2):
            if repetition == 2:
                native.settle()  # networks that are being compiled in the background
            for way, call in ways.items():
                seconds = _timed(flat, own, call)
                if repetition >= 2:
                    times[name][way].append(seconds)
        stock_bytes = _stock_bytes(flat, n, delivery)
        calls = job["repetitions"] + 2
        sent[name] = {rule: t.bytes_sent / calls / stock_bytes for rule, t in transports.items()}
        floors[name] = _copy(int(transports["mean"].bytes_sent / calls))
    return {"times": times, "bytes": sent, "floors": floors}


def _timed(flat: Tensor, own: Tensor, call: Callable[[], None]) -> float:
    flat.copy_(own)
    dist.barrier()
    began = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - began


def _layout(numel: int, n: int, delivery: Any) -> Any:
    from ds_byzantine.types import Delivery, Layout, Segment, Slice, even_bounds

    cuts = even_bounds(numel, TENSORS)
    segments = tuple(Segment(f"t{i}", a, b) for i, (a, b) in enumerate(pairwise(cuts)) if b > a)
    owners = (Slice(n - 1, 0, numel),) if delivery is Delivery.OWNERS else ()
    return Layout(segments, even_bounds(numel, n), delivery, owners)


def _ours(flat: Tensor, layout: Any, rule: str, transport: Any) -> Callable[[], None]:
    from ds_byzantine.exchange.groups import Peers
    from ds_byzantine.pipeline import ShardAggregator
    from ds_byzantine.rules.apply import Aggregator
    from ds_byzantine.types import Bucket

    *pre, last = rule.split("+")
    ready = Aggregator.create(last, 0 if last == "mean" else 1, pre)
    aggregator = ShardAggregator(Peers.plain(transport), ready)
    return lambda: aggregator.submit(Bucket(flat, layout), lambda _: None)


def _stock(flat: Tensor, n: int, delivery: Any) -> Callable[[], None]:
    from ds_byzantine.types import Delivery

    if delivery is Delivery.AGGREGATOR:
        part = torch.empty(flat.numel() // n)
        even = flat[: part.numel() * n]

        def scatter() -> None:
            dist.reduce_scatter_tensor(part, even)
            part.div_(n)

        return scatter

    def everybody() -> None:
        dist.all_reduce(flat)
        flat.div_(n)

    return everybody


def _stock_bytes(flat: Tensor, n: int, delivery: Any) -> float:
    from ds_byzantine.types import Delivery

    passes = 1 if delivery is Delivery.AGGREGATOR else 2
    return passes * flat.numel() * flat.element_size() * (n - 1) / n


def _copy(nbytes: int) -> float:
    """Seconds of a copy of so many bytes in memory."""
    source = torch.zeros(max(1, nbytes // 4))
    target = torch.empty_like(source)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
