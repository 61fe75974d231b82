"""What is not covered: every DeepSpeed option whose gradients would bypass the rule, refused before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ds_byzantine.adapters.deepspeed.parallel import is_sequence_mpu
from ds_byzantine.errors import UnprotectedError, UnsupportedHostError

OFF = 'or set "byzantine": {"enabled": false} to train without protection'
FOREIGN_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
EXAMINED_WRAPPERS = (
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "BF16_Optimizer",
    "FP16_Optimizer",
    "FP16_UnfusedOptimizer",
)
COMPRESSED_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb")


def refuse_unsupported(engine: Any) -> None:
    """Raise if some gradient of this engine would not pass through the rule.

    Raises:
        UnprotectedError: the engine does not train at all (no optimizer, no trainable parameter).
        UnsupportedHostError: lists every option in use that is not covered, each with the reason and the way out.
    """
    if engine.optimizer is None or type(engine.optimizer).__name__ in ("DummyOptim", "DeepSpeedZeRoOffload"):
        raise UnprotectedError(
            "byzantine: this engine has no optimizer, so there is no gradient to protect. Pass an optimizer (or the "
            '"optimizer" section), or remove the "byzantine" section of an inference or evaluation engine.'
        )
    if not any(p.requires_grad for p in engine.module.parameters()):
        raise UnprotectedError("byzantine: no parameter of the model requires a gradient, so nothing is protected.")
    reasons = [reason for check in _CHECKS for reason in check(engine)]
    if reasons:
        listed = "\n  - ".join(reasons)
        raise UnsupportedHostError(
            f"byzantine: not every gradient of this engine would pass through the rule:\n  - {listed}\n"
            f"Change these options, {OFF}."
        )


def _parallelism(engine: Any) -> Iterator[str]:
    pipeline = bool(getattr(engine, "pipeline_parallelism", False))
    experts = bool(getattr(engine, "has_moe_layers", False))
    sequence = int(getattr(engine, "sequence_parallel_size", 1) or 1) > 1
    client = engine.mpu is not None and not is_sequence_mpu(engine.mpu)
    if experts and client:
        yield "mixture of experts with pipeline or tensor parallelism: never examined. Use one of them."
    if sequence and (client or experts):
        yield "sequence parallelism with pipeline, tensor or expert parallelism: never examined. Use one of them."
    if sequence and engine.mpu is None:
        yield (
            "sequence_parallel_size in the config: DeepSpeed does not reduce gradients over the sequence ranks there "
            "in ZeRO stages 1 and 2. Pass mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp instead."
        )
    autoep = engine._config._param_dict.get("expert_parallel")
    if isinstance(autoep, dict) and autoep.get("enabled", True):
        yield "expert_parallel (AutoEP): its gradient path was never examined. Use deepspeed.moe.layer.MoE."
    if pipeline and type(engine).__name__ != "PipelineEngine":
        yield f"{type(engine).__name__}: its gradient path was never examined. Use PipelineModule with 1F1B."
    yield from _tied_half_precision(engine, pipeline)


def _tied_half_precision(engine: Any, pipeline: bool) -> Iterator[str]:
    """HACK 0.18.3-0.19.8: `_exec_reduce_tied_grads` looks at `weight.grad`, which stage 1 has emptied by then if it
    accumulates in another type: each stage would go on with its own part of the gradient."""
    tied = pipeline and bool(getattr(engine.module, "tied_comms", {}))
    if tied and getattr(engine.optimizer, "use_grad_accum_attribute", False):
        yield (
            "tied layers, ZeRO stage 1 and another type for gradient accumulation than for parameters: DeepSpeed does "
            "not add up the gradients of tied weights there. Set data_types.grad_accum_dtype to the parameters' type."
        )


def _zero_options(engine: Any) -> Iterator[str]:
    zero = engine._config.zero_config
    if getattr(zero, "zero_quantized_gradients", False):
        yield "zero_optimization.zero_quantized_gradients: no gradient is sent in full precision. Set it to false."
    if _setting(engine, "zenflow"):
        yield "zero_optimization.zenflow: it consumes gradients inside its own reduction. Remove the section."
    if _setting(engine, "super_offload"):
        yield "zero_optimization.offload_optimizer.super_offload: it steps during backward. Set it to false."
    if int(getattr(zero, "mics_shard_size", -1) or -1) > 0:
        yield "zero_optimization.mics_shard_size: MiCS reduces in two levels. Remove it."
    for key in ("offload_optimizer", "offload_param"):
        offload = getattr(zero, key, None)
        if offload is not None and str(getattr(offload, "device", "none")).rsplit(".", 1)[-1] == "nvme":
            yield f"zero_optimization.{key}.device nvme: untested, gradients leave memory before the step. Use cpu."


def _precision(engine: Any) -> Iterator[str]:
    if engine.zero_optimization_stage() == 0 and engine.fp16_enabled():
        yield (
            "fp16 with ZeRO stage 0: DeepSpeed 0.18.3-0.19.8 does not scale the loss there but unscales the step, so "
            "training is wrong with or without this plug-in (DeepSpeed pull request 8393). Use bf16 or stage 1 to 3."
        )
    scalers = (engine, "torch_autocast_z0_gradscaler"), (engine.optimizer, "torch_autocast_gradscaler")
    if any(getattr(owner, name, None) is not None for owner, name in scalers):
        yield (
            "torch_autocast float16: its loss scaler lowers the scale only inside a step that is taken, so that after "
            "one step skipped for NaN or Inf all others would be. Use bfloat16."
        )
    if engine.bfloat16_enabled() and float(getattr(engine.optimizer, "cur_scale", 1.0)) != 1.0:
        yield (
            "bf16 without ZeRO partitioning: this DeepSpeed (before 0.18.6) divides gradients by a loss scale that it "
            "never multiplied by (pull request 7839), so next to nothing is learnt. Upgrade, or use stage 2 or 3."
        )
    if _setting(engine, "amp_enabled"):
        yield "amp: Apex reduces gradients in its own hooks. Use bf16."


def _optimizers(engine: Any) -> Iterator[str]:
    wrapper = type(engine.optimizer)
    if wrapper.__module__.startswith("deepspeed.runtime") and wrapper.__name__ not in EXAMINED_WRAPPERS:
        yield f"optimizer wrapper {wrapper.__name__}: its gradient path was never examined. Use plain ZeRO."
    if engine.zero_optimization_stage() == 3:
        groups = {getattr(p, "ds_process_group", None) for p in engine.module.parameters() if p.requires_grad}
        if any(g is not None and dist.get_world_size(g) != engine.seq_dp_world_size for g in groups):
            yield "parameters partitioned over some of the data-parallel ranks: fewer replicas than the job has."
    basic = type(getattr(engine, "basic_optimizer", None) or engine.optimizer)
    names = {basic.__name__.lower(), str(engine.optimizer_name() or "").lower()}
    if "muon" in names or basic.__module__.startswith("deepspeed.runtime.zero.muon"):
        yield "optimizer Muon: it gathers and orthogonalises gradients before the step; untested. Use AdamW."
    if any(name in COMPRESSED_OPTIMIZERS for name in names):
        yield "1-bit optimizers: they communicate compressed momentum inside step(). Use AdamW."


def _compiled(engine: Any) -> Iterator[str]:
    compile_config = getattr(engine._config, "compile_config", None)
    if getattr(compile_config, "deepcompile", False):
        yield "compile.deepcompile: it reduces gradients in C++ inside the compiled graph. Set it to false."
    if type(engine).__name__ == "DeepSpeedHybridEngine":
        yield "hybrid_engine: untested. Remove the section."


def _sparse(engine: Any) -> Iterator[str]:
    if _setting(engine, "sparse_gradients_enabled"):
        yield "sparse_gradients: values and indices are gathered, never aggregated. Set it to false."
    for name, module in engine.module.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            yield f"sparse gradients of {name}: they are gathered, never aggregated. Build it with sparse=False."


def _mixed_before(engine: Any) -> Iterator[str]:
    """Modules that exchange gradients between replicas in backward: the rule would see rows that are mixed already."""
    for name, module in engine.module.named_modules():
        kind, where = type(module).__name__, name or "the model"
        if isinstance(module, torch.nn.SyncBatchNorm):
            yield (
                f"SyncBatchNorm at {where}: its backward adds up gradients of all replicas, so that one bad replica "
                "spoils the gradients of all others before they reach the rule. Use BatchNorm or LayerNorm."
            )
        elif kind in FOREIGN_WRAPPERS:
            yield f"{kind} around {where}: it averages gradients before the rule sees them. Pass the bare module."


def _setting(engine: Any, name: str) -> bool:
    """An engine option that is a method in some versions, an attribute in others, and absent in the rest."""
    value = getattr(engine, name, False)
    return bool(value() if callable(value) else value)


_CHECKS: tuple[Callable[[Any], Iterator[str]], ...] = (
    _parallelism,
    _zero_options,
    _precision,
    _optimizers,
    _compiled,
    _sparse,
    _mixed_before,
)
