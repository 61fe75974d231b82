"""How a section takes effect, and that nothing happens without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from world import ROOT, environment, free_port, run_world

pytestmark = pytest.mark.launch

OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}

SCRIPT = """
import json, os, sys
{first}
import torch
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
{after}
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
config = json.loads(os.environ["DS_CONFIG"])
engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
for step in range(3):
    torch.manual_seed(int(os.environ["RANK"]) + 10 * step)
    engine.backward(engine(torch.randn(3, 4)).square().mean())
    engine.step()
{last}
ours = [n for o in (engine, engine.optimizer) for n, v in vars(o).items()
        if callable(v) and str(getattr(v, "__module__", "")).startswith("ds_byzantine")]
if os.environ["RANK"] == "0":
    print("RESULT" + json.dumps({{"ours": ours, "argv": sys.argv[1:], "weights": model.weight.flatten().tolist(),
          "torch_free": "{first}" == "" , "modules": sorted(m for m in sys.modules if m.startswith("ds_byzantine"))}}))
sys.stdout.flush()
os._exit(0)
"""


def config(section, stage=1):
    base = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }
    return base if section is None else {**base, "byzantine": section}


def start(tmp_path, section, command=(), *, first="", after="", last="", ranks=2, env=None):
    """Run SCRIPT in a world of its own; what rank 0 printed, or the error of the first rank that failed."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(first=first, after=after, last=last))
    if isinstance(section, dict):
        section = {"monitor": {"dir": str(tmp_path / "log")}, **section}
    port = str(free_port())
    shared = {"DS_CONFIG": json.dumps(config(section)), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, *command, str(script)],
            env=environment(RANK=str(r), LOCAL_RANK=str(r), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **shared)
            | (env or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(ranks)
    ]
    outputs = [p.communicate(timeout=180) for p in processes]
    found = [line for line in outputs[0][0].splitlines() if line.startswith("RESULT")]
    if not found:
        return {"error": outputs[0][1]}
    return json.loads(found[0][len("RESULT") :]) | {"stderr": outputs[0][1]}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return start(tmp_path_factory.mktemp("stock"), None, env=OFF)


def test_json_alone_is_enough(tmp_path, stock):
    """The package is installed; the script does not know it."""
    result = start(tmp_path, {"rule": "mean", "f": 0})
    assert "average_tensor" in result["ours"], result
    assert "ds_byzantine" in result["stderr"], "the banner line"
    assert (tmp_path / "log" / "events.jsonl").exists()
    assert result["weights"] == pytest.approx(stock["weights"], abs=1e-6)


def test_json_alone_is_enough_when_deepspeed_is_imported_first(tmp_path):
    assert "average_tensor" in start(tmp_path, {"rule": "mean", "f": 0}, first="import deepspeed")["ours"]


def test_nothing_is_patched_without_a_section(tmp_path, stock):
    after = "import ds_byzantine"
    result = start(tmp_path, None, after=after)
    assert result["ours"] == []
    assert result["weights"] == stock["weights"], "bit-identical"
    assert not any(m.startswith("ds_byzantine.adapters") for m in result["modules"])
    assert not any(m.startswith("ds_byzantine.rules") for m in result["modules"])


def test_enabled_false_is_bit_identical_to_never_installed(tmp_path, stock):
    result = start(tmp_path, {"enabled": False})
    assert result["ours"] == []
    assert result["weights"] == stock["weights"]


def test_uninstall_is_bit_identical_to_never_installed(tmp_path, stock):
    undo = "import ds_byzantine; ds_byzantine.install(); ds_byzantine.uninstall()"
    result = start(tmp_path, {"rule": "median", "f": 0}, after=undo)
    assert result["ours"] == []
    assert result["weights"] == stock["weights"]


def test_install_is_the_explicit_way(tmp_path):
    result = start(tmp_path, {"rule": "mean", "f": 0}, after="import ds_byzantine; ds_byzantine.install()", env=OFF)
    assert "average_tensor" in result["ours"], result


def test_install_after_the_engine_was_built_is_an_error(tmp_path):
    last = "import ds_byzantine; ds_byzantine.install()"
    result = start(tmp_path, {"rule": "mean", "f": 0}, last=last, env=OFF)
    assert "UnprotectedError" in result["error"]
    assert "before deepspeed.initialize" in result["error"]


def test_launch_module_is_the_third_way(tmp_path):
    command = ("-m", "ds_byzantine.launch", "--local_rank=0")
    result = start(tmp_path, {"rule": "mean", "f": 0}, command, env=OFF)
    assert "average_tensor" in result["ours"], result
    assert result["argv"] == ["--local_rank=0"], "the launcher's argument reaches the script"


def test_launch_module_says_what_is_wrong(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "ds_byzantine.launch", str(tmp_path / "none.py")],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 2
    assert "no such script" in run.stderr


def test_one_replica_passes_through_and_says_so(tmp_path):
    result = start(tmp_path, {}, ranks=1)
    assert result["ours"] == []
    assert "1 replica" in result["stderr"]


def test_importing_torch_stays_light():
    """The entry point runs at the end of every `import torch`: it may not pull in anything heavy."""
    code = (
        "import sys, torch; loaded = set(sys.modules); "
        "print([m for m in loaded if m.startswith(('ds_byzantine', 'pydantic', 'deepspeed', 'transformers'))]); "
        "import ds_byzantine; print(sorted(set(sys.modules) - loaded))"
    )
    out = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    at_autoload, by_import = (eval(line) for line in out.stdout.splitlines())
    ours = ("", "._autoload", "._names", ".activation")
    assert set(at_autoload) == {f"ds_byzantine{name}" for name in ours}
    assert by_import == []


def test_a_broken_plugin_never_breaks_torch(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['ds_byzantine.activation'] = None  # importing it raises ImportError\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    out = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.ones(1).item())"],
        env=environment() | {"PYTHONPATH": paths}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert out.stdout.strip() == "1.0"
    assert "ds_byzantine: not active in this process" in out.stderr


def test_detached_engines_give_stock_results():
    """uninstall() after training under the rule has begun: the engine's own reductions are back."""
    jobs = [
        {"name": "stock", "stage": 2, "steps": 2},
        {"name": "undone", "stage": 2, "steps": 2, "tamper": "uninstall", "byzantine": {"rule": "median", "f": 1}},
    ]
    results = run_world(jobs, 4, timeout=200)
    stock, undone = results["stock"][0], results["undone"][0]
    assert not undone.get("error"), undone
    assert undone["bound"] == []
    assert all(torch.equal(stock["weights"][n], undone["weights"][n]) for n in stock["weights"])
