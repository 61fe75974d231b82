"""ZeRO stage 0 and BF16_Optimizer: one call reduces all gradients, and every rank needs all of the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_byzantine.adapters._patch import Bindings
from ds_byzantine.adapters.deepspeed.parallel import kind_of, mean_scale
from ds_byzantine.errors import UnsupportedHostError
from ds_byzantine.exchange.groups import Peers
from ds_byzantine.pipeline import ShardAggregator
from ds_byzantine.types import Bucket, Delivery, Layout, Segment, even_bounds

# Elements per bucket: enough to keep the wire busy, small against the model. The host flattens up to 5e8 at a time.
BUCKET_ELEMENTS = 2**25

Named = tuple[str, Tensor, int]  # name, gradient, which reduction


def bind(engine: Any, aggregator: ShardAggregator, bindings: Bindings) -> None:
    """Replace `engine.buffered_allreduce_fallback`: stage 0, and stage 1 with bf16 parameters and fp32 accumulation."""

    @torch.no_grad()
    def buffered_allreduce_fallback(grads: Any = None, elements_per_buffer: int = BUCKET_ELEMENTS) -> None:
        """In place of the host's: every gradient holds the aggregate afterwards, on all ranks."""
        if grads is None:
            named = list(_bf16_gradients(engine) if hasattr(engine.optimizer, "bf16_groups") else _gradients(engine))
        else:
            named = [(f"gradient {i}", g, 0) for i, g in enumerate(grads)]
        _reduce_all(engine, aggregator, named, min(BUCKET_ELEMENTS, elements_per_buffer))

    bindings.bind(engine, "buffered_allreduce_fallback", buffered_allreduce_fallback)


def _gradients(engine: Any) -> Iterator[Named]:
    """Every trainable parameter's gradient; one that was not used in this step counts as zero, as in DeepSpeed."""
    for name, param in engine.module.named_parameters():
        if not param.requires_grad or param.numel() == 0:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        if param.grad.is_sparse:
            raise UnsupportedHostError(
                f"{name}: its gradient is sparse, which is not aggregated robustly. Build the embedding with "
                "sparse=False."
            )
        yield name, param.grad.data, kind_of(engine, param)


def _bf16_gradients(engine: Any) -> Iterator[Named]:
    """BF16_Optimizer's accumulated gradients, tensor by tensor (its flat buffers end in alignment padding)."""
    optimizer = engine.optimizer
    for params, grads in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients, strict=True):
        for param, grad in zip(params, grads, strict=True):
            name = optimizer.param_names.get(param, f"tensor of {tuple(param.shape)}")
            yield name, grad, kind_of(engine, param)


def _reduce_all(engine: Any, aggregator: ShardAggregator, named: list[Named], limit: int) -> None:
    peers = aggregator.peers
    mean = getattr(engine, "gradient_average", True)
    for group in _buckets(named, peers, limit):
        kind = group[0][2]
        part = peers.parts[kind]
        flat, layout = _flattened(group, part.transport.size, engine.communication_data_type)
        scale = mean_scale(engine, part) if mean else float(part.transport.size)
        bucket = Bucket(flat, layout, scale, kind, peers.shared_as(group[0][0]))
        aggregator.submit(bucket, partial(_write_back, group))
    aggregator.flush()


def _buckets(named: Iterable[Named], peers: Peers, limit: int) -> Iterator[list[Named]]:
    """Runs of at most `limit` elements, one dtype and one reduction. A larger tensor, or one whose copy another stage
    holds, is a bucket of its own."""
    group: list[Named] = []
    filled = 0
    for one in named:
        name, grad, kind = one
        alone = group and (peers.shared_as(name) or peers.shared_as(group[0][0]))
        other = group and (grad.dtype, kind) != (group[0][1].dtype, group[0][2])
        if group and (alone or other or filled + grad.numel() > limit):
            yield group
            group, filled = [], 0
        group.append(one)
        filled += grad.numel()
    if group:
        yield group


def _flattened(group: list[Named], ranks: int, dtype: torch.dtype) -> tuple[Tensor, Layout]:
    flat = torch.cat([grad.reshape(-1).to(dtype) for _, grad, _ in group])
    segments, start = [], 0
    for name, grad, _ in group:
        segments.append(Segment(name, start, start + grad.numel()))
        start += grad.numel()
    return flat, Layout(tuple(segments), even_bounds(start, ranks), Delivery.EVERYONE)


def _write_back(group: list[Named], flat: Tensor) -> None:
    start = 0
    for _, grad, _ in group:
        grad.copy_(flat[start : start + grad.numel()].view_as(grad))
        start += grad.numel()
