"""Each misconfiguration is an error of its own before the first step, on all ranks, without a hang."""

from __future__ import annotations

import pytest
from scenarios import BF16, ZERO
from world import run_world

pytestmark = pytest.mark.launch

RANKS = 4
FP16 = {"fp16": {"enabled": True}}

# name -> (job, error class, what the message has to say)
BAD: dict[str, tuple[dict, str, list[str]]] = {
    "unknown_key": ({"byzantine": {"rull": "median"}}, "ConfigError", ["byzantine.rull", '"rule"']),
    "unknown_rule": ({"byzantine": {"rule": "medain"}}, "ConfigError", ["byzantine.rule", '"median"']),
    "auto": ({"byzantine": {"f": "auto"}}, "ConfigError", ["byzantine.f", "auto", "Leave the key out"]),
    "not_an_object": ({"byzantine": True}, "ConfigError", ["byzantine", "object"]),
    "f_as_text": ({"byzantine": {"f": "1"}}, "ConfigError", ["byzantine.f"]),
    "f_negative": ({"byzantine": {"f": -1}}, "ConfigError", ["byzantine.f"]),
    "f_too_large": ({"byzantine": {"f": 2}}, "InfeasibleError", ["byzantine.f", "5", "this job has 4"]),
    "krum_too_few": ({"byzantine": {"rule": "krum", "f": 1}}, "InfeasibleError", ["krum", "5", "2f+3", "median"]),
    "bulyan_too_few": ({"byzantine": {"rule": "bulyan", "f": 1}}, "InfeasibleError", ["bulyan", "7", "4f+3"]),
    "bucketing_too_few": (
        {"byzantine": {"rule": "median", "f": 1, "pre": ["bucketing"]}},
        "InfeasibleError",
        ["2 rows"],
    ),
    "mean_with_f": ({"byzantine": {"rule": "mean", "f": 1}}, "InfeasibleError", ["mean", "f=1"]),
    "rule_parameter": (
        {"byzantine": {"rule": {"name": "centered_clip", "iteration": 3}}},
        "ConfigError",
        ["byzantine.rule.iteration", '"iterations"'],
    ),
    "unknown_pre": ({"byzantine": {"pre": ["nmm"]}}, "ConfigError", ["byzantine.pre[0]", '"nnm"']),
    "unknown_scope": ({"byzantine": {"scope": "layer"}}, "ConfigError", ["byzantine.scope"]),
    "momentum": ({"byzantine": {"momentum": 0.9}}, "ConfigError", ["byzantine.momentum"]),
    "on_suspect": ({"byzantine": {"on_suspect": "explode"}}, "ConfigError", ["byzantine.on_suspect", "quarantine"]),
    "trust": ({"byzantine": {"trust": {"replicas": 3}}}, "ConfigError", ["byzantine.trust.replicas"]),
    "drill_name": ({"byzantine": {"drill": "sign_flop"}}, "ConfigError", ["byzantine.drill", "sign_flip"]),
    "drill_replica": (
        {"byzantine": {"drill": {"name": "nan", "replicas": [9]}}},
        "ConfigError",
        ["byzantine.drill.replicas", "9"],
    ),
    "drill_file": ({"byzantine": {"drill": "no/such.json"}}, "ConfigError", ["no/such.json"]),
    "log_directory": (
        {"byzantine": {"monitor": {"dir": "/proc/no/such/folder"}}},
        "ConfigError",
        ["byzantine.monitor.dir", "/proc/no/such/folder"],
    ),
    "several_at_once": ({"byzantine": {"f": -1, "rul": 1, "alpha": 2}}, "ConfigError", ["byzantine.rul", "alpha"]),
    "fp16_stage0": ({"stage": 0, "fp16": True, "ds": FP16}, "UnsupportedHostError", ["fp16", "stage 0", "8393"]),
    "quantized": (
        {"stage": 3, "ds": {**BF16, ZERO: {"zero_quantized_gradients": True}}},
        "UnsupportedHostError",
        ["zero_quantized_gradients"],
    ),
    "zenflow": (
        {
            "stage": 2,
            "ds": {
                **BF16,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},  # read by ZenFlow; the client's SGD is used
                ZERO: {
                    "offload_optimizer": {"device": "cpu", "pin_memory": False},
                    "zenflow": {
                        "topk_ratio": 0.1,
                        "update_interval": 4,
                        "full_warm_up_rounds": 0,
                        "overlap_step": False,
                        "select_strategy": "step",
                        "select_interval": 8,
                    },
                },
            },
        },
        "UnsupportedHostError",
        ["zenflow"],
    ),
    "sparse": ({"stage": 0, "sparse": True}, "UnsupportedHostError", ["sparse", "sparse=False"]),
    "deepcompile": ({"stage": 1, "ds": {"compile": {"deepcompile": True}}}, "UnsupportedHostError", ["deepcompile"]),
    "muon": ({"stage": 2, "optimizer": "muon"}, "UnsupportedHostError", ["Muon"]),
    "moe": ({"stage": 0, "moe": True, "byzantine": {"f": 1}}, "InfeasibleError", ["byzantine.f", "expert 2"]),
    "tensor_parallel": (
        {"stage": 1, "ds": {"tensor_parallel": {"autotp_size": 2}}, "byzantine": {"f": 1}},
        "InfeasibleError",
        ["byzantine.f", "tensor 2"],
    ),
    "no_optimizer": ({"stage": 0, "optimizer": "none"}, "UnprotectedError", ["no optimizer"]),
    "all_frozen": ({"stage": 0, "freeze_late": True}, "UnprotectedError", ["no parameter"]),
    "no_step": ({"kind": "no_backward", "stage": 0}, "UnprotectedError", ["no gradient has passed"]),
    "boundary_unmanaged": (
        {"stage": 2, "ds": {"managed_gradient_accumulation": False}, "byzantine": {"aggregate_at": "boundary"}},
        "UnsupportedHostError",
        ["aggregate_at", "managed_gradient_accumulation"],
    ),
    "ranks_differ": ({"kind": "ranks_differ", "stage": 1}, "ConfigError", ["differs between ranks"]),
}


def table():
    """Tensor parallelism comes last: DeepSpeed keeps its process groups for the rest of the process."""
    jobs = [{"kind": "refuse", "stage": 2, "byzantine": {}, **job, "name": name} for name, (job, _, _) in BAD.items()]
    last = [job for job in jobs if job["name"] == "tensor_parallel"]
    fit = {"name": "afterwards", "stage": 2, "steps": 2, "byzantine": {"f": 1}}
    return [job for job in jobs if job not in last] + [fit] + last


@pytest.fixture(scope="module")
def results():
    return run_world(table(), RANKS)


@pytest.mark.parametrize("name", BAD)
def test_refused_on_all_ranks(results, name):
    _, kind, words = BAD[name]
    for rank, result in enumerate(results[name]):
        error = str(result["error"])
        assert error.startswith(kind), f"rank {rank}: {error}\n{result.get('trace')}"
        for word in words:
            assert word in error, f"rank {rank}: {word!r} not in {error}"


def test_the_world_is_fit_afterwards(results):
    assert all(not result.get("error") for result in results["afterwards"])


def test_messages_differ(results):
    messages = [str(results[name][0]["error"]) for name in BAD]
    assert len(set(messages)) == len(messages)
