"""The overflow flag and the clip norm are no door: up to f non-finite rows change nothing, more skip the step."""

from __future__ import annotations

import math

import pytest
import torch
from scenarios import BF16, FP32_ACCUMULATION, OFFLOAD, ZERO
from world import run_world

pytestmark = pytest.mark.launch

CLIP = {"gradient_clipping": 1.0}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
HOSTS = {
    "z0": {"stage": 0, "ds": CLIP},
    "z0_bf16": {"stage": 0, "ds": {**CLIP, **BF16}},
    "z1": {"stage": 1, "ds": CLIP},
    "z1_no_norm": {"stage": 1, "ds": {ZERO: {"compute_grad_norm": False}}},
    "z1_bf16_optimizer": {"stage": 1, "ds": {**CLIP, **BF16, **FP32_ACCUMULATION}},
    "z2": {"stage": 2, "ds": CLIP},
    "z2_scattered": {"stage": 2, "ds": {**CLIP, ZERO: {"contiguous_gradients": False}}},
    "z2_offload": {"stage": 2, "ds": {**CLIP, **OFFLOAD}},
    "z2_unchecked": {"stage": 2, "ds": {"bf16": {"enabled": True, "check_grad_overflow": False}}},
    "z2_fp16": {"stage": 2, "fp16": True, "ds": {**CLIP, **FP16}},
    "z3": {"stage": 3, "ds": CLIP},
    "z3_bf16": {"stage": 3, "ds": {**CLIP, **BF16}},
    "z3_offload": {"stage": 3, "ds": {**CLIP, **OFFLOAD}},
    "z3_fp16": {"stage": 3, "fp16": True, "ds": {**CLIP, **FP16}},
}
RANKS = 4
STEPS = 4


def table():
    jobs = []
    for host, job in HOSTS.items():
        for name, ranks in (("one", [2]), ("two", [1, 2])):
            bad = {"ranks": ranks, "how": "nan", "from": 2}
            section = {"rule": "trimmed_mean", "f": 1}
            jobs.append({**job, "name": f"{host}.{name}", "steps": STEPS, "bad": bad, "byzantine": section})
    return jobs


@pytest.fixture(scope="module")
def results():
    return run_world(table(), RANKS)


def finished(results, name):
    for result in results[name]:
        assert not result.get("error"), f"{result.get('error')}\n{result.get('trace')}"
    return results[name]


@pytest.mark.parametrize("host", HOSTS)
def test_one_nan_replica_neither_skips_nor_reaches_the_norm(results, host):
    ranks = finished(results, f"{host}.one")
    assert ranks[0]["skipped"] == 0
    assert all(bool(torch.isfinite(w).all()) for w in ranks[0]["weights"].values())
    if ranks[0]["norm"] is not None:
        assert math.isfinite(ranks[0]["norm"])
    steps = [e for e in ranks[0]["events"] if e["kind"] == "step"]
    assert [e["dropped"] for e in steps] == [[], [], [2], [2]]
    assert all(torch.equal(r["checksum"], ranks[0]["checksum"]) for r in ranks)
    lines = [line for line in ranks[0]["messages"] if "replica 2 (rank 2 on " in line]
    assert len(lines) == 2, "one line in step 2, one in step 3"
    assert not any("sent NaN" in line for rank in ranks[1:] for line in rank["messages"]), "the first rank speaks"


@pytest.mark.parametrize("host", HOSTS)
def test_more_nan_replicas_than_f_skip_the_step_and_are_named(results, host):
    ranks = finished(results, f"{host}.two")
    assert ranks[0]["skipped"] == 2, "steps 2 and 3 are not applied"
    assert all(bool(torch.isfinite(w).all()) for w in ranks[0]["weights"].values())
    steps = [e for e in ranks[0]["events"] if e["kind"] == "step"]
    assert [bool(e["unsafe"]) for e in steps] == [False, False, True, True]
    assert all(replicas == [1, 2] for replicas in steps[2]["unsafe"].values())
    assert any("self_attn" in tensor for tensor in steps[2]["unsafe"])
    assert all(r["skipped"] == 2 for r in ranks)
    lines = [line for line in ranks[0]["messages"] if "is skipped" in line]
    assert len(lines) == 2
    assert all("replicas 1, 2 sent NaN or Inf for model." in line and "f=1" in line for line in lines)
