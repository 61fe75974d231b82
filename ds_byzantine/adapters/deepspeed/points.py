"""Every private name of DeepSpeed that this adapter replaces or relies on, with what was seen in each version.

`python -m ds_byzantine.adapters.deepspeed.points` prints the table for the DeepSpeed that is installed.
"""

from __future__ import annotations

import inspect

from ds_byzantine.adapters._patch import PatchPoint, digest_of

SUPPORTED = ">=0.18.3,<0.20"

ENGINE = "deepspeed.runtime.engine"
ZERO12 = "deepspeed.runtime.zero.stage_1_and_2"
ZERO3 = "deepspeed.runtime.zero.stage3"
BF16 = "deepspeed.runtime.bf16_optimizer"
STAGE3 = "_DeepSpeedZeroOptimizer_Stage3"

COMM = "communication_data_type"


def _point(
    module: str, owner: str, name: str, parameters: str, digests: str, why: str, versions: str = SUPPORTED
) -> PatchPoint:
    lists = tuple(tuple(one.split()) for one in parameters.split("|"))
    return PatchPoint(module, owner, name, lists, frozenset(digests.split()), versions, why)


ENGINE_POINTS = (
    _point(ENGINE, "DeepSpeedEngine", "allreduce_gradients", "bucket_size", "", "decides which reduction runs"),
    _point(ENGINE, "DeepSpeedEngine", "_take_model_step", "lr_kwargs|lr_kwargs block_eigenvalue", "", "applies the step"),
)
STAGE0_POINTS = (
    _point(
        ENGINE, "DeepSpeedEngine", "buffered_allreduce_fallback", "grads elements_per_buffer", "", "reduces all gradients"
    ),
    _point(ENGINE, "DeepSpeedEngine", "_get_gradients_for_reduction", "", "", "lists the gradients to reduce"),
    _point(
        ENGINE, "DeepSpeedEngine", "allreduce_bucket", "bucket dp_group dp_world_size", "", "scales the sum to a mean"
    ),
)
BF16_POINTS = (_point(BF16, "BF16_Optimizer", "get_grads_for_reduction", "", "", "lists the gradients to reduce"),)
ZERO12_POINTS = (
    _point(ZERO12, "DeepSpeedZeroOptimizer", "average_tensor", f"tensor {COMM}", "", "averages a contiguous bucket"),
    _point(
        ZERO12,
        "DeepSpeedZeroOptimizer",
        "buffered_reduce_fallback",
        f"rank grads {COMM} elements_per_buffer log",
        "",
        "averages a bucket that is not contiguous",
    ),
    _point(
        ZERO12,
        "DeepSpeedZeroOptimizer",
        "_buffered_reduce_fallback_preserving_fp32",
        f"grads grad_params {COMM} elements_per_buffer",
        "",
        "averages a bucket that is not contiguous into a compact float32 partition",
        ">=0.19.8,<0.20",
    ),
    _point(
        ZERO12,
        "DeepSpeedZeroOptimizer",
        "_get_compact_grad_partition_slice",
        "group_idx partition_id param_id num_elements",
        "",
        "finds an owner's slice of the compact float32 partition",
        ">=0.19.8,<0.20",
    ),
    _point(ZERO12, "DeepSpeedZeroOptimizer", "reduce_ipg_grads", "|comm_dtype", "", "calls the reductions of a bucket"),
)
ZERO3_POINTS = (
    _point(
        ZERO3,
        "DeepSpeedZeroOptimizer_Stage3",
        f"{STAGE3}__avg_scatter_grads",
        f"params_to_reduce {COMM}",
        "",
        "averages and partitions a bucket",
    ),
    _point(
        ZERO3,
        "DeepSpeedZeroOptimizer_Stage3",
        f"{STAGE3}__avg_scatter_contiguous_grads",
        f"buffer_to_reduce {COMM}",
        "",
        "averages a contiguous bucket with an all-reduce",
    ),
    _point(
        ZERO3,
        "DeepSpeedZeroOptimizer_Stage3",
        f"{STAGE3}__reduce_and_partition_ipg_grads",
        f"{COMM}|",
        "",
        "calls the reductions of a bucket",
    ),
    _point(
        ZERO3,
        "DeepSpeedZeroOptimizer_Stage3",
        "partition_grads",
        "params_to_release grad_partitions",
        "",
        "takes over the averaged partitions",
    ),
)
ALL_POINTS = ENGINE_POINTS + STAGE0_POINTS + BF16_POINTS + ZERO12_POINTS + ZERO3_POINTS


def main() -> None:
    """Print name, parameters and digest of every point in the installed DeepSpeed."""
    import deepspeed

    for point in ALL_POINTS:
        function = point.resolve()
        if function is None:
            print(deepspeed.__version__, point.name, "-", "absent")
            continue
        parameters = " ".join(tuple(inspect.signature(function).parameters)[1:])
        print(deepspeed.__version__, point.name, digest_of(function), parameters)


if __name__ == "__main__":
    main()
