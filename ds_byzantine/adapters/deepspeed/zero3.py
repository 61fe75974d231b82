"""ZeRO stage 3: every tensor is cut evenly over the ranks, so the aggregator of a piece is its owner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_byzantine.adapters._patch import Bindings
from ds_byzantine.pipeline import ShardAggregator
from ds_byzantine.types import Bucket, Delivery, Layout, Segment

MANGLED = "_DeepSpeedZeroOptimizer_Stage3"


class Zero3:
    """The gradient path of one `DeepSpeedZeroOptimizer_Stage3`.

    Args:
        optimizer: the host's optimizer.
        aggregator: the main path.
        names: ds_id of a parameter -> name.
    """

    def __init__(self, optimizer: Any, aggregator: ShardAggregator, names: dict[int, str]) -> None:
        self.optimizer = optimizer
        self.aggregator = aggregator
        self.transport = aggregator.peers.parts[0].transport
        self.names = names
        self._layouts: dict[tuple[int, ...], Layout] = {}

    def bind(self, bindings: Bindings) -> None:
        """Replace both reductions on the instance."""
        bindings.bind(self.optimizer, f"{MANGLED}__avg_scatter_grads", self.avg_scatter_grads)
        bindings.bind(self.optimizer, f"{MANGLED}__avg_scatter_contiguous_grads", self.avg_scatter_contiguous_grads)
        if self.aggregator.scope == "model":
            epilogue = self.optimizer.independent_gradient_partition_epilogue

            def independent_gradient_partition_epilogue() -> None:
                epilogue()
                self.aggregator.flush()

            bindings.bind(
                self.optimizer, "independent_gradient_partition_epilogue", independent_gradient_partition_epilogue
            )

    @torch.no_grad()
    def avg_scatter_grads(self, params_to_reduce: Sequence[Any], communication_data_type: torch.dtype) -> list[Tensor]:
        """In place of the host's: this rank's partition of each parameter's aggregate, in the accumulation dtype."""
        return self._reduce(list(params_to_reduce), communication_data_type, 1.0)

    @torch.no_grad()
    def avg_scatter_contiguous_grads(
        self, buffer_to_reduce: Tensor, communication_data_type: torch.dtype
    ) -> list[Tensor]:
        """In place of the host's, for `reduce_scatter: false`; the gradients are views of `buffer_to_reduce`."""
        params = list(self.optimizer.ipg_buckets[communication_data_type].params)
        return self._reduce(params, communication_data_type, float(self.optimizer.sequence_parallel_size))

    def _reduce(self, params: list[Any], dtype: torch.dtype, scale: float) -> list[Tensor]:
        transport = self.transport
        layout = self._layout(params)
        shares = [_share(param.grad.numel(), transport.size, transport.rank) for param in params]
        partitions: list[Tensor] = []

        def partition(flat: Tensor) -> None:
            own = layout.chunk_of(flat, transport.rank)
            partitions[:] = torch.split(own.to(self.optimizer.gradient_accumulation_dtype), shares)

        def add_later(flat: Tensor) -> None:
            partition(flat)
            held = getattr(self.optimizer, f"{MANGLED}__param_id_to_grad_partition")
            for ds_id, part in zip(ids, partitions, strict=True):
                held[ds_id].view(-1)[: part.numel()].add_(part)

        ids = [param.ds_id for param in params]
        later = self.aggregator.scope == "model"
        bucket = Bucket(self._packed(params, dtype), layout, scale * self._scale())
        self.aggregator.submit(bucket, add_later if later else partition)
        if not later:
            return partitions
        nothing = params[0].grad.new_zeros(sum(shares), dtype=self.optimizer.gradient_accumulation_dtype)
        return list(torch.split(nothing, shares))  # the host copies or adds these now; `flush` adds the real ones

    def _packed(self, params: list[Any], dtype: torch.dtype) -> Tensor:
        """The gradients by rank, then by parameter: [rank 0's share of p0, of p1, ..., rank 1's share of p0, ...]."""
        size = self.transport.size
        if len(params) == 1:
            return params[0].grad.to(dtype).reshape(-1)  # type: ignore[no-any-return]
        shares = [_split(param.grad.reshape(-1), size) for param in params]
        return torch.cat([share[k].to(dtype) for k in range(size) for share in shares])

    def _layout(self, params: list[Any]) -> Layout:
        key = tuple(param.ds_id for param in params)
        if key not in self._layouts:
            size = self.transport.size
            segments, bounds, start = [], [0], 0
            for k in range(size):
                for param in params:
                    share = _share(param.grad.numel(), size, k)
                    if share:
                        name = self.names.get(param.ds_id, f"parameter {param.ds_id}")
                        segments.append(Segment(name, start, start + share))
                        start += share
                bounds.append(start)
            self._layouts[key] = Layout(tuple(segments), tuple(bounds), Delivery.AGGREGATOR)
        return self._layouts[key]

    def _scale(self) -> float:
        """The host's factor on the mean. HACK 0.18.3-0.19.8: a predivide factor equal to the world size is divided by
        but not multiplied back (`__avg_scatter_grads`), so the "average" is off by it; the scale is kept as it is."""
        factor = float(self.optimizer.gradient_predivide_factor)
        lost = self.optimizer.postscale_gradients and factor != 1.0 and factor == self.transport.size
        return 1.0 / factor if lost else 1.0


def _share(numel: int, size: int, rank: int) -> int:
    """Elements of a tensor that `rank` owns: ceil(numel / size) each, the last ones fewer or none."""
    width = -(-numel // size)
    return max(0, min(width, numel - rank * width))


def _split(flat: Tensor, size: int) -> list[Tensor]:
    width = -(-flat.numel() // size)
    return [flat[k * width : min((k + 1) * width, flat.numel())] for k in range(size)]
