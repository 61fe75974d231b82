"""An in-process twin of the real transport: n threads in place of n processes. For tests and simulations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ds_byzantine.exchange.transport import others

Result = TypeVar("Result")


class LocalWorld:
    """n replicas inside one process, each in a thread of its own.

    Example:
        >>> def sum_of_ranks(transport):
        ...     out = torch.empty(3)
        ...     transport.all_gather(out, torch.tensor([float(transport.rank)]))
        ...     return out.sum().item()
        >>> LocalWorld(3).run(sum_of_ranks)
        [3.0, 3.0, 3.0]
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout)
        self._posted: list[list[Tensor]] = [[] for _ in range(size)]

    def run(self, job: Callable[[LocalTransport], Result]) -> list[Result]:
        """Run `job` on every rank at once; the results in rank order.

        Raises:
            The first exception of any rank; RuntimeError if some ranks take part in fewer collectives than others.
        """
        results: list[Result | None] = [None] * self.size
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            """What the thread of one rank does."""
            try:
                results[rank] = job(LocalTransport(self, rank))
            except threading.BrokenBarrierError:
                pass  # another rank failed; its exception is the one to raise
            except BaseException as error:  # raised again below, in the caller's thread
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if self._barrier.broken:
            raise RuntimeError("the ranks did not take part in the same collectives: some waited until the timeout.")
        return results  # type: ignore[return-value]

    def swap(self, rank: int, parts: list[Tensor]) -> list[Tensor]:
        """Post one part per rank, wait for everybody, and return the parts posted for `rank`, by sender."""
        self._posted[rank] = parts
        self._barrier.wait()
        received = [self._posted[sender][rank].clone() for sender in range(self.size)]
        self._barrier.wait()
        return received


class LocalTransport:
    """`Transport` of one thread of a `LocalWorld`."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size
        self.bytes_sent = 0

    def all_to_all(self, out: Tensor, inp: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
        """See `Transport.all_to_all`."""
        received = self._world.swap(self.rank, list(torch.split(inp, list(in_splits))))
        if [part.numel() for part in received] != list(out_splits):
            raise ValueError(f"rank {self.rank} expected {list(out_splits)}, got {[p.numel() for p in received]}")
        torch.cat(received, out=out)
        self.bytes_sent += (sum(in_splits) - in_splits[self.rank]) * inp.element_size()

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        """See `Transport.all_gather`."""
        torch.cat(self._world.swap(self.rank, [inp] * self.size), out=out)
        self.bytes_sent += (self.size - 1) * inp.numel() * inp.element_size()

    def send_receive(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """See `Transport.send_receive`."""
        posted = dict(sends)
        nothing = torch.empty(0)
        received = self._world.swap(self.rank, [posted.get(k, nothing) for k in range(self.size)])
        expected = dict(receives)
        for k, part in enumerate(received):
            if part.numel() != (expected[k].numel() if k in expected else 0):
                raise ValueError(f"rank {self.rank} got {part.numel()} elements from rank {k}, which it did not expect")
            if k in expected:
                expected[k].copy_(part)
        self.bytes_sent += sum(tensor.numel() * tensor.element_size() for _, tensor in sends)

    def spread(self, flat: Tensor, bounds: Sequence[int]) -> None:
        """See `Transport.spread`."""
        own = flat[bounds[self.rank] : bounds[self.rank + 1]]
        sends = [(k, own) for k in range(self.size) if k != self.rank and own.numel() > 0]
        self.send_receive(sends, others(flat, bounds, self.rank))

    def broadcast(self, tensor: Tensor) -> None:
        """See `Transport.broadcast`."""
        tensor.copy_(self._world.swap(self.rank, [tensor] * self.size)[0])
        if self.rank == 0:
            self.bytes_sent += (self.size - 1) * tensor.numel() * tensor.element_size()
