"""The oldest DeepSpeed that is supported, installed beside the current one in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from jobs import merged
from scenarios import MEAN, REDUCTIONS, REDUCTIONS_BF16, ZERO, pairs
from world import ROOT, environment, run_world

pytestmark = pytest.mark.launch

VERSION = "0.18.3"
FOLDER = ROOT / ".cache" / f"deepspeed-{VERSION}"
RANKS = 4

# What 0.18.3 has: no gradient_allreduce_op (0.19.6). Without contiguous gradients its own reduction is silently skipped
# on CPU, so stock is no reference there: ours is compared with the contiguous run instead.
NAMES = ["z0", "z0_gas", "z0_predivide", "z1", "z1_gas", "z1_overlap", "z2", "z2_gas", "z2_tiny", "z2_overlap_tiny",
         "z2_allreduce", "z2_round_robin", "z2_offload", "z2_unused", "z2_lora", "z2_clip", "z3", "z3_gas", "z3_tiny",
         "z3_allreduce", "z3_offload", "z3_lora", "z3_init"]  # fmt: skip
NAMES_BF16 = ["z1_bf16", "z2_bf16", "z2_bf16_fp32acc", "z3_bf16"]
# Before 0.18.6 these divide by a loss scale that was never applied; before 0.19.2 reductions cannot be postponed.
REFUSED = {
    "z0_bf16": ({**REDUCTIONS_BF16["z0_bf16"], "byzantine": {"f": 1}}, "7839"),
    "z1_bf16_fp32acc": ({**REDUCTIONS_BF16["z1_bf16_fp32acc"], "byzantine": {"f": 1}}, "7839"),
    "boundary": ({"stage": 2, "gas": 2, "byzantine": {"f": 1, "aggregate_at": "boundary"}}, "byzantine.aggregate_at"),
}
RULE = {"rule": "trimmed_mean", "pre": ["nnm"], "f": 1}
ATTACKED = {"steps": 20, "bad": {"rank": 1, "how": "scale", "factor": -20.0}}
NAN = {"steps": 4, "bad": {"rank": 1, "how": "nan"}, "ds": {"gradient_clipping": 1.0}}
TWO_NAN = {"steps": 4, "bad": {"ranks": [1, 2], "how": "nan", "from": 2}}


@pytest.fixture(scope="module")
def older():
    """The environment of a rank that imports the older version."""
    if not (FOLDER / "deepspeed" / "__init__.py").exists():
        options = ["--no-deps", "--no-build-isolation", "--no-compile", "--target", str(FOLDER)]
        command = [sys.executable, "-m", "pip", "install", "--quiet", *options, f"deepspeed=={VERSION}"]
        built = subprocess.run(command, env=environment(DS_BUILD_OPS="0"), capture_output=True, text=True, timeout=600)
        assert built.returncode == 0, built.stderr
    return {"PYTHONPATH": os.pathsep.join([str(FOLDER), environment()["PYTHONPATH"]])}


@pytest.fixture(scope="module")
def results(older):
    table = {name: REDUCTIONS[name] for name in NAMES} | {name: REDUCTIONS_BF16[name] for name in NAMES_BF16}
    jobs = [{"name": "environment", "kind": "environment"}, *pairs(table)]
    jobs.append({**REDUCTIONS["z2_scattered"], "name": "z2_scattered.ours", "byzantine": dict(MEAN)})
    for stage in range(4):
        jobs.append({**ATTACKED, "name": f"z{stage}.clean", "stage": stage, "bad": None})
        jobs.append({**ATTACKED, "name": f"z{stage}.attacked", "stage": stage, "byzantine": dict(RULE)})
        jobs.append({**NAN, "name": f"z{stage}.nan", "stage": stage, "byzantine": dict(RULE)})
        jobs.append({**TWO_NAN, "name": f"z{stage}.two_nan", "stage": stage, "byzantine": dict(RULE)})
    jobs += [{**job, "name": name, "kind": "refuse"} for name, (job, _) in REFUSED.items()]
    return run_world([waiting(job) for job in jobs], RANKS, timeout=900, env=older)


def waiting(job):
    """Before 0.19.8, stage 3 on gloo does not wait for the all-gather of its persistent parameters after a step, and
    now and then computes with what lay in memory before (stock runs end in NaN): let no parameter be persistent."""
    if job.get("stage") != 3:
        return job
    return {**job, "ds": merged(job.get("ds", {}), {ZERO: {"stage3_param_persistence_threshold": 0}})}


def finished(results, name):
    for result in results[name]:
        assert not result.get("error"), f"{result.get('error')}\n{result.get('trace')}"
    return results[name][0]


def gap(a, b):
    assert a["weights"].keys() == b["weights"].keys()
    return max(float((a["weights"][n] - b["weights"][n]).abs().max()) for n in a["weights"])


def test_it_is_the_older_version(results):
    assert finished(results, "environment")["deepspeed"].startswith(VERSION)


@pytest.mark.parametrize("name", [*NAMES, *NAMES_BF16])
def test_mean_equals_stock(results, name):
    stock, ours = finished(results, f"{name}.stock"), finished(results, f"{name}.ours")
    assert ours["bound"]
    assert gap(stock, ours) <= (1e-6 if name in NAMES else 2e-3)
    assert all(torch.equal(r["checksum"], ours["checksum"]) for r in results[f"{name}.ours"])


def test_gradients_that_are_not_contiguous_are_aggregated_too(results):
    assert gap(finished(results, "z2_scattered.ours"), finished(results, "z1_gas.stock")) <= 1e-6


@pytest.mark.parametrize("stage", range(4))
def test_the_rule_holds(results, stage):
    clean, attacked = finished(results, f"z{stage}.clean"), finished(results, f"z{stage}.attacked")
    assert attacked["held_out"] == pytest.approx(clean["held_out"], rel=0.05)
    assert gap(attacked, finished(results, "z0.attacked")) <= 1e-5


@pytest.mark.parametrize("stage", range(4))
def test_nan_rows_are_dropped_and_too_many_skip_the_step(results, stage):
    one, two = finished(results, f"z{stage}.nan"), finished(results, f"z{stage}.two_nan")
    assert (one["skipped"], two["skipped"]) == (0, 2)
    for result in (one, two):
        assert all(bool(torch.isfinite(w).all()) for w in result["weights"].values())


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_older_version_cannot_do_is_refused(results, name):
    for result in results[name]:
        assert str(result["error"]).startswith("UnsupportedHostError")
        assert REFUSED[name][1] in str(result["error"])
