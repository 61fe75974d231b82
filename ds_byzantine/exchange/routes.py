"""Who sends what to whom for one bucket layout: pure index arithmetic, computed once per layout and rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ds_byzantine.types import Delivery, Layout, Piece


class Span(NamedTuple):
    """A run of elements."""

    start: int
    stop: int


@dataclass(frozen=True)
class Routes:
    """The exchange of one bucket, seen by one rank.

    Args:
        tensors: names, in order of first appearance; `Piece.tensor` counts in it.
        pieces: for each rank's chunk, its pieces by ascending `start`.
        sizes: elements of each rank's chunk.
        send: for each other rank, the spans of the bucket that this rank aggregates and that one owns; empty unless
            delivered to owners.
        receive: for each other rank, the spans that it aggregates and this rank owns.
    """

    tensors: tuple[str, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    sizes: tuple[int, ...]
    send: tuple[tuple[Span, ...], ...]
    receive: tuple[tuple[Span, ...], ...]


@lru_cache(maxsize=4096)
def routes(layout: Layout, rank: int) -> Routes:
    """The routes of `layout` for `rank`."""
    n, bounds = layout.ranks, layout.bounds
    number: dict[str, int] = {}
    for segment in layout.segments:
        number.setdefault(segment.tensor, len(number))
    chunks = [Span(bounds[k], bounds[k + 1]) for k in range(n)]
    pieces = tuple(tuple(_pieces(layout, number, chunk)) for chunk in chunks)
    send: list[tuple[Span, ...]] = [()] * n
    receive: list[tuple[Span, ...]] = [()] * n
    if layout.delivery is Delivery.OWNERS:
        send = [_owned(layout, other, chunks[rank]) if other != rank else () for other in range(n)]
        receive = [_owned(layout, rank, chunks[other]) if other != rank else () for other in range(n)]
    sizes = tuple(c.stop - c.start for c in chunks)
    return Routes(tuple(number), pieces, sizes, tuple(send), tuple(receive))


def _pieces(layout: Layout, number: dict[str, int], chunk: Span) -> list[Piece]:
    out = []
    for segment in layout.segments:
        start, stop = max(segment.start, chunk.start), min(segment.stop, chunk.stop)
        if start < stop:
            out.append(Piece(number[segment.tensor], start - chunk.start, stop - chunk.start))
    return out


def _owned(layout: Layout, owner: int, chunk: Span) -> tuple[Span, ...]:
    out = []
    for piece in layout.owners:
        start, stop = max(piece.start, chunk.start), min(piece.stop, chunk.stop)
        if piece.owner == owner and start < stop:
            out.append(Span(start, stop))
    return tuple(joined(out))


def joined(spans: list[Span]) -> list[Span]:
    """Neighbours that touch, as one span: fewer copies."""
    out: list[Span] = []
    for span in spans:
        if out and out[-1].stop == span.start:
            out[-1] = Span(out[-1].start, span.stop)
        else:
            out.append(span)
    return out
