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
    if layout.delivery is Delivery.EVERYONE:
        transport.spread(flat, layout.bounds)
    else:
        _to_owners(transport, flat, routes, workspace)


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


def _to_owners(transport: Transport, flat: Tensor, routes: Routes, workspace: Workspace) -> None:
    """One message for each pair of ranks; what is one span leaves from its place and arrives at it."""
    sends = [
        (k, _view(flat, spans[0]) if len(spans) == 1 else torch.cat([_view(flat, span) for span in spans]))
        for k, spans in enumerate(routes.send)
        if spans
    ]
    scattered = {k: spans for k, spans in enumerate(routes.receive) if len(spans) > 1}
    sizes = [sum(span.stop - span.start for span in spans) for spans in scattered.values()]
    buffers = dict(zip(scattered, torch.split(workspace.take(sum(sizes), flat), sizes), strict=True))
    receives = [
        (k, buffers[k] if k in buffers else _view(flat, spans[0])) for k, spans in enumerate(routes.receive) if spans
    ]
    transport.send_receive(sends, receives)
    for k, spans in scattered.items():
        start = 0
        for span in spans:
            size = span.stop - span.start
            _view(flat, span).copy_(buffers[k][start : start + size])
            start += size


def _view(flat: Tensor, span: Span) -> Tensor:
    return flat[span.start : span.stop]
