"""Save, resume and go on: on the same world size, and on another one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from scenarios import BF16
from world import environment, run_world

pytestmark = pytest.mark.launch

RULE = {"rule": "trimmed_mean", "f": 1}
BAD = {"rank": 1, "how": "scale", "factor": -20.0}
SAME = {
    "z0": {"stage": 0},
    "z1_bf16": {"stage": 1, "ds": BF16},
    "z2": {"stage": 2},
    "z3": {"stage": 3},
}


def job(name, **over):
    return {"name": name, "optimizer": "adamw", "bad": BAD, "byzantine": dict(RULE), "steps": 4, **over}


def finished(results, name):
    for result in results[name]:
        assert not result.get("error"), f"{result.get('error')}\n{result.get('trace')}"
    return results[name][0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def four(folder):
    jobs = []
    for name, host in SAME.items():
        jobs.append(job(f"{name}.whole", **host))
        jobs.append(job(f"{name}.halves", kind="save_and_resume", directory=str(folder / f"same_{name}"), **host))
    for name in ("z0", "z2"):
        jobs.append(job(f"{name}.save", kind="save", directory=str(folder / name), **SAME[name]))
    return run_world(jobs, 4)


@pytest.mark.parametrize("name", SAME)
def test_halves_equal_the_whole(four, name):
    whole, halves = finished(four, f"{name}.whole"), finished(four, f"{name}.halves")
    for tensor, weight in whole["weights"].items():
        torch.testing.assert_close(halves["weights"][tensor], weight, rtol=0, atol=1e-6, msg=tensor)
    assert halves["global_steps"] == 4
    assert [e["step"] for e in halves["events"] if e["kind"] == "step"] == [2, 3]


@pytest.fixture(scope="module")
def three(four, folder):
    """Three ranks go on where four have stopped; ZeRO partitions are converted to DeepSpeed's universal format."""
    finished(four, "z2.save")
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    paths = ["--input_folder", str(folder / "z2" / "saved"), "--output_folder", str(folder / "z2" / "universal")]
    subprocess.run([*command, *paths], env=environment(), check=True, capture_output=True, timeout=300)
    universal = {"checkpoint": {"load_universal": True}}
    return run_world(
        [
            job("z0", kind="resume", directory=str(folder / "z0"), tag="saved", **SAME["z0"]),
            job("z2", kind="resume", directory=str(folder / "z2"), tag="universal", stage=2, ds=universal),
        ],
        3,
    )


@pytest.mark.parametrize("name", ["z0", "z2"])
def test_another_world_size_goes_on(four, three, name):
    saved, resumed = finished(four, f"{name}.save"), finished(three, name)
    assert resumed["held_out_before"] == pytest.approx(saved["held_out"], abs=1e-5)
    assert resumed["held_out"] < resumed["held_out_before"]
    assert all(torch.equal(r["checksum"], resumed["checksum"]) for r in three[name])
    steps = [e for e in resumed["events"] if e["kind"] == "step"]
    assert [e["suspect"] for e in steps] == [1, 1]
    assert len(steps[0]["distances"]) == 3
