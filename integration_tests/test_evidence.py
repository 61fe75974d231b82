"""The evidence on real engines: who is named, how fast, what is done about it, and what survives a restart."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from evidence_jobs import read_events
from scenarios import EVIDENCE, EVIDENCE_RANKS, evidence
from world import ROOT, environment, free_port, run_world

from ds_byzantine.adapters.deepspeed.leave import EXIT_CODE

pytestmark = pytest.mark.launch
LEAVER = Path(__file__).parent / "scripts" / "leaver.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evidence")
    found = run_world(evidence(folder), EVIDENCE_RANKS, timeout=900)
    return {**found, "folder": folder}


def good(results, name):
    for rank, result in enumerate(results[name]):
        assert not result.get("error"), f"{name}, rank {rank}: {result.get('error')}\n{result.get('trace')}"
    return results[name]


def verdicts(result):
    return [event for event in result["events"] if event["kind"] == "verdict"]


@pytest.mark.parametrize("name", [name for name in EVIDENCE if "named" in EVIDENCE[name][1]])
def test_the_bad_replica_is_named(results, name):
    ranks, expected = good(results, name), EVIDENCE[name][1]
    found = verdicts(ranks[0])
    assert expected["named"] in {verdict["replica"] for verdict in found}
    for verdict in found:
        assert verdict["replica"] in expected.get("among", [expected["named"]])
        assert verdict["evidence"] == expected["kind"]
        assert verdict["log10_e"] >= verdict["bound"]
        assert verdict["step"] <= expected["within"], verdict
        assert verdict["ranks"] == [verdict["replica"]]
    assert all(result["evidence"] == ranks[0]["evidence"] for result in ranks), "ranks disagree"
    assert any(f"replica {expected['named']}" in line and "e-value" in line for line in ranks[0]["messages"])


@pytest.mark.parametrize("name", [name for name in EVIDENCE if name.startswith("healthy")])
def test_a_healthy_run_names_nobody(results, name):
    ranks = good(results, name)
    assert verdicts(ranks[0]) == []
    assert ranks[0]["named"] == []
    steps = [event for event in ranks[0]["events"] if event["kind"] == "step"]
    assert len(steps) == EVIDENCE[name][0]["steps"]
    assert all(event["loss"] is not None and event["time"] > 0 for event in steps)
    told = [event for event in steps if event["regime_ratio"] is not None]
    assert len(told) >= len(steps) // 10
    assert all(-1 <= e["cosine_min"] <= 1 <= e["norm_dispersion"] and len(e["norms"]) == 5 for e in told)


def test_quarantine_leaves_the_rows_out(results):
    ranks = good(results, "quarantine")
    [verdict] = verdicts(ranks[0])
    assert verdict["action"] == "quarantine"
    assert all(result["quarantined"] == [3] for result in ranks)
    after = [e for e in ranks[0]["events"] if e["kind"] == "step" and e["step"] > verdict["step"]]
    assert after
    for event in after:
        assert event["kept"] == [0, 1, 2, 4]
        assert event["distances"][3] is None
        assert event["dropped"] == []
    assert ranks[0]["held_out"] <= 1.05 * good(results, "healthy_short")[0]["held_out"]


def test_never_more_than_f_in_quarantine(results):
    ranks = good(results, "quarantine_two")
    actions = [verdict["action"] for verdict in verdicts(ranks[0])]
    assert actions == ["quarantine", "none"]
    assert len(ranks[0]["quarantined"]) == 1


@pytest.mark.parametrize("name", ["resume_z0", "resume_z2", "resume_z3"])
def test_evidence_survives_a_restart(results, name):
    ranks = good(results, name)
    first = ranks[0]
    assert first["before"]["outlying"][3] > 1
    assert first["named_before"] == [], "half of the run is not enough"
    assert first["named"] == [3]
    assert all(result["after"] == first["after"] for result in ranks)
    runs = [event for event in first["events"] if event["kind"] == "run"]
    assert [event["step"] for event in runs] == [0, 8]


def test_quarantine_survives_a_restart(results):
    ranks = good(results, "resume_quarantine")
    assert ranks[0]["named_before"] == ranks[0]["named"] == [3]
    later = [e for e in ranks[0]["events"] if e["kind"] == "step" and e["step"] >= 20]
    assert all(event["quarantined"] == [3] and event["kept"] == [0, 1, 2, 4] for event in later)


def test_evidence_survives_a_restart_with_fewer_replicas(results):
    """Four replicas on one host take over from the first four of five."""
    good(results, "resume_z0")
    job = {
        "module": "evidence_jobs", "kind": "taken_over", "name": "fewer", "stage": 0, "byzantine": {"f": 1},
        "directory": str(results["folder"] / "resume_z0"), "tag": "half",
    }  # fmt: skip
    ranks = run_world([job], EVIDENCE_RANKS - 1, timeout=200)["fewer"]
    assert not ranks[0].get("error"), ranks[0]
    kept = results["resume_z0"][0]["before"]["outlying"]
    assert ranks[0]["evidence"]["outlying"] == kept[: EVIDENCE_RANKS - 1]


def test_deepspeed_monitors(results):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    good(results, "monitors")
    folder = results["folder"] / "monitors"
    accumulator = EventAccumulator(str(next(folder.rglob("events.out.tfevents*")).parent))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    assert {"byzantine/suspect", "byzantine/kept", "byzantine/distance/4", "byzantine/e_value/0"} <= set(tags)
    assert [s.value for s in accumulator.Scalars("byzantine/kept")] == [5.0] * 4
    [file] = folder.rglob("*byzantine_kept.csv")
    rows = list(csv.reader(file.open()))
    assert [float(row[1]) for row in rows[1:]] == [5.0] * 4


# -- launchers ---------------------------------------------------------------------------------------------------------


def config(tmp_path: Path, **section: object) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 16,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": 2},
                "byzantine": {"f": 1, "monitor": {"dir": str(tmp_path / "run")}, **section},
            }
        )
    )
    return path


def commands(file: Path, *options: str) -> dict[str, list[str]]:
    port, folder = str(free_port()), Path(sys.executable).parent
    script = [str(LEAVER), "--deepspeed_config", str(file), *options]
    return {
        "deepspeed": [str(folder / "deepspeed"), "--num_gpus", "4", "--master_port", port, *script],
        "torchrun": [str(folder / "torchrun"), "--nproc_per_node", "4", "--master_port", port, *script],
    }


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_checkpoint_and_exit(tmp_path, launcher):
    drill = {"name": "scale", "factor": -5.0, "replicas": [2], "start": 3}
    file = config(tmp_path, on_suspect="checkpoint_exit", drill=drill)
    done = subprocess.run(
        commands(file)[launcher], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode != 0, output[-2000:]
    assert launcher != "deepspeed" or done.returncode == EXIT_CODE, output[-2000:]
    assert f"exit code {EXIT_CODE}" in output
    found = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert found["exit_code"] == EXIT_CODE
    [verdict] = found["verdicts"]
    assert (verdict["replica"], verdict["ranks"], verdict["action"]) == (2, [2], "checkpoint_exit")
    saved = Path(found["checkpoint"]) / found["tag"]
    assert len(list(saved.glob("*optim_states.pt"))) == 4
    assert read_events(tmp_path / "run")[-1]["named"] == [2]


def test_events_can_be_read_after_a_kill(tmp_path):
    """kill -9 of all ranks in the middle: what was written is whole, and the report is made from it."""
    file = config(tmp_path, drill={"name": "scale", "factor": -5.0, "replicas": [2], "start": 3})
    log = tmp_path / "run" / "events.jsonl"
    process = subprocess.Popen(
        commands(file)["deepspeed"], env=environment(), cwd=ROOT, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        end = time.monotonic() + 180
        while time.monotonic() < end and not (log.exists() and len(log.read_bytes().splitlines()) > 30):
            time.sleep(0.2)
    finally:
        subprocess.run(["pkill", "-9", "-f", str(file)], check=False)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = read_events(tmp_path / "run")
    assert len(found) > 30
    assert [e["replica"] for e in found if e["kind"] == "verdict"] == [2]
    report = [str(Path(sys.executable).parent / "ds-byzantine"), "report", str(tmp_path / "run"), "--json"]
    done = subprocess.run(report, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "2" in json.dumps(json.loads(done.stdout))
