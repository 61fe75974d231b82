"""Every private name of DeepSpeed that this adapter replaces or relies on, with what was seen in each version.

`python -m ds_byzantine.adapters.deepspeed.points` prints the table for the DeepSpeed that is installed.
"""

from __future__ import annotations

import inspect

from ds_byzantine.adapters._patch import PatchPoint, digest_of

SUPPORTED = ">=0.18.3,<0.20"

STAGE3 = "_DeepSpeedZeroOptimizer_Stage3"

COMM = "communication_data_type"


# Digests of the function bodies in all releases from 0.18.3 to 0.19.8, oldest first.
BODIES = {
    "allreduce_gradients": "597908b8506e3b6a fee1b733ba181683 9c05a53edd58429c 4c6bdd40ffb27124 42852cb99dd96a08",
    "_take_model_step": "2723d11700c66b99 17a85b4f76d4e421 2bca63a727b7b88f 9fed8f8e9476370d 54b1a9591370789a",
    "buffered_allreduce_fallback": "12feb746197a92be",
    "_get_gradients_for_reduction": "ae9c7d25c59bba77 dd5cdf2e03eac79e e25086a78af4bb21",
    "allreduce_bucket": "5ccf4353d4c91c4b 9e5718eb085ecc38",
    "get_grads_for_reduction": "3b01fb9b7240a66c",
    "_exec_reduce_tied_grads": "e2c63b1dc05a6640",
    "_exec_reduce_grads": "9859a4c61d139d1a",
    "_bf16_reduce_grads": "a47697d8f10de3e2",
    "average_tensor": "dda933df281cf126 d4d812632f117af0 acd896df69cafb78 25eefbc43afd2587",
    "buffered_reduce_fallback": "1e67aa13397b02f2",
    "reduce_ipg_grads": "f6181b216cad4043 c4c7e4653bbed891 8e6013be9df7236b e197ff795c57c29f",
    "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads": (
        "14cafac091e30a3e e1fd1ebd694487c9 3cbe48255f8520ae 2dc121418eea5112"
    ),
    "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads": (
        "6c0de72f3abbf322 7c5fcb6b75e2e57d 8432be68b7c5eff7 95e27f61d03bbd91 5090d82d8f5bc2e3"
    ),
    "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads": "28775fd1adfc2483 25bb9fc6a658fc3a",
    "partition_grads": "4af556cfb22d5961 58d0a57d318e4d57 e53cd9d542cbfdf5",
    "_buffered_reduce_fallback_preserving_fp32": "41c5f36ba8e6f488",
    "_get_compact_grad_partition_slice": "ff8b1d97dfe06240",
}


def _point(module: str, owner: str, name: str, parameters: str, why: str, versions: str = SUPPORTED) -> PatchPoint:
    lists = tuple(tuple(one.split()) for one in parameters.split("|"))
    return PatchPoint(module, owner, name, lists, frozenset(BODIES[name].split()), versions, why)


def _engine(name: str, parameters: str, why: str) -> PatchPoint:
    return _point("deepspeed.runtime.engine", "DeepSpeedEngine", name, parameters, why)


def _pipe(name: str, why: str) -> PatchPoint:
    return _point("deepspeed.runtime.pipe.engine", "PipelineEngine", name, "", why)


def _zero12(name: str, parameters: str, why: str, versions: str = SUPPORTED) -> PatchPoint:
    return _point("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", name, parameters, why, versions)


def _zero3(name: str, parameters: str, why: str) -> PatchPoint:
    return _point("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", name, parameters, why)


ENGINE_POINTS = (
    _engine("allreduce_gradients", "bucket_size", "decides which reduction runs"),
    _engine("_take_model_step", "lr_kwargs|lr_kwargs block_eigenvalue", "applies the step"),
)
STAGE0_POINTS = (
    _engine("buffered_allreduce_fallback", "grads elements_per_buffer", "reduces all gradients"),
    _engine("_get_gradients_for_reduction", "", "lists the gradients to reduce"),
    _engine("allreduce_bucket", "bucket dp_group dp_world_size", "scales the sum to a mean"),
)
BF16_POINTS = (
    _point(
        "deepspeed.runtime.bf16_optimizer",
        "BF16_Optimizer",
        "get_grads_for_reduction",
        "",
        "lists the gradients to reduce",
    ),
)
PIPE_POINTS = (
    _pipe("_exec_reduce_tied_grads", "adds up the gradients of tied weights within a replica, before the reduction"),
    _pipe("_exec_reduce_grads", "decides which reduction runs"),
    _pipe("_bf16_reduce_grads", "calls the reduction of BF16_Optimizer"),
)
ZERO12_POINTS = (
    _zero12("average_tensor", f"tensor {COMM}", "averages a contiguous bucket"),
    _zero12(
        "buffered_reduce_fallback",
        f"rank grads {COMM} elements_per_buffer log",
        "averages a bucket that is not contiguous",
    ),
    _zero12(
        "_buffered_reduce_fallback_preserving_fp32",
        f"grads grad_params {COMM} elements_per_buffer",
        "averages a bucket that is not contiguous into a compact float32 partition",
        ">=0.19.8,<0.20",
    ),
    _zero12(
        "_get_compact_grad_partition_slice",
        "group_idx partition_id param_id num_elements",
        "finds an owner's slice of the compact float32 partition",
        ">=0.19.8,<0.20",
    ),
    _zero12("reduce_ipg_grads", "|comm_dtype", "calls the reductions of a bucket"),
)
ZERO3_POINTS = (
    _zero3(f"{STAGE3}__avg_scatter_grads", f"params_to_reduce {COMM}", "averages and partitions a bucket"),
    _zero3(
        f"{STAGE3}__avg_scatter_contiguous_grads",
        f"buffer_to_reduce {COMM}",
        "averages a contiguous bucket with an all-reduce",
    ),
    _zero3(f"{STAGE3}__reduce_and_partition_ipg_grads", COMM, "calls the reductions of a bucket"),
    _zero3("partition_grads", "params_to_release grad_partitions", "takes over the averaged partitions"),
)
ALL_POINTS = ENGINE_POINTS + STAGE0_POINTS + BF16_POINTS + PIPE_POINTS + ZERO12_POINTS + ZERO3_POINTS


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
