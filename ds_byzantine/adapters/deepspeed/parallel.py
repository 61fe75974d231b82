"""Who is who under pipeline, tensor, expert and sequence parallelism: from an engine's process groups to `Peers`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_byzantine.errors import ByzantineError, UnsupportedHostError
from ds_byzantine.exchange.groups import Cut, Membership, Part, Peers, Roster, Shared, columns_of, gather_memberships
from ds_byzantine.exchange.transport import TorchTransport, Transport

Group = dist.ProcessGroup

_made: dict[tuple[int, tuple[int, ...]], Group] = {}


def peers_of(engine: Any, fault_domain: str) -> Peers:
    """The replicas of an engine's job, and this rank's place among them; a collective call over all ranks.

    Args:
        engine: a `DeepSpeedEngine` after its construction.
        fault_domain: "replica", or "node": all ranks of a host are one replica.

    Raises:
        UnsupportedHostError: replicas differ in shape; a parameter is neither marked as sharded over tensor ranks nor
            equal on them.
    """
    mixing = list(_mixing_groups(engine))
    reductions = [engine.seq_data_parallel_group, *(group for _, group in _expert_groups(engine, data=True))]
    node = _node_label() if fault_domain == "node" else ()
    own = Membership(
        tuple(map(_name, mixing)) + node, tuple(map(_name, reductions)), socket.gethostname(), _device(engine)
    )
    world = TorchTransport()
    roster = Roster.of(gather_memberships(world, own, engine.device))
    named = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    with failing_together(world, engine.device):
        rows = [_rows(roster, group) for group in reductions]
        if tensor_group(engine) is not None:
            _check_marks(engine, named)
    parts = tuple(_part(kind, group, of) for kind, (group, of) in enumerate(zip(reductions, rows, strict=True)))
    ranks = roster.replicas[roster.replica_of(dist.get_rank())]
    replica = TorchTransport(_group(ranks)) if roster.split else None
    return Peers(parts, roster, tuple(_shared(engine, named)), replica, _cut(engine, named))


@contextmanager
def failing_together(world: Transport, device: torch.device) -> Iterator[None]:
    """Raise on all ranks if the block raises on one: a rank that stopped alone would leave the others waiting.

    Raises:
        ByzantineError: the block's own; on the other ranks an UnsupportedHostError that says where to look.
    """
    problem = None
    try:
        yield
    except ByzantineError as error:
        problem = error
    flags = torch.empty(world.size, dtype=torch.int64, device=device)
    world.all_gather(flags, torch.tensor([int(problem is not None)], dtype=torch.int64, device=device))
    if problem is not None:
        raise problem
    if flags.any():
        ranks = flags.nonzero()[:, 0].tolist()
        raise UnsupportedHostError(f"byzantine: refused on ranks {ranks}; the reason is in the output of those ranks.")


def describe(engine: Any, fault_domain: str) -> str:
    """The kinds of parallelism within a replica, e.g. "pipeline 2 x tensor 2"; empty for plain data parallelism."""
    found = [("pipeline", _stages(engine)), ("tensor", _size(tensor_group(engine)))]
    found.append(("sequence", int(getattr(engine, "sequence_parallel_size", 1) or 1)))
    found += [("expert", _size(group)) for _, group in _expert_groups(engine, data=False)]
    words = [f"{name} {size}" for name, size in found if size > 1]
    return " x ".join(words + (["node"] if fault_domain == "node" else []))


def tensor_group(engine: Any) -> Group | None:
    """The tensor-parallel ranks of this rank's replica and stage; None without tensor parallelism."""
    mpu = engine.mpu
    if mpu is None or is_sequence_mpu(mpu):
        return None
    for getter in ("get_slice_parallel_group", "get_tensor_model_parallel_group", "get_model_parallel_group"):
        if hasattr(mpu, getter):
            group = getattr(mpu, getter)()
            return group if _size(group) > 1 else None
    return None


def is_sequence_mpu(mpu: Any) -> bool:
    """Whether a client mpu stands for Ulysses sequence parallelism and nothing else."""
    return hasattr(mpu, "initialize_sequence_parallel")


def kind_of(engine: Any, param: Any) -> int:
    """Which of the rank's reductions a parameter goes through: 0, or that of its experts."""
    if getattr(param, "allreduce", True):
        return 0
    names = [name for name, _ in _expert_groups(engine, data=True)]
    return 1 + names.index(param.group_name)


def mean_scale(engine: Any, part: Part) -> float:
    """What the mean over the ranks of a reduction has to be multiplied by to be the host's average.

    Expert gradients are divided by the number of dense ranks too, so that the expert-parallel size changes nothing; the
    ranks that share a sequence add up. (ZeRO 3 with reduce-scatter takes the plain mean over all ranks instead.)
    """
    sequence = float(getattr(engine, "sequence_parallel_size", 1) or 1)
    dense = dist.get_world_size(engine.seq_data_parallel_group)
    return part.transport.size / dense if part.kind else sequence


def is_sharded(param: Any) -> bool:
    """Whether a parameter is one rank's part of a tensor that is cut over tensor ranks, by the marks DeepSpeed uses."""
    return bool(getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False))


# -- groups ------------------------------------------------------------------------------------------------------------


def _mixing_groups(engine: Any) -> Iterator[Group]:
    """Groups whose ranks exchange activations or gradients before the reduction over replicas."""
    from deepspeed.utils import groups

    mpu = engine.mpu
    if mpu is not None:
        yield mpu.get_model_parallel_group()
    if int(getattr(engine, "sequence_parallel_size", 1) or 1) > 1:
        yield groups._get_sequence_parallel_group()
    for _, group in _expert_groups(engine, data=False):
        yield group


def _expert_groups(engine: Any, *, data: bool) -> list[tuple[str, Group]]:
    """Expert-parallel groups (or, with `data`, the groups over which expert gradients are reduced), by name."""
    from deepspeed.utils import groups

    getter = groups._get_expert_data_parallel_group if data else groups._get_expert_parallel_group
    names = {p.group_name for p in engine.module.parameters() if not getattr(p, "allreduce", True)}
    return [(name, getter(name)) for name in sorted(names)]


def _rows(roster: Roster, group: Group) -> tuple[int, ...]:
    """The replica of each rank of a reduction."""
    ranks = dist.get_process_group_ranks(group)
    rows = tuple(roster.replica_of(rank) for rank in ranks)
    if len(set(rows)) != roster.n:
        raise UnsupportedHostError(
            f"byzantine: of the {roster.n} replicas of this job only {len(set(rows))} take part in the reduction over "
            f"ranks {ranks}. Every replica has to hold all tensors: use the same parallel layout in all of them."
        )
    if len(columns_of(rows)) > 1 and list(ranks) != sorted(ranks):
        raise UnsupportedHostError(f"byzantine: the ranks of a reduction are not in ascending order: {ranks}.")
    return rows


def _part(kind: int, group: Group, rows: tuple[int, ...]) -> Part:
    ranks = dist.get_process_group_ranks(group)
    columns, name = columns_of(rows), min(ranks)
    if len(columns) == 1:
        return Part(TorchTransport(group), rows, kind, name)
    here = ranks.index(dist.get_rank())
    inner = [rank for rank, row in zip(ranks, rows, strict=True) if row == rows[here]]
    outer = next([ranks[k] for k in column] for column in columns if here in column)
    return Part(TorchTransport(group), rows, kind, name, TorchTransport(_group(inner)), TorchTransport(_group(outer)))


def _group(ranks: Sequence[int]) -> Group:
    """A group of these global ranks, each of which calls this; made once."""
    key = id(dist.group.WORLD), tuple(sorted(ranks))
    if key not in _made:
        _made[key] = dist.new_group(list(key[1]), use_local_synchronization=True)
    return _made[key]


def _name(group: Group) -> int:
    return min(dist.get_process_group_ranks(group))


def _size(group: Group | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _stages(engine: Any) -> int:
    return int(engine.module.num_stages) if getattr(engine, "pipeline_parallelism", False) else 1


def _device(engine: Any) -> str:
    device = torch.device(engine.device)
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def _node_label() -> tuple[int, ...]:
    """A number for this rank's host: its name, and the launcher's number of the node where it gives one."""
    number = os.environ.get("CROSS_RANK", os.environ.get("GROUP_RANK", ""))
    return (int.from_bytes(blake2b(f"{socket.gethostname()}/{number}".encode(), digest_size=7).digest(), "big"),)


# -- copies ------------------------------------------------------------------------------------------------------------


def _shared(engine: Any, named: dict[str, Any]) -> Iterator[Shared]:
    group = tensor_group(engine)
    if group is not None:
        yield Shared(TorchTransport(group), frozenset(name for name, p in named.items() if not is_sharded(p)))
    name_of = {id(p): name for name, p in named.items()}
    for weights, tied in ties(engine):
        tensors = frozenset(name_of[id(w)] for w in weights if id(w) in name_of)
        if tensors:
            yield Shared(TorchTransport(tied), tensors, apart=True)


def _cut(engine: Any, named: dict[str, Any]) -> Cut | None:
    group = tensor_group(engine)
    if group is None:
        return None
    return Cut(TorchTransport(group), frozenset(name for name, p in named.items() if is_sharded(p)))


def ties(engine: Any) -> Iterator[tuple[list[Any], Group]]:
    """Weights that other pipeline stages hold as well, with the ranks of this replica that do; by key."""
    for _, comm in sorted(getattr(engine.module, "tied_comms", {}).items()):
        attributes = comm["weight_attr"]
        names = [attributes] if isinstance(attributes, str) else attributes
        yield [_attribute(comm["module"], name) for name in names], comm["group"]


def _attribute(module: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        module = getattr(module, name)
    return module


def _check_marks(engine: Any, named: dict[str, Any]) -> None:
    """Tensor ranks have to hold the same parameters, and those that are not marked as sharded have to be equal."""
    transport, device = TorchTransport(tensor_group(engine)), engine.device
    shapes = repr([(name, _numel(p), is_sharded(p)) for name, p in named.items()]).encode()
    layout = torch.tensor([int.from_bytes(blake2b(shapes, digest_size=7).digest(), "big")], dtype=torch.int64)
    if _differs(transport, layout, device)[0]:
        raise UnsupportedHostError(
            "byzantine: the tensor-parallel ranks of a replica hold parameters of different names, sizes or marks, so "
            "that copies of replicated parameters cannot be kept equal. Choose a tensor-parallel size that divides the "
            "number of (key-value) heads and all sharded dimensions."
        )
    data_rank = dist.get_rank(engine.seq_data_parallel_group)
    digests = [0 if is_sharded(p) else _digest(p, data_rank) for p in named.values()]
    differ = _differs(transport, torch.tensor(digests, dtype=torch.int64), device)
    found = [name for name, differs in zip(named, differ, strict=True) if differs]
    if found:
        listed = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        raise UnsupportedHostError(
            f"byzantine: {listed}: not marked as sharded over tensor-parallel ranks, yet different on them. Set "
            "param.tensor_model_parallel = True on sharded parameters (DeepSpeed needs the mark for gradient norms as "
            "well), and start replicated ones from the same values, e.g. by seeding all tensor ranks alike."
        )


def _differs(transport: Transport, own: Tensor, device: torch.device) -> list[bool]:
    """For each number, whether it is another one on some rank."""
    everybody = torch.empty(transport.size * own.numel(), dtype=own.dtype, device=device)
    transport.all_gather(everybody, own.to(device))
    table = everybody.view(transport.size, -1)
    found: list[bool] = (table != table[0]).any(0).tolist()
    return found


def _numel(param: Any) -> int:
    return int(getattr(param, "ds_numel", param.numel()))


def _digest(param: Any, data_rank: int) -> int:
    """A checksum of what this rank holds of a parameter. It finds differences by accident, not by intent."""
    held = param
    if hasattr(param, "ds_tensor"):  # ZeRO 3: this rank's part, without the padding at its end
        held = param.ds_tensor
        held = held.reshape(-1)[: max(0, param.ds_numel - data_rank * held.numel())]
    total = torch.zeros((), dtype=torch.int64, device=held.device)
    for i, block in enumerate(torch.split(held.detach().reshape(-1).contiguous(), 1 << 24)):
        words = _as_integers(block)
        total += ((torch.arange(words.numel(), device=held.device) % 65521 + 1 + i) * words).sum()
    return int(total)


def _as_integers(flat: Tensor) -> Tensor:
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(sizes[flat.element_size()]).to(torch.int64)
