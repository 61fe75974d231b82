"""The two collectives that everything is built from, and their byte count.

Only tensors travel, never pickled objects: an object collective would run the sender's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the collective and warns at the old name.
_all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Transport(Protocol):
    """n replicas that can talk. `bytes_sent` counts what this rank puts on the wire (its own share excluded)."""

    rank: int
    size: int
    bytes_sent: int

    def all_to_all(self, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        """Send `inp` cut by `in_splits` (part k to rank k); receive into `out` cut by `out_splits`. 1-D, same dtype."""

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        """Concatenate everybody's `inp` [m] into `out` [n m], in rank order."""

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor`, contiguous, with that of rank 0."""


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
        _all_gather_flat(out, inp, group=self.group)
        self.bytes_sent += (self.size - 1) * inp.numel() * inp.element_size()

    def broadcast(self, tensor: Tensor) -> None:
        """See `Transport.broadcast`."""
        dist.broadcast(tensor, group=self.group, group_src=0)
        if self.rank == 0:
            self.bytes_sent += (self.size - 1) * tensor.numel() * tensor.element_size()
