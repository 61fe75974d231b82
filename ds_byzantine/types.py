"""The few records that travel along the main path. Arithmetic and plain data only: no torch.distributed, no config.

Words: a *bucket* is a 1-D run of gradients that the host reduces in one call; a *segment* is the part of a bucket that
belongs to one parameter tensor; a *chunk* is the part of a bucket that one rank aggregates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch


class Segment(NamedTuple):
    """Elements `[start, stop)` of a bucket, which belong to the tensor called `tensor`. One tensor may have several."""

    tensor: str
    start: int
    stop: int


class Slice(NamedTuple):
    """Elements `[start, stop)` of a bucket, whose optimizer state is held by group rank `owner`."""

    owner: int
    start: int
    stop: int


class Piece(NamedTuple):
    """Elements `[start, stop)` of a chunk (not of the bucket), which belong to tensor number `tensor` of the bucket."""

    tensor: int
    start: int
    stop: int


class Delivery(Enum):
    """Who needs the aggregated bucket."""

    OWNERS = "owners"  # each slice goes to one rank (ZeRO 1, 2)
    EVERYONE = "everyone"  # the whole bucket on all ranks (ZeRO 0, BF16_Optimizer)
    AGGREGATOR = "aggregator"  # the rank that aggregated a chunk keeps it (ZeRO 3)


@dataclass(frozen=True)
class Layout:
    """Where everything in a bucket lies. Hashable: plans are cached by it, and it is the same on every rank.

    Args:
        segments: the tensors of the bucket, by ascending `start`, covering it without gaps.
        bounds: n + 1 ascending offsets; rank k aggregates `[bounds[k], bounds[k + 1])`.
        delivery: who needs the result.
        owners: for `Delivery.OWNERS`, the slices by ascending `start`; elements in no slice are nobody's.
    """

    segments: tuple[Segment, ...]
    bounds: tuple[int, ...]
    delivery: Delivery
    owners: tuple[Slice, ...] = ()

    @property
    def numel(self) -> int:
        """Elements in the bucket."""
        return self.bounds[-1]

    @property
    def ranks(self) -> int:
        """Ranks that take part."""
        return len(self.bounds) - 1

    def chunk_of(self, flat: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of a bucket that `rank` aggregates, a view."""
        return flat[self.bounds[rank] : self.bounds[rank + 1]]


@dataclass
class Bucket:
    """One reduction of the host.

    Args:
        flat: this rank's own gradients, [numel], floating, contiguous. The aggregate replaces it in place: all of it
            (EVERYONE), the slices this rank owns (OWNERS) or this rank's chunk (AGGREGATOR). The rest is undefined.
        layout: where everything lies.
        scale: factor on the aggregate, so that it has the scale that the host's own reduction would have given.
        kind: which of the rank's reductions this is (dense, or that of some experts).
        shared_as: for a bucket that other ranks of the replica hold as well, in buckets of other composition: a name
            that gives the order in which they all come to it. It is resolved after all others, by `flush`.
    """

    flat: torch.Tensor
    layout: Layout
    scale: float = 1.0
    kind: int = 0
    shared_as: str | None = None

    @property
    def stock_bytes(self) -> int:
        """Bytes that a rank sends in the host's own reduction: ring all-reduce, or reduce-scatter in ZeRO 3."""
        n, nbytes = self.layout.ranks, self.flat.numel() * self.flat.element_size()
        passes = 1 if self.layout.delivery is Delivery.AGGREGATOR else 2
        return passes * nbytes * (n - 1) // n


def even_bounds(numel: int, n: int) -> tuple[int, ...]:
    """Offsets of n equal chunks of a run of `numel` elements; the last chunks may be short or empty.

    Example:
        >>> even_bounds(10, 4)
        (0, 3, 6, 9, 10)
    """
    size = -(-numel // n)
    return tuple(min(k * size, numel) for k in range(n + 1))
