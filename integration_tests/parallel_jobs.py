"""Jobs under pipeline, tensor, expert and sequence parallelism: real DeepSpeed engines, small models, real text.

Keys of a job beside those of jobs.py: kind (the function), the keys that its docstring names, and bad ({"rank": r,
"how": "loss" | "activations", "factor": x, "from": step}). Results: weights (of this rank, by name), copies (those of
which other ranks of the replica hold a copy), losses, held_out, events, replicas.
"""

from __future__ import annotations

from functools import partial, wraps

import torch
import torch.distributed as dist
from jobs import SEQUENCE, batch, ds_config, events, messages, own_directory
from parallel_models import WIDTH, Block, Embedding, Head, TensorBlock, cross_entropy, logits_of
from torch import nn


def alone(job):
    """Forget the groups that DeepSpeed keeps in globals of its modules, or the next job would find them."""

    @wraps(job)
    def run(options: dict) -> dict:
        from deepspeed.runtime.tensor_parallel import init_utils
        from deepspeed.utils import groups

        try:
            return job(options)
        finally:
            groups._release_process_group_references()
            init_utils._TP_MODEL_INIT_ARGS = None

    return run


# -- pipeline ----------------------------------------------------------------------------------------------------------


@alone
def pipeline(job: dict) -> dict:
    """Train a PipelineModule: `stages`, `tensor` (ranks that cut each block), tied (bool)."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    fp16_allowed(job)
    stages, tensor = job.get("stages", 2), job.get("tensor", 1)
    replicas = dist.get_world_size() // (stages * tensor)
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=tensor, num_dp=replicas)
    slices = _slices(topology) if tensor > 1 else None
    block = LayerSpec(TensorBlock, slices) if tensor > 1 else LayerSpec(Block)
    middle = [block] * job.get("blocks", 4)
    if job.get("tied"):
        tie = partial(TiedLayerSpec, "embed", Embedding, tied_weight_attr="weight")
        layers = [tie(), *middle, tie(forward_fn=logits_of)]
    else:
        layers = [LayerSpec(Embedding), *middle, LayerSpec(Head)]
    if job.get("second_tie"):
        tie = partial(TiedLayerSpec, "again", nn.Linear, WIDTH, WIDTH, tied_weight_attr=["weight", "bias"])
        layers = [layers[0], tie(), *layers[1:-1], tie(), layers[-1]]
    torch.manual_seed(job.get("seed", 0))
    model = PipelineModule(
        layers, topology=topology, loss_fn=partial(_loss, job), partition_method="uniform", base_seed=0,
        seed_layers=True,
    )  # fmt: skip
    directory = own_directory(job)
    with messages() as said:
        options = {"model_parameters": [p for p in model.parameters() if p.requires_grad]}
        if job.get("optimizer", "sgd") == "sgd":
            options["optimizer"] = torch.optim.SGD(options["model_parameters"], lr=job.get("lr", 0.2), momentum=0.5)
        engine = deepspeed.initialize(model=model, config=ds_config({"gas": 2, **job}), **options)[0]
    job["engine"] = engine
    data = _Batches(engine.grid.data_parallel_id, replicas, job)
    losses = [float(engine.train_batch(data)) for _ in range(job.get("steps", 4))]
    held_out = float(engine.eval_batch(iter(_held_out(job)), num_micro_batches=8))
    result = outcome(engine, losses, held_out, directory, said)
    result["tied"] = {
        key: comm["module"].weight.detach().float().clone() for key, comm in model.tied_comms.items()
    }  # fmt: skip
    job.pop("engine")
    engine.destroy()
    return result


def _slices(topology):
    """The group of ranks that hold the parts of this rank's layers."""
    mine = None
    for ranks in topology.get_axis_comm_lists("model"):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def _loss(job: dict, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss on the last stage; a bad rank spoils it there."""
    loss = cross_entropy(output, labels)
    return loss * job["bad"]["factor"] if is_bad(job, "loss") and output.requires_grad else loss


class _Batches:
    """Endless (tokens, labels), the same on all ranks of a replica, other ones on each replica."""

    def __init__(self, replica: int, replicas: int, job: dict) -> None:
        self.replica, self.replicas, self.job, self.number = replica, replicas, job, 0

    def __iter__(self):
        return self

    def __next__(self):
        tokens = batch(self.number * self.replicas + self.replica, self.job.get("micro_batch", 4))
        self.number += 1
        return tokens, tokens


def _held_out(job: dict):
    """Eight micro-batches of the size of those in training: the stages have agreed on the shape of activations."""
    size = job.get("micro_batch", 4)
    return [(tokens, tokens) for tokens in batch(10**6, 8 * size, held_out=True).split(size)]


# -- tensor ------------------------------------------------------------------------------------------------------------


class Mpu:
    """A client's model-parallel unit with the getters that DeepSpeed asks a Megatron-LM mpu for."""

    def __init__(self, tensor: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.tensor, self.data = tensor, world // tensor
        for first in range(0, world, tensor):
            ranks = range(first, first + tensor)
            group = dist.new_group(ranks)
            if rank in ranks:
                self._model = group
        for place in range(tensor):
            ranks = range(place, world, tensor)
            group = dist.new_group(ranks)
            if rank in ranks:
                self._data = group

    def get_model_parallel_group(self):
        return self._model

    def get_tensor_model_parallel_group(self):
        return self._model

    def get_model_parallel_rank(self):
        return dist.get_rank(self._model)

    def get_tensor_model_parallel_rank(self):
        return dist.get_rank(self._model)

    def get_model_parallel_world_size(self):
        return self.tensor

    def get_tensor_model_parallel_world_size(self):
        return self.tensor

    def get_data_parallel_group(self):
        return self._data

    def get_data_parallel_rank(self):
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self):
        return self.data


class TensorModel(nn.Module):
    """The tensor-parallel twin of the pipeline's model, as one module."""

    def __init__(self, group, blocks: int = 2, mark: bool = True) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(TensorBlock(group, mark) for _ in range(blocks))
        self.head = Head()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return cross_entropy(self.head(hidden), labels)


@alone
def megatron(job: dict) -> dict:
    """Train a Megatron-style model with a client mpu: `tensor` ranks cut each block."""
    mpu = Mpu(job.get("tensor", 2))
    torch.manual_seed(job.get("seed", 0))
    model = TensorModel(mpu.get_model_parallel_group(), mark=job.get("mark", True))
    return _train(job, model, mpu.get_data_parallel_rank(), mpu.data, mpu=mpu)


@alone
def autotp(job: dict) -> dict:
    """Train a tiny Llama that DeepSpeed cuts over `tensor` ranks; with `init`, asked for by a call, not in the JSON."""
    import deepspeed
    from jobs import llama

    tensor = job.get("tensor", 2)
    model = llama({"model": {"tie_word_embeddings": False, "num_key_value_heads": 4}, **job})
    if job.get("init"):
        model = deepspeed.tp_model_init(model, tp_size=tensor, dtype=torch.float32)
    else:
        job = {**job, "ds": {**job.get("ds", {}), "tensor_parallel": {"autotp_size": tensor}}}
    replica = dist.get_rank() // tensor
    return _train(job, model, replica, dist.get_world_size() // tensor)


# -- experts and sequences ---------------------------------------------------------------------------------------------


class ExpertModel(nn.Module):
    """Embedding, a mixture of experts cut over `ep` ranks, head."""

    def __init__(self, ep: int, experts: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.embedding = Embedding()
        self.block = Block()
        expert = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, WIDTH))
        self.moe = MoE(WIDTH, expert, num_experts=experts, ep_size=ep, k=1, use_rts=False, capacity_factor=4.0)
        self.head = Head()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.block(self.embedding(input_ids))
        mixed, balance, _ = self.moe(hidden)
        return cross_entropy(self.head(hidden + mixed), labels) + 0.01 * balance


@alone
def experts(job: dict) -> dict:
    """Train a mixture of experts; `expert` ranks hold one copy of the experts."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    size = job.get("expert", 2)
    torch.manual_seed(job.get("seed", 0))
    model = ExpertModel(size, experts=2 * size)
    parameters = split({"params": list(model.parameters()), "name": "parameters"})
    return _train(job, model, dist.get_rank(), dist.get_world_size(), parameters=parameters)


class LocalAttention(nn.Module):
    """Causal attention over [batch, sequence, heads, width of a head]: whole sequences, some of the heads."""

    def forward(self, q, k, v, *args, **kwargs):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class UlyssesBlock(nn.Module):
    """Attention for which the ranks of a sequence trade parts of sequences for heads (DeepSpeed's Ulysses layer)."""

    HEADS = 4

    def __init__(self, group) -> None:
        super().__init__()
        from deepspeed.sequence.layer import DistributedAttention

        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.attention = DistributedAttention(LocalAttention(), group, scatter_idx=2, gather_idx=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = (*hidden.shape[:2], self.HEADS, WIDTH // self.HEADS)
        q, k, v = (x.reshape(heads) for x in self.qkv(self.norm(hidden)).chunk(3, -1))
        return hidden + self.out(self.attention(q, k, v, 0).reshape(hidden.shape))


class SequenceModel(nn.Module):
    """Each rank has its part of the sequence; with a group, attention crosses the parts."""

    def __init__(self, group=None) -> None:
        super().__init__()
        self.embedding, self.block, self.head = Embedding(), Block(), Head()
        self.mixer = nn.Identity() if group is None else UlyssesBlock(group)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.head(self.block(self.mixer(self.embedding(input_ids)))), labels)


@alone
def sequence(job: dict) -> dict:
    """Train with Ulysses' groups: `sequence` consecutive ranks share each sample, every one takes its part of it."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu

    size = job.get("sequence", 2)
    if mpu._SEQUENCE_PARALLEL_GROUP is None:
        mpu.initialize_sequence_parallel(size)
    torch.manual_seed(job.get("seed", 0))
    replicas = dist.get_world_size() // size
    model = SequenceModel(mpu.get_sequence_parallel_group())
    return _train(job, model, dist.get_rank() // size, replicas, mpu=mpu, cut=size)


@alone
def mesh_sequence(job: dict) -> dict:
    """Sequence parallelism by two keys of the config, which DeepSpeed does not reduce over."""
    sizes = {"sequence_parallel_size": 2, "data_parallel_size": dist.get_world_size() // 2}
    torch.manual_seed(0)
    return _train({**job, "ds": sizes}, SequenceModel(), dist.get_rank() // 2, dist.get_world_size() // 2, cut=2)


@alone
def dense(job: dict) -> dict:
    """Plain data parallelism."""
    torch.manual_seed(job.get("seed", 0))
    return _train(job, SequenceModel(), dist.get_rank(), dist.get_world_size())


def _train(job: dict, model, replica: int, replicas: int, *, mpu=None, parameters=None, cut: int = 1) -> dict:
    import deepspeed

    fp16_allowed(job)
    parameters = parameters or [p for p in model.parameters() if p.requires_grad]
    options = {"model_parameters": parameters, **({} if mpu is None else {"mpu": mpu})}
    if job.get("optimizer", "sgd") == "sgd":
        options["optimizer"] = torch.optim.SGD(parameters, lr=job.get("lr", 0.2), momentum=0.5)
    directory = own_directory(job)
    with messages() as said:
        engine = deepspeed.initialize(model=model, config=ds_config(job), **options)[0]
    job["engine"] = engine
    losses, gas = [], job.get("gas", 1)
    hook = _spoil_activations(engine, job)
    for step in range(job.get("steps", 4)):
        for micro in range(gas):
            tokens = batch((step * gas + micro) * replicas + replica, job.get("micro_batch", 4))
            if cut > 1:
                tokens = tokens.chunk(cut, 1)[dist.get_rank() % cut].contiguous()
            output = engine(input_ids=tokens, labels=tokens)
            loss = getattr(output, "loss", output).float()
            engine.backward(loss * job["bad"]["factor"] if is_bad(job, "loss") else loss)
            engine.step()
        losses.append(float(loss.detach()))
    if hook is not None:
        hook.remove()
    with torch.no_grad():
        tokens = batch(10**6, 32, held_out=True)
        output = engine(input_ids=tokens, labels=tokens)
        held_out = float(getattr(output, "loss", output))
    result = outcome(engine, losses, held_out, directory, said)
    job.pop("engine")
    engine.destroy()
    return result


def _spoil_activations(engine, job: dict):
    """On a bad rank, multiply what the module called `at` puts out."""
    if (job.get("bad") or {}).get("how") != "activations":
        return None
    module = dict(engine.module.named_modules())[job["bad"]["at"]]

    def hook(module, inputs, output):
        return output * job["bad"]["factor"] if is_bad(job, "activations") else None

    return module.register_forward_hook(hook)


# -- what they share ---------------------------------------------------------------------------------------------------


def is_bad(job: dict, how: str) -> bool:
    """Whether this rank misbehaves in that way now."""
    bad = job.get("bad") or {}
    here = dist.get_rank() in bad.get("ranks", [bad.get("rank")])
    return here and bad["how"] == how and job["engine"].global_steps >= bad.get("from", 0)


def fp16_allowed(job: dict) -> None:
    if job.get("fp16"):
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        CPU_Accelerator.is_fp16_supported = lambda self: True


def outcome(engine, losses: list[float], held_out: float, directory, said: list[str]) -> dict:
    """What this rank ended with."""
    from jobs import full_weights

    from ds_byzantine.activation import attachment_of

    attachment = attachment_of(engine)
    peers = attachment.aggregator.peers if attachment is not None and attachment.aggregator is not None else None
    weights = full_weights(engine)
    shared = {t for one in peers.shared for t in one.tensors} if peers is not None else set()
    return {
        "weights": weights,
        "copies": {name: weights[name] for name in shared},
        "losses": losses,
        "held_out": held_out,
        "skipped": engine.skipped_steps,
        "optimizer": type(engine.optimizer).__name__,
        "replicas": None if peers is None else peers.roster.replicas,
        "events": events(directory),
        "messages": said,
    }


def refuse(job: dict) -> dict:
    """Run a job whose engine has to be refused; the error is the result."""
    return globals()[job["of"]]({**job, "steps": 0})


assert SEQUENCE % 2 == 0
