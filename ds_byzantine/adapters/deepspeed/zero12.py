"""ZeRO stages 1 and 2: flat buckets whose slices belong to the owners of the optimizer state.

`average_tensor` gets a contiguous bucket; without `contiguous_gradients` one of two list functions gets the gradients
themselves. Either way the host afterwards reads each owner's slice where the local gradient was, and adds it to a
compact float32 buffer where one is in use (0.19.8).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_byzantine.adapters._patch import Bindings
from ds_byzantine.pipeline import Commit, ShardAggregator
from ds_byzantine.types import Bucket, Delivery, Layout, Segment, Slice, even_bounds

ParamKey = tuple[int, int, int]  # (parameter group, index in the group, parameter id) as in the host's buckets


class Zero12:
    """The gradient path of one `DeepSpeedZeroOptimizer`.

    Args:
        optimizer: the host's optimizer.
        aggregator: the main path.
        names: parameter object id -> name.
    """

    def __init__(self, optimizer: Any, aggregator: ShardAggregator, names: dict[int, str]) -> None:
        self.optimizer = optimizer
        self.aggregator = aggregator
        self.names = names
        self._layouts: dict[tuple[ParamKey, ...], Layout] = {}

    def bind(self, bindings: Bindings) -> None:
        """Replace the reductions on the instance."""
        bindings.bind(self.optimizer, "average_tensor", self.average_tensor)
        bindings.bind(self.optimizer, "buffered_reduce_fallback", self.buffered_reduce_fallback)
        compact = "_buffered_reduce_fallback_preserving_fp32"  # since 0.19.8
        if hasattr(self.optimizer, compact):
            bindings.bind(self.optimizer, compact, self.buffered_reduce_fallback_preserving_fp32)
        if self.aggregator.scope == "model":
            self._bind_flush(bindings)

    def _bind_flush(self, bindings: Bindings) -> None:
        """Flush between the last bucket of a backward pass and the host's first look at the result."""
        optimizer = self.optimizer
        reduce_buckets, epilogue = optimizer.reduce_ipg_grads, optimizer.independent_gradient_partition_epilogue
        in_epilogue = False

        def reduce_ipg_grads(*args: Any, **kwargs: Any) -> None:
            """The host's; after the last bucket of a backward pass, also the flush."""
            reduce_buckets(*args, **kwargs)
            if in_epilogue:
                if optimizer.overlap_comm and not _accelerator().resolves_data_dependency():
                    _accelerator().synchronize()  # the rows were copied on the reduction stream
                self.aggregator.flush()

        def independent_gradient_partition_epilogue() -> None:
            """The host's, which marks the last bucket."""
            nonlocal in_epilogue
            in_epilogue = True
            try:
                epilogue()
            finally:
                in_epilogue = False

        bindings.bind(optimizer, "reduce_ipg_grads", reduce_ipg_grads)
        bindings.bind(optimizer, "independent_gradient_partition_epilogue", independent_gradient_partition_epilogue)

    @torch.no_grad()
    def average_tensor(self, tensor: Tensor, communication_data_type: torch.dtype) -> None:
        """In place of the host's: the bucket's own slices hold the aggregate afterwards."""
        params = list(self.optimizer.ipg_buckets[communication_data_type].params)
        with self._reduction_stream(communication_data_type):
            self._submit(tensor, params, communication_data_type, lambda flat: flat is tensor or tensor.copy_(flat))

    @torch.no_grad()
    def buffered_reduce_fallback(
        self,
        rank: int | None,
        grads: Sequence[Tensor],
        communication_data_type: torch.dtype,
        elements_per_buffer: int = 500_000_000,
        log: Any = None,
    ) -> None:
        """In place of the host's, for `contiguous_gradients: false`."""
        params = self.optimizer.ipg_buckets[communication_data_type].params
        self.buffered_reduce_fallback_preserving_fp32(grads, params, communication_data_type, elements_per_buffer)

    @torch.no_grad()
    def buffered_reduce_fallback_preserving_fp32(
        self,
        grads: Sequence[Tensor],
        grad_params: Sequence[ParamKey],
        communication_data_type: torch.dtype,
        elements_per_buffer: int = 500_000_000,
    ) -> None:
        """In place of the host's, for `contiguous_gradients: false` with compact float32 gradient partitions."""
        if not grads:
            return
        if self.optimizer.overlap_comm:  # as the host does: other ranks' gradients of the last bucket go
            if not _accelerator().resolves_data_dependency():
                _accelerator().synchronize()
            self.optimizer._clear_previous_reduced_grads()
        with self._reduction_stream(communication_data_type):
            flat = torch.cat([g.reshape(-1).to(communication_data_type) for g in grads])
            self._submit(flat, list(grad_params), communication_data_type, partial(_write_back, list(grads)))

    def _submit(self, tensor: Tensor, params: list[ParamKey], dtype: torch.dtype, write_back: Commit) -> None:
        """Send the bucket on its way; the result goes where the host will look for it, now or after the last bucket."""
        layout = self._layout(params)
        mean = getattr(self.optimizer, "gradient_average", True)
        later = self.aggregator.scope == "model"

        def commit(flat: Tensor) -> None:
            (partial(self._write_into_parameters, params) if later else write_back)(flat)
            self._add_to_compact(flat, params)

        self.aggregator.submit(Bucket(tensor.to(dtype), layout, 1.0 if mean else float(layout.replicas)), commit)

    def _write_into_parameters(self, params: list[ParamKey], flat: Tensor) -> None:
        """This rank's slices into the gradients that the host has kept: its buckets have been used again since."""
        start = 0
        for group, index, param_id in params:
            param = self.optimizer.bit16_groups[group][index]
            grad = self.optimizer.get_gradient_for_reduction(param)
            for piece in self._slices(group, param_id, param.numel(), 0):
                if piece.owner == self.aggregator.transport.rank and grad is not None:
                    grad.view(-1)[piece.start : piece.stop] = flat[start + piece.start : start + piece.stop]
            start += param.numel()

    def _layout(self, params: list[ParamKey]) -> Layout:
        key = tuple(params)
        if key not in self._layouts:
            segments, owners, start = [], [], 0
            for group, index, param_id in params:
                param = self.optimizer.bit16_groups[group][index]
                name = self.names.get(id(param), f"parameter {param_id}")
                segments.append(Segment(name, start, start + param.numel()))
                owners += self._slices(group, param_id, param.numel(), start)
                start += param.numel()
            bounds = even_bounds(start, self.aggregator.transport.size)
            self._layouts[key] = Layout(tuple(segments), bounds, Delivery.OWNERS, tuple(owners))
        return self._layouts[key]

    def _slices(self, group: int, param_id: int, numel: int, start: int) -> list[Slice]:
        """Which ranks own which part of a parameter: consecutive runs, by offset."""
        offsets = self.optimizer.grad_start_offset[group]
        partitions = self.optimizer.param_to_partition_ids[group][param_id]
        found = sorted((int(offsets[p][param_id]), int(p)) for p in partitions)
        stops = [offset for offset, _ in found[1:]] + [numel]
        return [Slice(p, start + a, start + b) for (a, p), b in zip(found, stops, strict=True) if a < b]

    def _add_to_compact(self, flat: Tensor, params: list[ParamKey]) -> None:
        """Add this rank's slices to the host's compact float32 partition of each group that uses one."""
        optimizer = self.optimizer
        if not hasattr(optimizer, "_use_compact_grad_partition_buffer"):
            return
        rank = self.aggregator.transport.rank
        start = 0
        for group, index, param_id in params:
            numel = optimizer.bit16_groups[group][index].numel()
            if optimizer._use_compact_grad_partition_buffer(group):
                for piece in self._slices(group, param_id, numel, start):
                    if piece.owner == rank:
                        size = piece.stop - piece.start
                        output = optimizer._get_compact_grad_partition_slice(group, rank, param_id, size)
                        optimizer._add_to_grad_partition_buffer(output, flat[piece.start : piece.stop])
            start += numel

    @contextmanager
    def _reduction_stream(self, dtype: torch.dtype) -> Iterator[None]:
        """The host's stream discipline: wait for all streams that filled the bucket, work on its reduction stream."""
        accelerator, optimizer = _accelerator(), self.optimizer
        current = accelerator.current_stream()
        stream = optimizer.reduction_stream if optimizer.overlap_comm else current
        if not accelerator.resolves_data_dependency():
            bucket = optimizer.ipg_buckets[dtype]
            for event in getattr(bucket, "ready_events", {}).values():
                stream.wait_event(event)
            if optimizer.overlap_comm:
                for producer in getattr(bucket, "copy_streams", None) or {current}:
                    stream.wait_stream(producer)
                current.wait_stream(stream)
        with accelerator.stream(stream):
            yield


def _write_back(grads: list[Tensor], flat: Tensor) -> None:
    start = 0
    for grad in grads:
        grad.copy_(flat[start : start + grad.numel()].view_as(grad))
        start += grad.numel()


def _accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()
