"""Aggregated chunks to those who need them: the owners of the optimizer state, everybody, or nobody else."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_byzantine.exchange.routes import Routes
from ds_byzantine.exchange.transport import Transport
from ds_byzantine.exchange.workspace import Workspace
from ds_byzantine.types import Delivery, Layout


def deliver(
    transport: Transport, flat: Tensor, chunk_D: Tensor, layout: Layout, routes: Routes, workspace: Workspace
) -> None:
    """Put the aggregate where the layout's `delivery` wants it, in place of this rank's own gradients in `flat`.

    Args:
        flat: [numel]; overwritten as `Bucket` says.
        chunk_D: this rank's aggregated chunk, same dtype; must not lie in the workspace, which is used as scratch.
    """
    if layout.delivery is Delivery.AGGREGATOR:
        flat[layout.bounds[transport.rank] : layout.bounds[transport.rank + 1]] = chunk_D
    elif layout.delivery is Delivery.EVERYONE:
        _to_everyone(transport, flat, chunk_D, routes, workspace)
    else:
        _to_owners(transport, flat, chunk_D, routes, workspace)


def _to_everyone(transport: Transport, flat: Tensor, chunk_D: Tensor, routes: Routes, workspace: Workspace) -> None:
    width = max(routes.sizes)
    if chunk_D.numel() < width:
        padded = chunk_D.new_zeros(width)
        padded[: chunk_D.numel()] = chunk_D
        chunk_D = padded
    if flat.numel() == width * transport.size:
        transport.all_gather(flat, chunk_D)
        return
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
