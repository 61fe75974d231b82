"""The few collectives that everything is built from, and their byte count.

Only tensors travel, never pickled objects: an object collective would run the sender's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the collective and warns at the old name.
_all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Below, an all-gather between CPUs is one all-to-all of n copies: gloo's ring takes n-1 turns, in each of which every
# rank waits for its neighbour. With 4 ranks on 2 cores that is 5 ms against 2.5.
SMALL = 1 << 16  # bytes


class Transport(Protocol):
    """n replicas that can talk. `bytes_sent` counts what this rank puts on the wire (its own share excluded)."""

    rank: int
    size: int
    bytes_sent: int

    def all_to_all(self, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        """Send `inp` cut by `in_splits` (part k to rank k); receive into `out` cut by `out_splits`. 1-D, same dtype."""

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        """Concatenate everybody's `inp` [m] into `out` [n m], in rank order."""

    def send_receive(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Messages between pairs of ranks, all at once.

        Args:
            sends: (rank, contiguous tensor); at most one for each other rank.
            receives: (rank, contiguous tensor to overwrite), of the size that this rank sends.
        """

    def spread(self, flat: Tensor, bounds: Sequence[int]) -> None:
        """Give everybody rank k's part `[bounds[k], bounds[k + 1])` of `flat`, in place."""

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor`, contiguous, with that of rank 0."""


def others(flat: Tensor, bounds: Sequence[int], rank: int) -> list[tuple[int, Tensor]]:
    """The parts of `flat` that belong to other ranks, by rank, as views; those of no elements left out."""
    parts = enumerate(flat[start:stop] for start, stop in pairwise(bounds))
    return [(k, part) for k, part in parts if k != rank and part.numel() > 0]


class TorchTransport:
    """`Transport` over a torch.distributed process group.

    Args:
        group: the ranks that hold the n replicas; None is the world. The order of its ranks is the order of replicas.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.bytes_sent = 0

    def all_to_all(self, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        """See `Transport.all_to_all`."""
        dist.all_to_all_single(out, inp, list(out_splits), list(in_splits), group=self.group)
        self.bytes_sent += (sum(in_splits) - in_splits[self.rank]) * inp.element_size()

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        """See `Transport.all_gather`."""
        nbytes = inp.numel() * inp.element_size()
        if inp.device.type == "cpu" and nbytes <= SMALL:
            dist.all_to_all_single(out, inp.repeat(self.size), group=self.group)
        else:
            _all_gather_flat(out, inp, group=self.group)
        self.bytes_sent += (self.size - 1) * nbytes

    def send_receive(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """See `Transport.send_receive`."""
        ways = ((dist.irecv, receives), (dist.isend, sends))
        calls = [
            dist.P2POp(call, tensor, self._global(rank), self.group)
            for call, messages in ways
            for rank, tensor in messages
        ]
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        self.bytes_sent += sum(tensor.numel() * tensor.element_size() for _, tensor in sends)

    def spread(self, flat: Tensor, bounds: Sequence[int]) -> None:
        """See `Transport.spread`. Between CPUs each part goes straight to its place; gloo's ring passes a copy on."""
        own = flat[bounds[self.rank] : bounds[self.rank + 1]]
        if flat.device.type == "cpu":
            sends = [(k, own) for k in range(self.size) if k != self.rank and own.numel() > 0]
            self.send_receive(sends, others(flat, bounds, self.rank))
            return
        width = max(stop - start for start, stop in pairwise(bounds))
        if flat.numel() == width * self.size:
            _all_gather_flat(flat, own, group=self.group)
        else:
            padded, everybody = flat.new_zeros(width), flat.new_empty(width * self.size)
            padded[: own.numel()] = own
            _all_gather_flat(everybody, padded, group=self.group)
            for k, part in others(flat, bounds, self.rank):
                part.copy_(everybody[k * width : k * width + part.numel()])
        self.bytes_sent += (self.size - 1) * width * flat.element_size()

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def broadcast(self, tensor: Tensor) -> None:
        """See `Transport.broadcast`."""
        dist.broadcast(tensor, group=self.group, group_src=0)
        if self.rank == 0:
            self.bytes_sent += (self.size - 1) * tensor.numel() * tensor.element_size()
