"""The examples of examples/llm/by_feature as a user starts them; the ready files in the kind of job they are for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import launcher
import pytest
from world import ROOT, run_world

pytestmark = [pytest.mark.launch, pytest.mark.usefixtures("compiled_op")]

RANKS = 6
EXAMPLES = ROOT / "examples" / "llm" / "by_feature"
CONFIGS = ROOT / "configs"
# Ready file -> the job of parallel_jobs.py that takes it. One stage of two tensor ranks has all axes of a 3-D job.
READY: dict[str, dict] = {
    "pipeline": {"kind": "pipeline", "tied": True, "gas": 4},
    "pipeline_tensor": {"kind": "pipeline", "stages": 1, "tensor": 2, "gas": 4},
    "tensor": {"kind": "autotp"},
    "experts": {"kind": "experts"},
    "sequence": {"kind": "sequence"},
    "hosts": {"kind": "dense"},
}
AUTO = {  # what Trainer and Accelerate would put in the place of "auto"
    "train_batch_size": 4 * RANKS,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": False},
    "optimizer": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01},
}


@pytest.mark.parametrize(("example", "ranks"), [("pipeline", [2, 5]), ("tensor", [4, 5])])
def test_an_example_learns_and_names_the_bad_replica(tmp_path: Path, example: str, ranks: list[int]):
    """The last replica sends -20 times its gradient: with the mean the loss would rise."""
    drill = str(CONFIGS / "drills" / "sign_flip.json")
    script = [str(EXAMPLES / f"{example}.py"), "--steps", "12", "--drill", drill, "--log", str(tmp_path)]
    ended = launcher.deepspeed(RANKS, script, timeout=600)
    assert ended.code == 0, ended.output[-6000:]
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", ended.output, re.MULTILINE)]
    assert len(losses) == 4, ended.output[-6000:]
    assert losses[-1] <= 0.85 * losses[0]
    suspects = [event["suspect"] for event in launcher.steps(tmp_path)]
    assert len(suspects) == 12
    assert suspects.count(2) >= 10, suspects
    assert f"most distant: replica 2 of 3 in {suspects.count(2)} of 12 steps (ranks {ranks}" in ended.output


def filled_in(config: dict, values: dict) -> dict:
    """A config with a value for every "auto"."""
    out = {}
    for key, value in config.items():
        inner = values.get(key, values)
        out[key] = filled_in(value, inner) if isinstance(value, dict) else inner if value == "auto" else value
    return out


@pytest.fixture(scope="module")
def trained():
    jobs = []
    for name, job in READY.items():
        config = filled_in(json.loads((CONFIGS / f"{name}.json").read_text()), AUTO)
        section = config.pop("byzantine")
        del section["monitor"]
        base = {"module": "parallel_jobs", "optimizer": "adamw", "steps": 8}
        base |= {"stage": config["zero_optimization"]["stage"], "micro_batch": config["train_micro_batch_size_per_gpu"]}
        jobs.append({**base, **job, "name": name, "ds": config, "byzantine": section})
    return run_world(jobs, RANKS, timeout=600, each=lambda rank: {"GROUP_RANK": str(rank // 2)})


@pytest.mark.parametrize("name", READY)
def test_a_ready_file_trains_three_replicas_of_two_ranks(trained, name: str):
    for rank, result in enumerate(trained[name]):
        assert not result.get("error"), f"rank {rank}: {result.get('error')}\n{result.get('trace')}"
    first = trained[name][0]
    assert len(first["replicas"]) == 3
    assert first["losses"][-1] < first["losses"][0]
    assert [event["kind"] for event in first["events"]] == ["run"] + ["step"] * 8
