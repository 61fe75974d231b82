"""Unchanged scripts under the `deepspeed` launcher, Hugging Face Trainer and Accelerate: the JSON alone decides."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from world import HERE, ROOT, environment, free_port

pytestmark = pytest.mark.launch

RANKS = 4
SHM = "from deepspeed.accelerator import get_accelerator as a; a().create_op_builder('ShareMemCommBuilder').load()"
CACHE = ROOT / ".cache" / "torch_extensions"


@pytest.fixture(scope="module", autouse=True)
def compiled_op():
    """The op that DeepSpeed wants at start on CPU: built once in one process, or the ranks wait for each other."""
    if (CACHE / "deepspeed_shm_comm" / "deepspeed_shm_comm.so").is_file():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / "deepspeed_shm_comm" / "lock").unlink(missing_ok=True)
    subprocess.run([sys.executable, "-c", SHM], env=env(), check=True, timeout=600, capture_output=True)


def env() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return environment(TORCH_EXTENSIONS_DIR=str(CACHE), PATH=path)


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


def run(command: list[str], port: int, timeout: float = 240) -> dict:
    """Run to the end; what rank 0 reported. `port`: the master's."""
    try:
        return run_and_report(command, timeout)
    finally:  # DeepSpeed's CPU op leaves 69 MB a rank in shared memory
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            left.unlink(missing_ok=True)


def run_and_report(command: list[str], timeout: float) -> dict:
    """Run to the end or the time-out."""
    process = subprocess.Popen(
        command, env=env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output = process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
        pytest.fail(f"hung: {' '.join(command)}\n{output[-3000:]}")
    found = [line for line in output.splitlines() if "RESULT{" in line]
    if not found:
        return {"error": output[-6000:], "code": process.returncode}
    return json.loads(found[0].split("RESULT", 1)[1]) | {"output": output}


def launch(config: Path, out: Path, *options: str) -> dict:
    script = [str(HERE / "scripts" / "trainer.py"), "--deepspeed", str(config), "--out", str(out), *options]
    binary = str(Path(sys.executable).parent / "deepspeed")
    port = free_port()
    return run([binary, "--num_gpus", str(RANKS), "--master_port", str(port), *script], port)


def steps(log: Path) -> list[dict]:
    lines = [json.loads(line) for line in (log / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step"]


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
        binary = str(Path(sys.executable).parent / "accelerate")
        port = free_port()
        results[name] = run(
            [binary, "launch", "--use_deepspeed", "--deepspeed_config_file", str(path), "--num_processes", str(RANKS),
             "--num_machines", "1", "--main_process_port", str(port), script], port
        )  # fmt: skip
        assert "error" not in results[name], results[name]["error"]
        assert results[name]["world"] == RANKS
    assert results["mean"]["final"] == pytest.approx(results["stock"]["final"], abs=1e-4)
    assert results["rule"]["final"] == pytest.approx(results["stock"]["final"], rel=0.25)
    assert all(event["suspect"] == 2 for event in steps(tmp_path / "rule_log"))
