"""Rows to their aggregators: chunk k of every replica goes to rank k.

Each rank sends (n-1)/n of the bucket, exactly what a ring reduce-scatter sends, and ends with the n rows of its chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_byzantine.exchange.groups import Part, Peers
from ds_byzantine.exchange.routes import Routes
from ds_byzantine.exchange.transport import Transport
from ds_byzantine.exchange.workspace import Workspace


def scatter_rows(part: Part, flat: Tensor, routes: Routes, workspace: Workspace) -> Tensor:
    """Exchange chunks.

    Args:
        part: the ranks that take part.
        flat: this rank's bucket, [numel], contiguous.
        routes: of the bucket's layout.
        workspace: lends the receive buffer, one bucket.

    Returns:
        rows_ND, [n, D]: row i is replica i's part of this rank's chunk. It lives in the workspace.
    """
    transport, width = part.transport, routes.sizes[part.transport.rank]
    if part.inner is not None and part.outer is not None:
        return _scatter_means(part, part.inner, part.outer, flat, routes, workspace)
    received = workspace.take(transport.size * width, flat)
    transport.all_to_all(received, flat, [width] * transport.size, routes.sizes)
    return _by_replica(received.view(transport.size, width), part.rows)


def _scatter_means(
    part: Part, inner: Transport, outer: Transport, flat: Tensor, routes: Routes, workspace: Workspace
) -> Tensor:
    """Exchange chunks of which the ranks of a replica take the mean first.

    Two hops: within the replica, to the rank in whose column the chunk's aggregator is; the mean there; and between
    replicas, to the aggregator. Only 1/size of the replica's gradients leaves it.
    """
    columns, sizes = part.columns, routes.sizes
    chunks = torch.split(flat, list(sizes))
    packed = torch.cat([chunks[k] for column in columns for k in column])
    widths = [sum(sizes[k] for k in column) for column in columns]
    column, width, own = columns[inner.rank], widths[inner.rank], sizes[part.transport.rank]
    received = workspace.take(inner.size * width, flat)
    inner.all_to_all(received, packed, [width] * inner.size, widths)
    mean_W = received.view(inner.size, width).mean(0)
    rows = workspace.take(outer.size * own, flat)
    outer.all_to_all(rows, mean_W, [own] * outer.size, [sizes[k] for k in column])
    return _by_replica(rows.view(outer.size, own), [part.rows[k] for k in column])


def _by_replica(received_ND: Tensor, replicas: Sequence[int]) -> Tensor:
    """Row i from replica i. Ranks usually come in that order already."""
    if list(replicas) == sorted(replicas):
        return received_ND
    return received_ND[torch.tensor(replicas, device=received_ND.device).argsort()]


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


def sum_over_ranks(transport: Transport, own_W: Tensor, device: torch.device) -> Tensor:
    """Sum of everybody's few numbers, [W] -> [W] on the CPU, added in rank order: the same bits on all ranks."""
    everybody = torch.empty(transport.size * own_W.numel(), dtype=own_W.dtype, device=device)
    transport.all_gather(everybody, own_W.to(device))
    return everybody.cpu().view(transport.size, -1).sum(0)


def over_reductions(peers: Peers, own: Sequence[Tensor], device: torch.device) -> dict[tuple[int, int], Tensor]:
    """The numbers of all reductions of the job, by (kind, name), from those in which this rank takes part.

    A collective call over the ranks of a replica: together they take part in all of them.

    Args:
        own: for each of this rank's reductions, [W] float64, known alike on all its ranks.

    Returns:
        [W] for each reduction, on the CPU, the same bits on every rank of the job.
    """
    if peers.replica is None:
        return {(part.kind, part.name): numbers.cpu() for part, numbers in zip(peers.parts, own, strict=True)}
    records = torch.stack(
        [
            torch.cat([torch.tensor([part.kind, part.name]).double(), one.cpu()])
            for part, one in zip(peers.parts, own, strict=True)
        ]
    )
    everybody = torch.empty(peers.replica.size * records.numel(), dtype=torch.float64, device=device)
    peers.replica.all_gather(everybody, records.view(-1).to(device))
    found = everybody.cpu().view(-1, records.shape[1])
    return {(int(record[0]), int(record[1])): record[2:] for record in found}


def gather_rows(part: Part, block_D: Tensor) -> Tensor:
    """Every replica's `block_D`, [D] -> [n, D]. n times the bytes of a reduction: for drills only."""
    size = part.transport.size
    everybody = torch.empty(size * block_D.numel(), dtype=block_D.dtype, device=block_D.device)
    part.transport.all_gather(everybody, block_D.contiguous())
    each = everybody.view(size, -1)
    members = [[k for k in range(size) if part.rows[k] == i] for i in range(part.n)]
    return torch.stack([each[ranks].mean(0) for ranks in members])
