"""Aggregated chunks to those who need them: the owners of the optimizer state, everybody, or nobody else."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_byzantine.exchange.groups import Shared
from ds_byzantine.exchange.routes import Routes, Span, joined
from ds_byzantine.exchange.transport import Transport
from ds_byzantine.exchange.workspace import Workspace
from ds_byzantine.types import Delivery, Layout


def deliver(transport: Transport, flat: Tensor, layout: Layout, routes: Routes, workspace: Workspace) -> None:
    """Send the aggregate where the layout's `delivery` wants it.

    Args:
        flat: [numel], this rank's chunk aggregated in place; overwritten as `Bucket` says.
        workspace: used as scratch.
    """
    if layout.delivery is Delivery.AGGREGATOR:
        return
    chunk_D = layout.chunk_of(flat, transport.rank)
    if layout.delivery is Delivery.EVERYONE:
        _to_everyone(transport, flat, chunk_D, routes, workspace)
    else:
        _to_owners(transport, flat, chunk_D, routes, workspace)


def share(shared: Shared, flat: Tensor, layout: Layout, routes: Routes, rank: int) -> None:
    """Replace the aggregated copies of shared tensors in a chunk by those of the first rank that holds them.

    Args:
        shared: which tensors, and who else holds them: ranks with the same `layout` where these tensors are concerned.
        flat: [numel], the rank's chunk aggregated in place.
        rank: of the chunk.
    """
    names = routes.tensors
    spans = joined([Span(p.start, p.stop) for p in routes.pieces[rank] if names[p.tensor] in shared.tensors])
    if not spans:
        return
    chunk_D = layout.chunk_of(flat, rank)
    views = [chunk_D[span.start : span.stop] for span in spans]
    packed = views[0] if len(views) == 1 else torch.cat(views)
    shared.transport.broadcast(packed)
    if len(views) > 1 and not shared.leads:
        for view, copy in zip(views, torch.split(packed, [v.numel() for v in views]), strict=True):
            view.copy_(copy)


def _to_everyone(transport: Transport, flat: Tensor, chunk_D: Tensor, routes: Routes, workspace: Workspace) -> None:
    width = max(routes.sizes)
    if chunk_D.numel() < width:
        padded = chunk_D.new_zeros(width)
        padded[: chunk_D.numel()] = chunk_D
        chunk_D = padded
    everybody = workspace.take(width * transport.size, flat)
    transport.all_gather(everybody, chunk_D)
    start = 0
    for k, size in enumerate(routes.sizes):
        flat[start : start + size] = everybody[k * width : k * width + size]
        start += size


def _to_owners(transport: Transport, flat: Tensor, chunk_D: Tensor, routes: Routes, workspace: Workspace) -> None:
    packed = [chunk_D[span.start : span.stop] for span in routes.send]
    outgoing = packed[0] if len(packed) == 1 else torch.cat([*packed, chunk_D[:0]])
    incoming = workspace.take(sum(routes.receive_sizes), flat)
    transport.all_to_all(incoming, outgoing, routes.receive_sizes, routes.send_sizes)
    start = 0
    for span in routes.receive:
        size = span.stop - span.start
        flat[span.start : span.stop] = incoming[start : start + size]
        start += size
