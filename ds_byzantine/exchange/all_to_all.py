"""Rows to their aggregators: chunk k of every replica goes to rank k.

Each rank sends (n-1)/n of the bucket, exactly what a ring reduce-scatter sends, and ends with the n rows of its chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_byzantine.exchange.routes import Routes
from ds_byzantine.exchange.transport import Transport
from ds_byzantine.exchange.workspace import Workspace


def scatter_rows(transport: Transport, flat: Tensor, routes: Routes, workspace: Workspace) -> Tensor:
    """Exchange chunks.

    Args:
        flat: this replica's bucket, [numel], contiguous.
        routes: of the bucket's layout.
        workspace: lends the receive buffer, one bucket.

    Returns:
        rows_ND, [n, D]: row i is replica i's part of this rank's chunk. It lives in the workspace.
    """
    width = routes.sizes[transport.rank]
    received = workspace.take(transport.size * width, flat)
    transport.all_to_all(received, flat, [width] * transport.size, routes.sizes)
    return received.view(transport.size, width)


def gather_partials(transport: Transport, mine_PW: Tensor, routes: Routes) -> list[Tensor]:
    """Everybody's partial statistics, one record of W numbers per piece of the sender's chunk.

    An all-gather rather than an all-reduce: each partial stays attributable to the aggregator that claims it. The
    senders' piece counts follow from the layout, so records are padded to the longest and no sizes travel.

    Args:
        mine_PW: [pieces of this rank's chunk, W].

    Returns:
        One [pieces of rank k's chunk, W] tensor per rank k, on the CPU.
    """
    counts = [len(pieces) for pieces in routes.pieces]
    most, width = max(counts), mine_PW.shape[1]
    padded = torch.zeros(most, width, dtype=mine_PW.dtype, device=mine_PW.device)
    padded[: mine_PW.shape[0]] = mine_PW
    everybody = torch.empty(transport.size * most * width, dtype=mine_PW.dtype, device=mine_PW.device)
    transport.all_gather(everybody, padded.view(-1))
    everybody_NMW = everybody.cpu().view(transport.size, most, width)
    return [everybody_NMW[k, : counts[k]] for k in range(transport.size)]


def sum_over_replicas(transport: Transport, own_W: Tensor, device: torch.device) -> Tensor:
    """Sum of everybody's few numbers, [W] -> [W] on the CPU, added in rank order: the same bits on all ranks."""
    everybody = torch.empty(transport.size * own_W.numel(), dtype=own_W.dtype, device=device)
    transport.all_gather(everybody, own_W.to(device))
    return everybody.cpu().view(transport.size, -1).sum(0)


def gather_rows(transport: Transport, block_D: Tensor) -> Tensor:
    """Every replica's `block_D`, [D] -> [n, D]. n times the bytes of a reduction: for drills only."""
    out = torch.empty(transport.size * block_D.numel(), dtype=block_D.dtype, device=block_D.device)
    transport.all_gather(out, block_D.contiguous())
    return out.view(transport.size, -1)
