"""Unchanged scripts under the `deepspeed` launcher, Hugging Face Trainer and Accelerate: the JSON alone decides."""

from __future__ import annotations

import json
from pathlib import Path

import launcher
import pytest
from launcher import Ended, steps
from world import HERE

pytestmark = [pytest.mark.launch, pytest.mark.usefixtures("compiled_op")]

RANKS = 4


def write(tmp_path: Path, name: str, stage: int, section: dict | None, **over) -> Path:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        **over,
    }
    if stage == 3:
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if section is not None:
        config["byzantine"] = {"monitor": {"dir": str(tmp_path / f"{name}_log")}, **section}
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(config))
    return path


def report(ended: Ended) -> dict:
    """What rank 0 reported, or how it failed."""
    found = [line for line in ended.output.splitlines() if "RESULT{" in line]
    if not found:
        return {"error": ended.output[-6000:], "code": ended.code}
    return json.loads(found[0].split("RESULT", 1)[1]) | {"output": ended.output}


def launch(config: Path, out: Path, *options: str) -> dict:
    script = [str(HERE / "scripts" / "trainer.py"), "--deepspeed", str(config), "--out", str(out), *options]
    return report(launcher.deepspeed(RANKS, script))


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stock")
    result = launch(write(folder, "stock", 2, None), folder / "out")
    assert "error" not in result, result["error"]
    return result


def test_trainer_with_the_mean_equals_stock(tmp_path, stock):
    result = launch(write(tmp_path, "mean", 2, {"rule": "mean", "f": 0}), tmp_path / "out")
    assert result.get("losses") == pytest.approx(stock["losses"], abs=2e-4), result.get("error")
    assert result["final"] == pytest.approx(stock["final"], abs=2e-4)
    logged = steps(tmp_path / "mean_log")
    assert [event["step"] for event in logged] == [0, 1, 2, 3, 4, 5]


def test_trainer_under_attack_saves_and_resumes(tmp_path, stock):
    """Six steps in one go, and three steps, a new launch and three more, give the same end."""
    drill = {"name": "sign_flip", "factor": 20.0, "replicas": [1]}
    config = write(tmp_path, "rule", 3, {"f": 1, "rule": "caf_gated", "drill": drill})
    whole = launch(config, tmp_path / "whole")
    assert whole.get("final") == pytest.approx(stock["final"], rel=0.05), whole.get("error")
    assert [event["suspect"] for event in steps(tmp_path / "rule_log")] == [1] * 6
    first = launch(config, tmp_path / "halves", "--steps", "3")
    assert first.get("steps") == 3, first.get("error")
    second = launch(config, tmp_path / "halves", "--steps", "6", "--resume")
    assert second.get("steps") == 6, second.get("error")
    assert second["final"] == pytest.approx(whole["final"], abs=1e-3)
    assert [event["step"] for event in steps(tmp_path / "rule_log")][-3:] == [3, 4, 5], "the log goes on where it was"


def test_trainer_with_lora_under_attack(tmp_path):
    clean = launch(write(tmp_path, "clean", 2, None), tmp_path / "clean", "--lora")
    drill = {"name": "nan", "replicas": [3]}
    result = launch(write(tmp_path, "lora", 2, {"f": 1, "drill": drill}), tmp_path / "out", "--lora")
    assert "error" not in result, result["error"]
    assert result["final"] == pytest.approx(clean["final"], rel=0.05)
    assert all(event["dropped"] == [3] for event in steps(tmp_path / "lora_log"))


def test_trainer_logs_our_metrics(tmp_path):
    """In Trainer's own history, and in what TensorBoard was given."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = launch(write(tmp_path, "metrics", 2, {"f": 1}), tmp_path / "out", "--metrics")
    assert "error" not in result, result["error"]
    assert {"loss", "byzantine/kept", "byzantine/suspect", "byzantine/e_value/3"} <= set(result["logged"])
    found = set()
    for file in tmp_path.rglob("events.out.tfevents*"):
        accumulator = EventAccumulator(str(file.parent))
        accumulator.Reload()
        found |= set(accumulator.Tags()["scalars"])
    assert any(tag.endswith("byzantine/kept") for tag in found), found


def test_trainer_with_tensor_parallelism(tmp_path):
    """Four ranks, two of them a replica: with the mean as the rule, what stock DeepSpeed does."""
    cut = {"tensor_parallel": {"autotp_size": 2}}
    stock = launch(write(tmp_path, "stock", 1, None, **cut), tmp_path / "stock")
    assert "error" not in stock, stock["error"]
    result = launch(write(tmp_path, "cut", 1, {"rule": "mean", "f": 0}, **cut), tmp_path / "out")
    assert result.get("losses") == pytest.approx(stock["losses"], abs=2e-4), result.get("error")
    run = json.loads((tmp_path / "cut_log" / "events.jsonl").read_text().splitlines()[0])
    assert run["ranks"] == {"0": [0, 1], "1": [2, 3]}


def test_a_bad_section_ends_the_launch_with_its_message(tmp_path):
    result = launch(write(tmp_path, "bad", 2, {"rule": "krum", "f": 2}), tmp_path / "out")
    assert result["code"] != 0
    assert "byzantine.f: krum with f=2 needs at least 7 replicas (2f+3); this job has 4" in result["error"]


def test_auto_in_the_section_is_refused(tmp_path):
    """Accelerate stops before we see it; either way the key is named."""
    result = launch(write(tmp_path, "auto", 2, {"f": "auto"}), tmp_path / "out")
    assert result["code"] != 0
    assert "byzantine.f" in result["error"]


def test_accelerate(tmp_path):
    script = str(HERE / "scripts" / "accelerated.py")
    zero = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
    shared = {**zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    results = {}
    for name, section in {
        "stock": None,
        "mean": {"rule": "mean", "f": 0},
        "rule": {"f": 1, "rule": "caf_gated", "drill": {"name": "scale", "factor": -20.0, "replicas": [2]}},
    }.items():
        config = dict(shared)
        if section is not None:
            config["byzantine"] = {"monitor": {"dir": str(tmp_path / f"{name}_log")}, **section}
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(config))
        results[name] = report(launcher.accelerate(RANKS, path, [script]))
        assert "error" not in results[name], results[name]["error"]
        assert results[name]["world"] == RANKS
    assert results["mean"]["final"] == pytest.approx(results["stock"]["final"], abs=1e-4)
    assert results["rule"]["final"] == pytest.approx(results["stock"]["final"], rel=0.25)
    assert all(event["suspect"] == 2 for event in steps(tmp_path / "rule_log"))
