"""The jobs that a world can run: real DeepSpeed engines on a tiny Llama and real text.

Keys of a job: name, stage, steps, gas, lr, seed, optimizer ("sgd" | "adamw" | "muon"), ds (overrides of the DeepSpeed
config), byzantine (the section, or absent), bad ({"rank": r, "how": "scale" | "nan" | "noise", "factor": x}), model
(overrides of the Llama config) and the model options in `llama`. Results: weights (rank 0), checksum, losses, held_out,
skipped, events, and what else a job says.
"""

from __future__ import annotations

import json
import logging
import os
import pydoc_data.topics
import shutil
import tempfile
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist

SEQUENCE = 24
VOCABULARY = 96


@lru_cache(maxsize=1)
def text() -> torch.Tensor:
    """Printable ASCII of Python's own help topics, as tokens 0..95."""
    joined = "\n".join(pydoc_data.topics.topics[k] for k in sorted(pydoc_data.topics.topics))
    raw = torch.tensor(list(joined.encode("ascii", "ignore")), dtype=torch.long)
    return torch.where((raw >= 32) & (raw < 127), raw - 32, torch.zeros_like(raw))[:200_000]


def batch(seed: int, size: int, held_out: bool = False) -> torch.Tensor:
    """[size, SEQUENCE] tokens; the last tenth of the text is held out."""
    tokens = text()
    cut = int(0.9 * len(tokens))
    low, high = (cut, len(tokens)) if held_out else (0, cut)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(low, high - SEQUENCE - 1, (size,), generator=generator)
    return torch.stack([tokens[s : s + SEQUENCE] for s in starts.tolist()])


class Temperature(torch.nn.Module):
    """One number that scales the loss a little."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.ones(1))

    def forward(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * (0.9 + 0.1 * self.value.float().sum().tanh())


def llama(job: dict) -> torch.nn.Module:
    """A tiny Llama, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "use_cache": False,
        **job.get("model", {}),
    }
    torch.manual_seed(job.get("seed", 0))
    model = LlamaForCausalLM(LlamaConfig(**options))
    if job.get("unused"):  # trainable, but in no forward pass
        model.never_used = torch.nn.Linear(5, 3)
    if job.get("scalar"):  # a tensor of one element, in every forward pass
        model.temperature = Temperature()
    if job.get("sparse"):
        model.model.embed_tokens.sparse = True
    if job.get("moe"):
        from deepspeed.moe.layer import MoE

        model.experts = MoE(hidden_size=8, expert=torch.nn.Linear(8, 8), num_experts=2, ep_size=2)
    if job.get("freeze") is not None:
        for name, p in model.named_parameters():
            p.requires_grad = job["freeze"] not in name
    if job.get("lora"):
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
        model = get_peft_model(model, lora)
    return model


def ds_config(job: dict) -> dict:
    """The DeepSpeed config of a job."""
    config = {
        "train_micro_batch_size_per_gpu": job.get("micro_batch", 4),
        "gradient_accumulation_steps": job.get("gas", 1),
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": job["stage"]},
    }
    if job.get("optimizer", "sgd") == "adamw":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": job.get("lr", 3e-3), "torch_adam": True}}
    if job.get("byzantine") is not None:
        config["byzantine"] = job["byzantine"]
    return merged(config, job.get("ds", {}))


def merged(base: dict, over: dict) -> dict:
    """`over` laid over `base`, section by section."""
    out = dict(base)
    for key, value in over.items():
        out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def engine_of(job: dict):
    """A DeepSpeed engine for the job."""
    import deepspeed

    if job.get("fp16"):
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        CPU_Accelerator.is_fp16_supported = lambda self: True
    if job.get("zero_init"):
        with deepspeed.zero.Init(config_dict_or_path=ds_config({**job, "byzantine": None})):
            model = llama(job)
    else:
        model = llama(job)
    trainable = [p for p in model.parameters() if p.requires_grad]
    options = {"model_parameters": trainable}
    if job.get("optimizer", "sgd") == "sgd":
        options["optimizer"] = torch.optim.SGD(trainable, lr=job.get("lr", 0.2), momentum=0.5)
    if job.get("freeze_late"):
        model.requires_grad_(False)
    if job.get("optimizer") == "muon":  # built here: from the JSON, DeepSpeed would compile FusedAdam for minutes
        options["optimizer"] = muon(trainable)
    return deepspeed.initialize(model=model, config=ds_config(job), **options)[0]


def muon(trainable: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """DeepSpeed's Muon on the matrices, its own Adam on the rest."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    matrices = [p for p in trainable if p.dim() == 2]
    for p in matrices:
        p.use_muon = True
    others = [p for p in trainable if p.dim() != 2]
    return MuonWithAuxAdam([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])


def loss_of(engine, job: dict, tokens: torch.Tensor) -> torch.Tensor:
    """The loss that this rank back-propagates; a bad rank spoils it."""
    output = engine(input_ids=tokens, labels=tokens)
    loss, bad = output.loss.float(), job.get("bad")
    if job.get("scalar"):
        loss = engine.module.temperature(loss)
    if bad is None or dist.get_rank() not in bad.get("ranks", [bad.get("rank")]):
        return loss
    if engine.global_steps < bad.get("from", 0):
        return loss
    if bad["how"] == "nan":
        return loss * float("nan")
    if bad["how"] == "noise":
        generator = torch.Generator().manual_seed(engine.global_steps)
        noise = torch.randn(output.logits.shape, generator=generator)
        return (output.logits.float() * noise).sum() * bad.get("factor", 10.0)
    return loss * bad["factor"]


def train(job: dict) -> dict:
    """Train for some steps and say how it went."""
    directory = own_directory(job)
    with messages() as said:
        engine = engine_of(job)
        if job.get("tamper"):
            import tampering

            getattr(tampering, job["tamper"])(engine)
        losses = steps(engine, job, 0, job.get("steps", 5))
    result = outcome(engine, job, losses)
    result["events"] = events(directory)
    result["messages"] = said
    engine.destroy()
    return result


@contextmanager
def messages():
    """What the plug-in logs on this rank, as a list of texts."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ds_byzantine").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("ds_byzantine").removeHandler(handler)


def save(job: dict) -> dict:
    """Train two steps and save; the log is not that of the job that resumes."""
    job = {**job, "byzantine": dict(job["byzantine"])}
    own_directory(job)
    engine = engine_of(job)
    losses = steps(engine, job, 0, 2)
    engine.save_checkpoint(job["directory"], tag="saved")
    result = outcome(engine, job, losses)
    engine.destroy()
    return result


def resume(job: dict) -> dict:
    """Go on for two steps from a checkpoint."""
    directory = own_directory(job)
    engine = engine_of(job)
    path, _ = engine.load_checkpoint(job["directory"], tag=job["tag"])
    assert path, "nothing was loaded"
    before = held_out_loss(engine)
    losses = steps(engine, job, 2, 4)
    result = outcome(engine, job, losses)
    result["held_out_before"] = before
    result["events"] = events(directory)
    engine.destroy()
    return result


def save_and_resume(job: dict) -> dict:
    """Two steps, a new engine from the checkpoint, two more."""
    save(job)
    return resume({**job, "tag": "saved"})


def own_directory(job: dict) -> Path | None:
    """Give the job a monitor directory of its own."""
    section = job.get("byzantine")
    if not isinstance(section, dict):
        return None
    holder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(holder)
    return Path(section.setdefault("monitor", {}).setdefault("dir", holder[0]))


def events(directory: Path | None) -> list[dict]:
    """What rank 0 logged."""
    if directory is None or dist.get_rank() != 0:
        return []
    lines = (directory / "events.jsonl").read_text().splitlines()
    shutil.rmtree(directory)
    return [json.loads(line) for line in lines]


def steps(engine, job: dict, first: int, last: int) -> list[float]:
    """Optimizer steps [first, last); every (step, micro-step, rank) has its own batch."""
    rank, world, gas = dist.get_rank(), dist.get_world_size(), job.get("gas", 1)
    losses = []
    for step in range(first, last):
        for micro in range(gas):
            tokens = batch((step * gas + micro) * world + rank, job.get("micro_batch", 4))
            loss = loss_of(engine, job, tokens)
            engine.backward(loss)
            if job.get("grads") and "round_robin" not in job["name"] and engine.is_gradient_accumulation_boundary():
                job["grads_seen"] = full_gradients(engine)
            engine.step()
        losses.append(float(loss.detach()))
    return losses


def full_weights(engine) -> dict[str, torch.Tensor]:
    """All parameters in full and float32; a collective call."""
    from deepspeed.utils import safe_get_full_fp32_param

    out = {}
    for name, p in engine.module.named_parameters():
        if hasattr(p, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([p]):
                held = p.detach().clone()
        else:
            # In float32 the parameter is the master weight. (With round_robin_gradients the map to it is wrong.)
            low = p.dtype != torch.float32 and hasattr(p, "_hp_mapping")
            held = safe_get_full_fp32_param(p) if low else None
        out[name] = (p if held is None else held).detach().float().clone()
    return out


def full_gradients(engine) -> dict[str, torch.Tensor]:
    """The reduced gradients in full, between backward and step; a collective call."""
    from deepspeed.utils import safe_get_full_grad

    out = {}
    for name, p in engine.module.named_parameters():
        zero = hasattr(p, "ds_id") or hasattr(p, "_hp_mapping")
        grad = safe_get_full_grad(p) if zero else p.grad
        if grad is not None:
            out[name] = grad.detach().float().clone()
    return out


def held_out_loss(engine) -> float:
    """Loss on text that no rank trains on."""
    with torch.no_grad():
        tokens = batch(10**6, 32, held_out=True)
        return float(engine(input_ids=tokens, labels=tokens).loss)


def outcome(engine, job: dict, losses: list[float]) -> dict:
    """Weights, a checksum over all ranks, the held-out loss."""
    weights = full_weights(engine)
    checksum = torch.stack([w.double().sum() + w.double().abs().sum() for w in weights.values()])
    held_out = held_out_loss(engine)
    norm = engine.get_global_grad_norm() if hasattr(engine, "get_global_grad_norm") else None
    return {
        "weights": weights if dist.get_rank() == 0 else None,
        "checksum": checksum,
        "losses": losses,
        "held_out": held_out,
        "skipped": engine.skipped_steps,
        "global_steps": engine.global_steps,
        "grads": job.get("grads_seen") if dist.get_rank() == 0 else None,
        "norm": None if norm is None else float(norm),
        "optimizer": type(engine.optimizer).__name__,
        "bound": sorted(n for o in (engine, engine.optimizer) for n, v in vars(o).items() if _is_ours(v)),
    }


def _is_ours(value: object) -> bool:
    return callable(value) and str(getattr(value, "__module__", "")).startswith("ds_byzantine")


def traffic(job: dict) -> dict:
    """One step, counting what DeepSpeed's own collectives carry between forward and step."""
    import tampering

    directory = own_directory(job)
    engine = engine_of(job)
    tokens = batch(dist.get_rank(), 4)
    loss = loss_of(engine, job, tokens)
    seen = tampering.count_collectives()
    engine.backward(loss)
    tampering.count_no_more()
    engine.step()
    trainable = [p for p in engine.module.parameters() if p.requires_grad]
    return {
        "collectives": dict(seen),
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in trainable),
        "events": events(directory),
    }


def refuse(job: dict) -> dict:
    """Build an engine that has to be refused; the error is the result."""
    own_directory(job)
    engine_of(job)
    return {"error": None}


def no_backward(job: dict) -> dict:
    """A step without any gradient: with a section, it protects nothing."""
    own_directory(job)
    engine = engine_of(job)
    engine._take_model_step(None)
    return {"error": None}


def ranks_differ(job: dict) -> dict:
    """One rank was started with another section."""
    own_directory(job)
    if dist.get_rank() == 1:
        job["byzantine"]["rule"] = "median"
    engine_of(job)
    return {"error": None}


def environment(job: dict) -> dict:
    """What this world runs on."""
    import deepspeed

    return {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "pid": os.getpid()}
