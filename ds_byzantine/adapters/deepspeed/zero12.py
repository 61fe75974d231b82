"""ZeRO stages 1 and 2: flat buckets whose slices belong to the owners of the optimizer state.

`average_tensor` gets a contiguous bucket; without `contiguous_gradients` one of two list functions gets the gradients
themselves. Either way the host afterwards reads each owner's slice where the local gradient was, and adds it to a
compact float32 buffer where one is in use (0.19.8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ds_byzantine.adapters._patch import Bindings
from ds_byzantine.adapters.deepspeed.parallel import kind_of, mean_scale
from ds_byzantine.pipeline import ShardAggregator
from ds_byzantine.types import Bucket, Delivery, Layout, Segment, Slice, even_bounds

ParamKey = tuple[int, int, int]  # (parameter group, index in the group, parameter id) as in the host's buckets


@dataclass(frozen=True)
class Run:
    """Consecutive tensors of the host's bucket that are aggregated together.

    Args:
        start, stop: elements of the host's bucket.
        layout: of these elements.
        kind: the reduction that they go through.
        shared_as: see `Bucket`.
        own: what this rank owns: (group, index in the group, parameter id, offset of the parameter, slice).
    """

    start: int
    stop: int
    layout: Layout
    kind: int
    shared_as: str | None
    own: tuple[tuple[int, int, int, int, Slice], ...]


class Zero12:
    """The gradient path of one `DeepSpeedZeroOptimizer`.

    Args:
        engine: the host's engine, whose optimizer this is.
        aggregator: the main path.
        names: parameter object id -> name.
    """

    def __init__(self, engine: Any, aggregator: ShardAggregator, names: dict[int, str]) -> None:
        self.engine = engine
        self.optimizer = engine.optimizer
        self.aggregator = aggregator
        self.names = names
        self._runs_of: dict[tuple[ParamKey, ...], list[Run]] = {}

    def bind(self, bindings: Bindings) -> None:
        """Replace the reductions on the instance."""
        bindings.bind(self.optimizer, "average_tensor", self.average_tensor)
        bindings.bind(self.optimizer, "buffered_reduce_fallback", self.buffered_reduce_fallback)
        compact = "_buffered_reduce_fallback_preserving_fp32"  # since 0.19.8
        if hasattr(self.optimizer, compact):
            bindings.bind(self.optimizer, compact, self.buffered_reduce_fallback_preserving_fp32)
        if self.aggregator.scope == "model" or any(shared.apart for shared in self.aggregator.peers.shared):
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

    def _submit(
        self, tensor: Tensor, params: list[ParamKey], dtype: torch.dtype, write_back: Callable[[Tensor], object]
    ) -> None:
        """Send the bucket on its way; the result goes where the host will look for it, now or after the last bucket."""
        flat = tensor.to(dtype)
        mean = getattr(self.optimizer, "gradient_average", True)
        for run in self._runs(params):
            part = self.aggregator.peers.parts[run.kind]
            scale = mean_scale(self.engine, part) if mean else float(part.transport.size)
            bucket = Bucket(flat[run.start : run.stop], run.layout, scale, run.kind, run.shared_as)
            later = self.aggregator.waits(bucket)
            self.aggregator.submit(bucket, partial(self._commit_later if later else self._add_to_compact, run))
        if self.aggregator.scope != "model":
            write_back(flat)

    def _commit_later(self, run: Run, flat: Tensor) -> None:
        """This rank's slices into the gradients that the host has kept: its buckets have been used again since."""
        for group, index, _, offset, piece in run.own:
            grad = self.optimizer.get_gradient_for_reduction(self.optimizer.bit16_groups[group][index])
            if grad is not None:
                grad.view(-1)[piece.start - offset : piece.stop - offset] = flat[piece.start : piece.stop]
        self._add_to_compact(run, flat)

    def _add_to_compact(self, run: Run, flat: Tensor) -> None:
        """Add this rank's slices to the host's compact float32 partition of each group that uses one."""
        optimizer = self.optimizer
        if not hasattr(optimizer, "_use_compact_grad_partition_buffer"):
            return
        for group, _, param_id, _, piece in run.own:
            if optimizer._use_compact_grad_partition_buffer(group):
                size = piece.stop - piece.start
                output = optimizer._get_compact_grad_partition_slice(group, piece.owner, param_id, size)
                optimizer._add_to_grad_partition_buffer(output, flat[piece.start : piece.stop])

    def _runs(self, params: list[ParamKey]) -> list[Run]:
        """The bucket's tensors, in order, cut where the reduction changes and around tensors of other stages too."""
        key = tuple(params)
        if key not in self._runs_of:
            runs, start = [], 0
            for (kind, shared_as), members in groupby(params, self._way):
                run = self._run(list(members), start, kind, shared_as)
                runs.append(run)
                start = run.stop
            self._runs_of[key] = runs
        return self._runs_of[key]

    def _way(self, key: ParamKey) -> tuple[int, str | None]:
        param = self._param(key)
        return kind_of(self.engine, param), self.aggregator.peers.shared_as(self._name(key, param))

    def _run(self, params: list[ParamKey], begin: int, kind: int, shared_as: str | None) -> Run:
        transport = self.aggregator.peers.parts[kind].transport
        segments, owners, own, start = [], [], [], 0
        for key in params:
            group, index, param_id = key
            param = self._param(key)
            slices = self._slices(group, param_id, param.numel(), start)
            segments.append(Segment(self._name(key, param), start, start + param.numel()))
            owners += slices
            own += [(group, index, param_id, start, piece) for piece in slices if piece.owner == transport.rank]
            start += param.numel()
        bounds = even_bounds(start, transport.size)
        layout = Layout(tuple(segments), bounds, Delivery.OWNERS, tuple(owners))
        return Run(begin, begin + start, layout, kind, shared_as, tuple(own))

    def _param(self, key: ParamKey) -> Any:
        return self.optimizer.bit16_groups[key[0]][key[1]]

    def _name(self, key: ParamKey, param: Any) -> str:
        return self.names.get(id(param), f"parameter {key[2]}")

    def _slices(self, group: int, param_id: int, numel: int, start: int) -> list[Slice]:
        """Which ranks own which part of a parameter: consecutive runs, by offset."""
        offsets = self.optimizer.grad_start_offset[group]
        partitions = self.optimizer.param_to_partition_ids[group][param_id]
        found = sorted((int(offsets[p][param_id]), int(p)) for p in partitions)
        stops = [offset for offset, _ in found[1:]] + [numel]
        return [Slice(p, start + a, start + b) for (a, p), b in zip(found, stops, strict=True) if a < b]

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
