"""Options of the section that change what the rule sees: aggregate_at, scope, drills, pre-aggregations, monitor."""

from __future__ import annotations

import pytest
import torch
from scenarios import BF16, FP32_ACCUMULATION, OFFLOAD, zero
from world import run_world

pytestmark = pytest.mark.launch

RANKS = 5
SHOUTING = {"rank": 4, "how": "scale", "factor": 5.0}
MODEL = {"rule": "multi_krum", "f": 1, "scope": "model"}
SHARD = {"rule": "multi_krum", "f": 1, "scope": "shard"}
BOUNDARY = {"rule": "median", "f": 1, "aggregate_at": "boundary"}
LATE = {"aggregate_at": "boundary", "rule": "mean", "f": 0}

JOBS: dict[str, dict] = {
    # aggregate_at: with it, stages 2 and 3 see what stage 1 sees
    "gas.z1": {"stage": 1, "gas": 3, "byzantine": {"rule": "median", "f": 1}},
    "gas.z2_micro": {"stage": 2, "gas": 3, "byzantine": {"rule": "median", "f": 1}},
    "gas.z2": {"stage": 2, "gas": 3, "byzantine": BOUNDARY},
    "gas.z2_scattered": {"stage": 2, "gas": 3, "byzantine": BOUNDARY, **zero(contiguous_gradients=False)},
    "gas.z2_offload": {"stage": 2, "gas": 3, "byzantine": BOUNDARY, "ds": OFFLOAD},
    "gas.z3": {"stage": 3, "gas": 3, "byzantine": BOUNDARY},
    "gas.z3_tiny": {"stage": 3, "gas": 3, "byzantine": BOUNDARY, **zero(reduce_bucket_size=3000)},
    "gas.z0": {"stage": 0, "gas": 3, "byzantine": BOUNDARY},
    "late.stock": {"stage": 2, "gas": 2},
    "late.z2": {"stage": 2, "gas": 2, "byzantine": LATE},
    "late.z3": {"stage": 3, "gas": 2, "byzantine": LATE},
    # scope model: one verdict for all tensors, alike in all stages
    "model.z0": {"stage": 0, "bad": SHOUTING, "byzantine": MODEL},
    "model.z1": {"stage": 1, "bad": SHOUTING, "byzantine": MODEL},
    "model.z2": {"stage": 2, "bad": SHOUTING, "byzantine": MODEL, **zero(reduce_bucket_size=3000)},
    "model.z2_scattered": {
        "stage": 2,
        "bad": SHOUTING,
        "byzantine": MODEL,
        **zero(contiguous_gradients=False, reduce_bucket_size=3000),
    },
    "model.z2_overlap": {"stage": 2, "bad": SHOUTING, "byzantine": MODEL, **zero(overlap_comm=True)},
    "model.z3": {"stage": 3, "bad": SHOUTING, "byzantine": MODEL, **zero(reduce_bucket_size=3000)},
    "model.z3_allreduce": {"stage": 3, "bad": SHOUTING, "byzantine": MODEL, **zero(reduce_scatter=False)},
    "model_gas.z2": {"stage": 2, "gas": 2, "bad": SHOUTING, "byzantine": MODEL},
    "model_gas.z3": {"stage": 3, "gas": 2, "bad": SHOUTING, "byzantine": MODEL},
    "model_bf16.z1": {"stage": 1, "byzantine": MODEL, "ds": {**BF16, **FP32_ACCUMULATION}},
    "model_bf16.z2": {"stage": 2, "byzantine": MODEL, "ds": {**BF16, **FP32_ACCUMULATION}},
    "model_nan.z2": {"stage": 2, "bad": {"rank": 1, "how": "nan"}, "byzantine": MODEL},
    # scope shard: no statistics travel; every layout decides for itself
    "shard.z0": {"stage": 0, "bad": SHOUTING, "byzantine": SHARD},
    "shard.z2": {"stage": 2, "bad": SHOUTING, "byzantine": SHARD},
    "shard.z3": {"stage": 3, "bad": SHOUTING, "byzantine": SHARD},
    "shard_nan.one": {"stage": 2, "bad": {"rank": 1, "how": "nan"}, "byzantine": SHARD},
    "shard_nan.two": {"stage": 2, "bad": {"ranks": [1, 2], "how": "nan", "from": 3}, "byzantine": SHARD},
    # the host's own reduction does not run as well
    "traffic.stock0": {"stage": 0, "kind": "traffic"},
    "traffic.ours0": {"stage": 0, "kind": "traffic", "byzantine": {"f": 1}},
    "traffic.stock1": {"stage": 1, "kind": "traffic"},
    "traffic.ours1": {"stage": 1, "kind": "traffic", "byzantine": {"f": 1}},
    "traffic.stock2": {"stage": 2, "kind": "traffic"},
    "traffic.ours2": {"stage": 2, "kind": "traffic", "byzantine": {"f": 1}},
    "traffic.stock3": {"stage": 3, "kind": "traffic"},
    "traffic.ours3": {"stage": 3, "kind": "traffic", "byzantine": {"f": 1}},
    # drills need no change in the script
    "drill.clean": {"stage": 2, "byzantine": {"rule": "median", "f": 1}},
    **{
        f"drill.{name}": {
            "stage": 2,
            "byzantine": {"rule": "median", "f": 1, "drill": {"name": name, "replicas": [4], "start": 1, **options}},
        }
        for name, options in {
            "sign_flip": {"factor": 20.0},
            "scale": {"factor": 1000.0},
            "nan": {},
            "gaussian": {"sigma": 30.0},
            "alie": {"z": 1.5},
            "ipm": {"epsilon": 3.0},
        }.items()
    },
    "drill.stopped": {
        "stage": 2,
        "byzantine": {
            "rule": "mean",
            "f": 0,
            "drill": {"name": "scale", "factor": 100.0, "replicas": [4], "start": 1, "stop": 2},
        },
    },
    "sparse_log": {"stage": 2, "byzantine": {"rule": "median", "f": 1, "monitor": {"every": 2}}},
    "bucketing.z2": {"stage": 2, "byzantine": {"rule": "median", "pre": ["bucketing"], "f": 1}},
    "bucketing.z3": {"stage": 3, "byzantine": {"rule": "median", "pre": ["bucketing"], "f": 1}},
}


@pytest.fixture(scope="module")
def results():
    return run_world([{"steps": 4, **job, "name": name} for name, job in JOBS.items()], RANKS, timeout=900)


def of(results, name):
    for result in results[name]:
        assert not result.get("error"), f"{result.get('error')}\n{result.get('trace')}"
    if "checksum" in results[name][0]:
        assert all(torch.equal(r["checksum"], results[name][0]["checksum"]) for r in results[name]), "ranks differ"
    return results[name][0]


def gap(a, b):
    return max(float((a["weights"][n] - b["weights"][n]).abs().max()) for n in a["weights"])


def steps(result):
    return [event for event in result["events"] if event["kind"] == "step"]


@pytest.mark.parametrize("layout", ["z0", "z2", "z2_scattered", "z2_offload", "z3", "z3_tiny"])
def test_boundary_aggregates_the_accumulated_gradients(results, layout):
    assert gap(of(results, f"gas.{layout}"), of(results, "gas.z1")) <= 1e-6


def test_micro_steps_are_something_else(results):
    assert gap(of(results, "gas.z2_micro"), of(results, "gas.z1")) > 1e-4


@pytest.mark.parametrize("stage", ["z2", "z3"])
def test_boundary_with_the_mean_equals_stock(results, stage):
    assert gap(of(results, f"late.{stage}"), of(results, "late.stock")) <= 1e-6


@pytest.mark.parametrize("layout", ["z1", "z2", "z2_scattered", "z2_overlap", "z3", "z3_allreduce"])
def test_model_scope_does_not_depend_on_the_layout(results, layout):
    assert gap(of(results, f"model.{layout}"), of(results, "model.z0")) <= 1e-6


def test_model_scope_in_micro_steps_and_with_fp32_accumulation(results):
    assert gap(of(results, "model_gas.z2"), of(results, "model_gas.z3")) <= 1e-6
    assert gap(of(results, "model_bf16.z1"), of(results, "model_bf16.z2")) <= 2e-3


def test_model_scope_drops_a_replica_from_all_tensors(results):
    assert all(step["dropped"] == [1] for step in steps(of(results, "model_nan.z2")))


@pytest.mark.parametrize("stage", ["z0", "z2", "z3"])
def test_shard_scope_survives_and_sends_no_statistics(results, stage):
    shard, tensor = of(results, f"shard.{stage}"), of(results, f"model.{stage}")
    assert all(step["suspect"] == 4 for step in steps(shard))
    assert shard["held_out"] == pytest.approx(tensor["held_out"], rel=0.05)


def test_shard_scope_agrees_on_what_is_not_finite(results):
    assert all(step["dropped"] == [1] for step in steps(of(results, "shard_nan.one")))
    two = of(results, "shard_nan.two")
    assert [bool(step["unsafe"]) for step in steps(two)] == [False, False, False, True]
    assert all(r["skipped"] == 1 for r in results["shard_nan.two"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_does_not_reduce_as_well(results, stage):
    """DeepSpeed's own all-reduce, reduce and reduce-scatter carry the gradients in stock, and nothing in ours."""
    stock, ours = of(results, f"traffic.stock{stage}"), of(results, f"traffic.ours{stage}")
    assert sum(stock["collectives"].values()) >= stock["parameters"]
    assert sum(ours["collectives"].values()) < 0.01 * ours["parameters"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_are_counted_and_not_more_than_stock(results, stage):
    """A tiny model: the partial Gram matrices are not yet small against it."""
    event = steps(of(results, f"traffic.ours{stage}"))[0]
    n, numel = RANKS, results[f"traffic.ours{stage}"][0]["parameters"]
    reduce_scatter = 4 * numel * (n - 1) / n
    assert event["stock_bytes"] == pytest.approx(reduce_scatter * (1 if stage == 3 else 2), rel=1e-3)
    assert event["bytes"] >= 0.99 * reduce_scatter
    assert event["bytes"] <= 1.25 * event["stock_bytes"]


@pytest.mark.parametrize("attack", ["sign_flip", "scale", "nan", "gaussian", "alie", "ipm"])
def test_drills_change_the_rows_and_the_rule_holds(results, attack):
    drill, clean = of(results, f"drill.{attack}"), of(results, "drill.clean")
    assert 1e-5 < gap(drill, clean) < 0.5
    assert drill["held_out"] == pytest.approx(clean["held_out"], rel=0.05)
    if attack not in ("alie", "ipm", "nan"):  # those are made to stay close
        assert [step["suspect"] for step in steps(drill)][1:] == [4, 4, 4]
    if attack == "nan":
        assert [step["dropped"] for step in steps(drill)] == [[], [4], [4], [4]]


def test_a_drill_starts_and_stops(results):
    """One huge row of five is four times as far from their mean as the others are; in step 1 only."""
    distances = [step["distances"] for step in steps(of(results, "drill.stopped"))]
    ratios = [d[4] / max(d[:4]) for d in distances]
    assert ratios[1] == pytest.approx(4.0, rel=0.05)
    assert max(ratios[0], ratios[2], ratios[3]) < 2.0


def test_every_second_step_is_logged(results):
    assert [step["step"] for step in steps(of(results, "sparse_log"))] == [0, 2]


def test_random_buckets_are_the_same_on_all_ranks(results):
    assert gap(of(results, "bucketing.z2"), of(results, "bucketing.z3")) <= 1e-6
