"""Random bucket layouts, and what each rank has to hold after a bucket was delivered."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from ds_byzantine.types import Delivery, Layout, Segment, Slice, even_bounds

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _cuts(draw: st.DrawFn, numel: int, parts: int) -> list[int]:
    """`parts` + 1 ascending offsets from 0 to numel; parts may be empty."""
    inner = draw(st.lists(st.integers(0, numel), min_size=parts - 1, max_size=parts - 1))
    return [0, *sorted(inner), numel]


@st.composite
def layouts(draw: st.DrawFn, n: int, deliveries: tuple[Delivery, ...] = tuple(Delivery), largest: int = 40) -> Layout:
    """Tensors, chunks and owners cut anywhere; now and then equal chunks, or ZeRO 3's share of each tensor per rank."""
    style = draw(st.sampled_from(["any", "even", "shares"]))
    delivery = draw(st.sampled_from(deliveries))
    if style == "shares":
        sizes = draw(st.lists(st.integers(1, largest // 3), min_size=1, max_size=3))
        segments, bounds = shares_of(sizes, n)
    else:
        numel = draw(st.integers(1, largest))
        edges = sorted(set(_cuts(draw, numel, draw(st.integers(1, 4)))))
        spans = list(pairwise(edges))
        names = [f"t{draw(st.integers(0, len(spans)))}" for _ in spans]  # a tensor may come in several segments
        segments = tuple(Segment(name, a, b) for name, (a, b) in zip(names, spans, strict=True))
        bounds = even_bounds(numel, n) if style == "even" else tuple(_cuts(draw, numel, n))
    owners: tuple[Slice, ...] = ()
    if delivery is Delivery.OWNERS:
        edges = _cuts(draw, bounds[-1], draw(st.integers(1, 5)))
        who = st.integers(-1, n - 1)  # -1: nobody's
        found = [(draw(who), a, b) for a, b in pairwise(edges) if a < b]
        owners = tuple(Slice(*piece) for piece in found if piece[0] >= 0)
    return Layout(segments, bounds, delivery, owners)


def shares_of(sizes: list[int], n: int) -> tuple[tuple[Segment, ...], tuple[int, ...]]:
    """Segments and bounds of a bucket in which rank k's chunk is its share of every tensor, as in ZeRO 3."""
    segments, bounds, start = [], [0], 0
    for k in range(n):
        for t, size in enumerate(sizes):
            width = -(-size // n)
            share = max(0, min(width, size - k * width))
            if share:
                segments.append(Segment(f"t{t}", start, start + share))
                start += share
        bounds.append(start)
    return tuple(segments), tuple(bounds)


def needed(layout: Layout, rank: int) -> Tensor:
    """The elements that `rank` needs, bool [numel]."""
    out = torch.zeros(layout.numel, dtype=torch.bool)
    if layout.delivery is Delivery.EVERYONE:
        out[:] = True
    elif layout.delivery is Delivery.AGGREGATOR:
        out[layout.bounds[rank] : layout.bounds[rank + 1]] = True
    for piece in layout.owners:
        if piece.owner == rank:
            out[piece.start : piece.stop] = True
    return out


def tensor_index(layout: Layout, name: str) -> Tensor:
    """Where the elements of a tensor lie in the bucket, in the order of its segments."""
    return torch.cat([torch.arange(s.start, s.stop) for s in layout.segments if s.tensor == name])


def names_of(layout: Layout) -> list[str]:
    """The tensors of a layout, by first appearance."""
    return list(dict.fromkeys(segment.tensor for segment in layout.segments))


def per_tensor(rows_ND: Tensor, layout: Layout, rule: Callable[[Tensor], Tensor]) -> Tensor:
    """The rule on each tensor by itself, [n, numel] -> [numel]: the definition of scope "tensor"."""
    out = torch.empty_like(rows_ND[0])
    for name in names_of(layout):
        index = tensor_index(layout, name)
        out[index] = rule(rows_ND[:, index])
    return out
